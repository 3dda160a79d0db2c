"""POST /v1/messages and /v1/messages/count_tokens.

When an assistant message stands last it is continued. A thought comes back as a thinking block, also one that
the model begins its answer with unasked.
"""

from msgspec.structs import replace

from routes.anthropic.blocks import to_messages
from routes.anthropic.reply import MessageReply, TokenCount
from routes.anthropic.schemas import CountBody, MessagesBody
from routes.chat.answer import RowAnswer
from routes.http.errors import Json, openai_field
from routes.http.generate import Prepared
from rwkv_batch.chat import templates
from rwkv_batch.chat.checkpoints import chat_template
from rwkv_batch.config import FrontendConfig


def prepare(body: Json, model_id: str, settings: FrontendConfig) -> Prepared:
    """POST /v1/messages: a conversation is answered. Raises ApiError 400 for what cannot be served."""
    return _prepared(MessagesBody.from_json(body, settings.sampling_profile), model_id, settings)


def count_tokens(body: Json, model_id: str, settings: FrontendConfig) -> Prepared:
    """POST /v1/messages/count_tokens: the tokens of what /v1/messages would read. Raises ApiError 400."""
    made = _prepared(CountBody.from_json(body, settings.sampling_profile), model_id, settings)
    reply = TokenCount()
    reply.ignored = made.reply.ignored
    return Prepared(replace(made.request, max_tokens=0, grammar=None), False, reply)


def _prepared(message: MessagesBody, model_id: str, settings: FrontendConfig) -> Prepared:
    messages, use = to_messages(message.messages), message.tool_use()
    if not message.system_text.strip() and all(each.empty for each in messages):
        raise openai_field("messages", "at least one of them should hold a text")
    style = message.style(chat_template(model_id, settings), message.effort, "thinking.type")
    style = style.continuing(messages)
    prompt = templates.chat(messages, message.system_text, use.offered, use.choice, style, use.opening(style))
    stops, grammar = message.stop_sequences, use.grammar(style, message.grammar())
    request = message.model_copy(update={"stop": message.stop + stops}).request(
        [prompt], message.max_tokens, style, grammar=grammar
    )
    thoughts = message.thinking.display != "omitted"
    row = RowAnswer(use.reader(style))
    reply = MessageReply(model_id, row, stops, thoughts)
    reply.ignored = message.ignored()
    return Prepared(request, message.stream, reply)
