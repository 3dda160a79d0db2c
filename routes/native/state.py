"""POST /state/chat/completions: one raw prompt, continuing the state of a session."""

from pydantic import Field

from routes.chat.templates import SEAM
from routes.http.errors import ApiError
from routes.native.batch import NativeReply
from routes.native.schemas import SamplingFields, SessionId, Texts, validate
from rwkv_batch.wire.protocol import GenerateRequest, SessionTurn


class StateFields(SamplingFields):
    """The body."""

    contents: Texts = Field(default_factory=list)
    session_id: SessionId | None = None  # without one: a fresh state, and nothing is stored


def prepare(body: dict, model_id: str) -> tuple[GenerateRequest, bool, NativeReply]:
    """What to run and how to answer. Raises ApiError."""
    fields = validate(StateFields, body)
    key = fields.session_id
    turn = None if key is None else SessionTurn(source=key, target=key, seam=SEAM)
    return fields.request([single_prompt(fields.contents)], turn), fields.stream, NativeReply(fields.model)


def single_prompt(contents: list[str]) -> str:
    """Raises ApiError 400 unless there is exactly one."""
    if len(contents) != 1:
        raise ApiError(
            400,
            f"Request must be single prompt: `contents` has {len(contents)} texts and a turn takes one.",
            param="contents",
        )
    return contents[0]
