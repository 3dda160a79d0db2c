"""The vocabulary over HTTP: /tokenize, /detokenize and /tokenizer_info as vLLM has them; /v1/tokens/count.

Counts and ids are those that the server itself feeds. Special tokens are not read in texts; only a text that
is END_NAME in whole is the token of that name, as clients ask in this way what its id is.
"""

from typing import Annotated, Any
from uuid import uuid4

from pydantic import BeforeValidator, Field
from robyn import Response

from routes.chat.jinja import jinja_template
from routes.http.access import authorized_json, demand_access
from routes.http.errors import Json, native_field, openai_field
from routes.http.exchange import HttpRequest, json_response
from routes.http.frontend import Frontend
from routes.http.model_field import ask_model, read_model
from routes.http.schemas import INT_LIMIT, LAST_ID, Int, RequestBody
from routes.openai import chat
from routes.openai.legacy_logprobs import token_text
from routes.openai.shapes import TextTokens, TokenizerInfo
from rwkv_batch.chat.checkpoints import END_OF_TEXT, chat_template, settings_for
from rwkv_batch.wire.commands import Detokenize, Tokenize
from rwkv_batch.wire.supervision import EngineInfo

END_NAME = "<|endoftext|>"


def _no_template(value: object) -> object:
    if value is not None:
        raise ValueError("templates of requests are not run here; choose a form with chat_template_kwargs")
    return value


class TokenizeBody(RequestBody):
    """POST /tokenize: a text, or a chat whose other fields are those of chat completions.

    `add_special_tokens` changes nothing, as the vocabulary adds none to a text.
    """

    field_error = staticmethod(openai_field)

    prompt: str | None = None
    messages: list[Any] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool | None = False
    chat_template: Annotated[object, BeforeValidator(_no_template)] = None


class DetokenizeBody(RequestBody):
    """POST /detokenize."""

    field_error = staticmethod(openai_field)

    tokens: list[Annotated[Int, Field(ge=0, le=LAST_ID)]]


class TokenCountBody(RequestBody):
    """POST /v1/tokens/count: one of these."""

    text: str | None = None
    contents: list[str] | None = None
    messages: list[Any] | None = None


async def tokenize(front: Frontend, http: HttpRequest) -> Response:
    """POST /tokenize. Raises ApiError."""
    body = authorized_json(front, http, required=True)
    fields = TokenizeBody.from_json(body)
    if (fields.prompt is None) == (fields.messages is None):
        raise openai_field("prompt", "send a text here, or a chat as messages, not both")
    lead: list[int] = []
    if fields.messages is None:
        text = fields.prompt or ""
        if text == END_NAME:
            lead, text = [END_OF_TEXT], ""
    else:
        model = (await read_model(front, http, body)).model
        lead, text = _rendered(front, model, body)
    reply = await ask_model(front, http, body, Tokenize(uuid4().hex, [text]))
    ids = lead + reply.token_ids[0]
    found: TextTokens = {"count": len(ids), "max_model_len": INT_LIMIT, "tokens": ids}
    if fields.return_token_strs:
        found["token_strs"] = [END_NAME] * len(lead) + list(map(token_text, reply.token_bytes))
    return json_response(http, found)


async def detokenize(front: Frontend, http: HttpRequest) -> Response:
    """POST /detokenize; bytes that are no characters become U+FFFD. Raises ApiError."""
    body = authorized_json(front, http, required=True)
    tokens = DetokenizeBody.from_json(body).tokens
    reply = await ask_model(front, http, body, Detokenize(uuid4().hex, tokens))
    return json_response(http, {"prompt": b"".join(reply.token_bytes).decode(errors="replace")})


async def count(front: Frontend, http: HttpRequest) -> Response:
    """POST /v1/tokens/count: how many tokens a text, several texts or a chat have. Raises ApiError."""
    body = authorized_json(front, http, required=True)
    fields = TokenCountBody.from_json(body)
    given = {name: value for name, value in fields if value is not None}
    if len(given) != 1:
        raise native_field("text", "must be there, or one of contents and messages, and only one of them")
    lead: list[int] = []
    texts = [fields.text or ""] if fields.contents is None else fields.contents
    if fields.messages is not None:
        model = (await read_model(front, http, body)).model
        lead, text = _rendered(front, model, body)
        texts = [text]
    reply = await ask_model(front, http, body, Tokenize(uuid4().hex, texts))
    return json_response(http, {"tokens": len(lead) + len(reply.token_bytes)})


async def info(front: Frontend, http: HttpRequest) -> Response:
    """GET /tokenizer_info, also with `model` in the URL. Raises ApiError."""
    demand_access(front, http)
    model = (await read_model(front, http, {"model": http.parameter("model")})).model
    if not model.texts:
        words = f"its {model.vocabulary:,} tokens are not those of the World vocabulary, and have no texts"
        raise openai_field("model", words)
    settings = settings_for(model, front.settings)
    template = chat_template(model.checkpoint, settings)
    found: TokenizerInfo = {
        "tokenizer_class": "RwkvTokenizer",
        "vocab_size": model.vocabulary,
        "model_max_length": INT_LIMIT,
        "bos_token": END_NAME,
        "eos_token": END_NAME,
        "bos_token_id": END_OF_TEXT,
        "eos_token_id": END_OF_TEXT,
        "add_bos_token": bool(template.lead),  # in front of chats
        "chat_template": jinja_template(template),
    }
    return json_response(http, found)


def _rendered(front: Frontend, model: EngineInfo, body: Json) -> tuple[list[int], str]:
    """A chat as chat completions feed it: the ids in front, and its text. Raises ApiError 400."""
    request = chat.prepare(body, model.model, settings_for(model, front.settings)).request
    (prompt,) = request.prompts
    assert isinstance(prompt, str)
    return request.prefix_ids, prompt
