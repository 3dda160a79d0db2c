"""POST /api/chat and /api/generate.

Both stream unless `stream` is false, and without messages or a prompt both reply that the model is loaded, as
clients ask for it before they need it.
"""

from msgspec.structs import replace

from routes.chat import templates
from routes.chat.answer import AnswerReader, RowAnswer
from routes.chat.checkpoints import chat_template
from routes.chat.templates import Message
from routes.http.errors import ApiError, Json
from routes.http.generate import Prepared
from routes.http.schemas import END_OF_TEXT, Prompts
from routes.ollama.reply import ChatAnswer, OllamaReply, TextAnswer
from routes.ollama.schemas import OllamaBody, OllamaChatBody, OllamaTextBody
from routes.openai.chat import DEFAULT_MAX_TOKENS
from routes.openai.tools import ToolUse
from rwkv_batch.config import FrontendConfig


def chat(body: Json, model_id: str, settings: FrontendConfig) -> Prepared:
    """POST /api/chat: a conversation is answered. Raises ApiError 400 for what cannot be served."""
    fields = OllamaChatBody.from_json(body, settings.sampling_profile)
    messages = [message.read() for message in fields.messages]
    if messages and all(message.empty for message in messages):
        raise ApiError(400, "`messages`: at least one of them must hold a text.", param="messages")
    style = fields.style(chat_template(model_id, settings.chat_template)).continuing(messages)
    use = fields.tool_use()
    prompt = templates.chat(messages, tools=use.offered, style=style)
    reply = ChatAnswer(model_id, RowAnswer(use.reader(style)), fields.logprobs)
    return _prepared(fields, [prompt] if messages else [], style, reply)


def text(body: Json, model_id: str, settings: FrontendConfig) -> Prepared:
    """POST /api/generate: one prompt, as a chat unless it is `raw` or stands before a `suffix`.

    Raises ApiError 400 for what cannot be served.
    """
    fields = OllamaTextBody.from_json(body, settings.sampling_profile)
    if not (fields.prompt or fields.suffix):
        return _prepared(fields, [], None, TextAnswer(model_id, RowAnswer(AnswerReader()), False))
    if fields.suffix or fields.raw:
        prompts: Prompts = [fields.prompt or [END_OF_TEXT]]
        if fields.suffix:
            prompts = [templates.fill_in_the_middle(fields.prompt, fields.suffix)]
        reply = TextAnswer(model_id, RowAnswer(AnswerReader()), fields.logprobs)
        return _prepared(fields, prompts, None, reply)
    style = fields.style(chat_template(model_id, settings.chat_template))
    prompt = templates.chat([Message("user", fields.prompt)], fields.system, style=style)
    reader = ToolUse([], "none", False, True).reader(style)
    return _prepared(fields, [prompt], style, TextAnswer(model_id, RowAnswer(reader), fields.logprobs))


def _prepared(
    fields: OllamaBody, prompts: Prompts, style: templates.Style | None, reply: OllamaReply
) -> Prepared:
    """The first delta tells how long the prompt took, so deltas are small also when nothing is streamed."""
    max_tokens = DEFAULT_MAX_TOKENS if fields.max_tokens is None else fields.max_tokens
    request = fields.request(prompts, max_tokens, style, fields.wanted_logprobs)
    return Prepared(replace(request, flush_tokens=request.flush_tokens or 1), fields.stream, reply)
