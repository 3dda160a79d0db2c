"""POST /api/chat and /api/generate.

Both stream unless `stream` is false, and without messages or a prompt both reply that the model is loaded, as
clients ask for it before they need it.
"""

from msgspec.structs import replace

from routes.chat.answer import AnswerReader, RowAnswer
from routes.http.errors import Json, native_field
from routes.http.generate import Prepared
from routes.http.open_lists import ignored
from routes.http.schemas import Prompts
from routes.ollama.reply import ChatAnswer, OllamaReply, TextAnswer
from routes.ollama.schemas import OllamaBody, OllamaChatBody, OllamaTextBody
from routes.openai.chat import DEFAULT_MAX_TOKENS
from routes.openai.tools import ToolUse
from rwkv_batch.chat import templates
from rwkv_batch.chat.checkpoints import chat_template
from rwkv_batch.chat.templates import Message
from rwkv_batch.config import FrontendConfig
from rwkv_batch.wire.protocol import Grammar


def chat(body: Json, model_id: str, settings: FrontendConfig) -> Prepared:
    """POST /api/chat: a conversation is answered. Raises ApiError 400 for what cannot be served."""
    fields = OllamaChatBody.from_json(body, settings.sampling_profile)
    messages = [message.read() for message in fields.messages]
    if messages and all(message.empty for message in messages):
        raise native_field("messages", "at least one of them must hold a text")
    style = fields.style(chat_template(model_id, settings)).continuing(messages)
    use = fields.tool_use()
    prompt = templates.chat(messages, tools=use.offered, style=style)
    reply = ChatAnswer(model_id, RowAnswer(use.reader(style)), fields.logprobs)
    reply.ignored = ignored("tools", fields.tools)
    prompts: Prompts = [prompt] if messages else []
    return _prepared(fields, prompts, style, reply, use.grammar(style, fields.grammar()))


def is_chat(body: Json) -> bool:
    """Whether the prompt of a body of /api/generate is rendered as a chat. Raises ApiError 400."""
    return OllamaTextBody.from_json(body).is_chat


def text(body: Json, model_id: str, settings: FrontendConfig) -> Prepared:
    """POST /api/generate: one prompt, as a chat unless it is `raw` or stands before a `suffix`.

    Raises ApiError 400 for what cannot be served.
    """
    fields = OllamaTextBody.from_json(body, settings.sampling_profile)
    if not (fields.prompt or fields.suffix):
        return _prepared(fields, [], None, TextAnswer(model_id, RowAnswer(AnswerReader()), False))
    if not fields.is_chat:
        fields.check_raw()
        prompt = fields.prompt
        if fields.suffix:
            prompt = templates.fill_in_the_middle(fields.prompt, fields.suffix)
        reply = TextAnswer(model_id, RowAnswer(AnswerReader()), fields.logprobs)
        return _prepared(fields, [prompt], None, reply, fields.grammar())
    if not (fields.prompt + fields.system).strip():
        raise native_field("prompt", "must hold a text")
    style = fields.style(chat_template(model_id, settings))
    prompt = templates.chat([Message("user", fields.prompt)], fields.system, style=style)
    reader = ToolUse([], "none", False, True).reader(style)
    reply = TextAnswer(model_id, RowAnswer(reader), fields.logprobs)
    return _prepared(fields, [prompt], style, reply, fields.grammar())


def _prepared(
    fields: OllamaBody,
    prompts: Prompts,
    style: templates.Style | None,
    reply: OllamaReply,
    grammar: Grammar | None = None,
) -> Prepared:
    """The first delta tells how long the prompt took, so deltas are small also when nothing is streamed."""
    max_tokens = DEFAULT_MAX_TOKENS if fields.max_tokens is None else fields.max_tokens
    request = fields.request(prompts, max_tokens, style, fields.wanted_logprobs, grammar=grammar)
    return Prepared(replace(request, flush_tokens=request.flush_tokens or 1), fields.stream, reply)
