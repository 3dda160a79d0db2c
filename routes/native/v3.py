"""POST /v3/chat/completions: single questions in `contents`, or a conversation in `messages`."""

from typing import Any

from pydantic import Field

from routes.chat import templates
from routes.chat.messages import parse_messages
from routes.http.errors import ApiError, Json
from routes.http.generate import Prepared
from routes.http.schemas import Prompts
from routes.native.batch import BatchFields, NativeReply, refuse_both


class V3Fields(BatchFields):
    """The body."""

    messages: list[Any] = Field(default_factory=list)
    # whether the model thinks first; its text then begins with the ">" of the prompt's "<think"
    enable_think: bool = False


def prepare(body: Json, model_id: str) -> Prepared:
    """Raises ApiError."""
    refuse_both(body)
    fields = V3Fields.from_json(body)
    prompts: Prompts = [_question(text, fields.enable_think) for text in fields.contents]
    if not prompts:
        prompts.append(_conversation(fields.messages, fields.enable_think))
    return Prepared(fields.request(prompts), fields.stream, NativeReply(fields.model, id_="rwkv7-batch-v3"))


def _question(text: str, think: bool) -> str:
    return f"User: {text}\n\nAssistant: " + (templates.THINK if think else templates.NO_THINK.rstrip("\n"))


def _conversation(messages: list[Any], think: bool) -> str:
    """The transcript as in OpenAI chat, but without a line feed at its end: the answer begins with it."""
    parsed = parse_messages(messages)
    if all(message.empty for message in parsed):
        raise ApiError(400, "Empty prompts list: `contents` or `messages` must hold a text.")
    return templates.chat(parsed, think=think).rstrip("\n")
