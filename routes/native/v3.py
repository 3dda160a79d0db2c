"""POST /v3/chat/completions: questions in `contents`, each answered on its own, or a conversation in
`messages`.
"""

from pydantic import Field

from routes.chat import templates
from routes.http.errors import ApiError
from routes.native.batch import NativeReply, refuse_both
from routes.native.schemas import SamplingFields, Texts, validate
from routes.openai.messages import turns
from rwkv_batch.wire.protocol import GenerateRequest


class V3Fields(SamplingFields):
    """The body."""

    contents: Texts = Field(default_factory=list)
    messages: list = Field(default_factory=list)
    enable_think: bool = (
        False  # whether the model thinks aloud; its text then begins with the ">" of the prompt's "<think"
    )


def prepare(body: dict, model_id: str) -> tuple[GenerateRequest, bool, NativeReply]:
    """What to run and how to answer. Raises ApiError."""
    refuse_both(body)
    fields = validate(V3Fields, body)
    prompts: list[str | list[int]] = [_question(text, fields.enable_think) for text in fields.contents]
    if not prompts:
        prompts.append(_conversation(fields.messages, fields.enable_think))
    return fields.request(prompts), fields.stream, NativeReply(fields.model, id_="rwkv7-batch-v3")


def _question(text: str, think: bool) -> str:
    return f"User: {text}\n\nAssistant: " + (templates.THINK if think else templates.NO_THINK.rstrip("\n"))


def _conversation(messages: list, think: bool) -> str:
    """The transcript as in OpenAI chat, but without a line feed at its end: the answer begins with it."""
    spoken = turns(messages)
    if not any(turn.text.strip() or turn.tool_calls for turn in spoken):
        raise ApiError(400, "Empty prompts list: `contents` or `messages` must hold a text.")
    return templates.chat(spoken, think=think).rstrip("\n")
