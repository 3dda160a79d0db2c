"""POST /state/chat/completions: one raw prompt, continuing the state of a session."""

from routes.chat.templates import SEAM
from routes.http.errors import ApiError, Json
from routes.http.generate import Prepared
from routes.native.batch import BatchFields, NativeReply
from routes.native.schemas import SessionId
from rwkv_batch.wire.protocol import SessionTurn


class StateFields(BatchFields):
    """The body."""

    session_id: SessionId | None = None  # without one: a fresh state, and nothing is stored


def prepare(body: Json, model_id: str) -> Prepared:
    """Raises ApiError."""
    fields = StateFields.from_json(body)
    key = fields.session_id
    turn = None if key is None else SessionTurn(source=key, target=key, seam=SEAM)
    request = fields.request([single_prompt(fields.contents)], turn)
    return Prepared(request, fields.stream, NativeReply(fields.model))


def single_prompt(contents: list[str]) -> str:
    """Raises ApiError 400 unless there is exactly one."""
    if len(contents) != 1:
        raise ApiError(
            400,
            f"Request must be single prompt: `contents` has {len(contents)} texts and a turn takes one.",
            param="contents",
        )
    return contents[0]
