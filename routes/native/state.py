"""The native routes that continue the state of a session: one conversation, or a tree of turns."""

from typing import Annotated

from msgspec.structs import replace
from pydantic import Field

from routes.http.errors import ApiError, Json
from routes.http.generate import Prepared
from routes.native.batch import BatchFields, NativeReply
from routes.native.schemas import SessionId, Whole, demand_session_id
from rwkv_batch.chat.templates import SEPARATOR
from rwkv_batch.wire.client import Job
from rwkv_batch.wire.protocol import RowDelta, SessionTurn

ROOT = 0  # the node that a conversation begins at, stored or not


class StateFields(BatchFields):
    """The body of /state."""

    session_id: SessionId | None = None  # without one: a fresh state, and nothing is stored

    def prompt(self) -> str:
        """Raises ApiError 400 unless there is exactly one."""
        if (count := len(self.contents)) != 1:
            raise ApiError(
                400,
                f"Request must be single prompt: `contents` has {count} texts and a turn takes one.",
                param="contents",
            )
        return self.contents[0]


class MultiStateFields(StateFields):
    """The body of /multi_state."""

    session_id: SessionId
    dialogue_idx: Annotated[Whole, Field(ge=0)] | None  # the node to continue; null: the root


class MultiStateReply(NativeReply):
    """The native reply, and the number of the new node."""

    def __init__(self, model: str, parent: int) -> None:
        super().__init__(model, id_="rwkv7-multi-state")
        self._parent = parent

    def whole(self, job: Job, deltas: list[RowDelta]) -> Json:
        return super().whole(job, deltas) | {"dialogue_idx": _number(job.acceptance.target)}

    def last(self, job: Job) -> list[Json]:
        return [
            {
                "object": "multi_state.dialogue_idx",
                "session_id": job.acceptance.target,
                "dialogue_idx": _number(job.acceptance.target),
            }
        ]

    def error(self, message: str, status: int, param: str | None = None) -> Json:
        not_found = f"State not found for dialogue_idx={self._parent}"
        return super().error(not_found if status == 404 else message, status, param)


def session(body: Json, model_id: str) -> Prepared:
    """POST /state/chat/completions: one raw prompt, continuing the state of a session. Raises ApiError."""
    fields = StateFields.from_json(body)
    key = fields.session_id
    turn = None if key is None else SessionTurn(source=key, target=key, separator=SEPARATOR)
    return Prepared(fields.request([fields.prompt()], turn), fields.stream, NativeReply(fields.model))


def tree(body: Json, model_id: str) -> Prepared:
    """POST /multi_state/chat/completions: a tree of turns; each makes a node, and any node can be continued.

    Node n of a session is stored under the key "{session_id}:{n}". Raises ApiError.
    """
    if "dialogue_idx" not in body:
        raise ApiError(400, "Missing dialogue_idx parameter", param="dialogue_idx")
    demand_session_id(body)
    fields = MultiStateFields.from_json(body)
    parent = fields.dialogue_idx or ROOT
    source = f"{fields.session_id}:{parent}"
    turn = SessionTurn(source=source, branch=fields.session_id, required=parent != ROOT, separator=SEPARATOR)
    request = replace(fields.request([fields.prompt()], turn), pausable=False)
    return Prepared(request, fields.stream, MultiStateReply(fields.model, parent))


def _number(key: str) -> int:
    return int(key.rpartition(":")[2])
