"""POST /multi_state/chat/completions: a tree of turns; each makes a node, and any node can be continued.

Node n of a session is stored under the key "{session_id}:{n}".
"""

from typing import Annotated

from pydantic import Field

from routes.chat.templates import SEAM
from routes.http.errors import ApiError, Json
from routes.http.generate import Prepared
from routes.http.replies import RowResult
from routes.native.batch import NativeReply
from routes.native.schemas import SessionId, Whole, demand_session_id
from routes.native.state import StateFields, single_prompt
from rwkv_batch.wire.client import Job
from rwkv_batch.wire.protocol import SessionTurn

ROOT = 0  # the node that a conversation begins at, stored or not


class MultiStateFields(StateFields):
    """The body."""

    session_id: SessionId
    dialogue_idx: Annotated[Whole, Field(ge=0)] | None  # the node to continue; null: the root


class MultiStateReply(NativeReply):
    """The native reply, and the number of the new node."""

    def __init__(self, model: str, parent: int) -> None:
        super().__init__(model, id_="rwkv7-multi-state")
        self._parent = parent

    def whole(self, job: Job, rows: list[RowResult]) -> Json:
        return super().whole(job, rows) | {"dialogue_idx": _number(job.target)}

    def last(self, job: Job) -> list[Json]:
        return [
            {
                "object": "multi_state.dialogue_idx",
                "session_id": job.target,
                "dialogue_idx": _number(job.target),
            }
        ]

    def error(self, message: str, status: int) -> Json:
        not_found = f"State not found for dialogue_idx={self._parent}"
        return super().error(not_found if status == 404 else message, status)


def prepare(body: Json, model_id: str) -> Prepared:
    """Raises ApiError."""
    if "dialogue_idx" not in body:
        raise ApiError(400, "Missing dialogue_idx parameter", param="dialogue_idx")
    demand_session_id(body)
    fields = MultiStateFields.from_json(body)
    parent = fields.dialogue_idx or ROOT
    source = f"{fields.session_id}:{parent}"
    turn = SessionTurn(source=source, branch=fields.session_id, required=parent != ROOT, seam=SEAM)
    request = fields.request([single_prompt(fields.contents)], turn)
    return Prepared(request, fields.stream, MultiStateReply(fields.model, parent))


def _number(key: str) -> int:
    return int(key.rpartition(":")[2])
