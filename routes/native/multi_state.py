"""POST /multi_state/chat/completions: a tree of turns. Each turn makes a new node; every earlier one stays to
branch from.

Node n of a session is stored under the key "{session_id}:{n}".
"""

from typing import Annotated

from pydantic import Field

from routes.chat.templates import SEAM
from routes.http.errors import ApiError
from routes.http.replies import RowResult
from routes.native.batch import NativeReply
from routes.native.schemas import SessionId, Whole, validate
from routes.native.sessions import demand_id
from routes.native.state import StateFields, single_prompt
from rwkv_batch.wire.client import Job
from rwkv_batch.wire.protocol import GenerateRequest, SessionTurn

ROOT = 0  # the node that a conversation begins at; nobody needs to have stored it


class MultiStateFields(StateFields):
    """The body."""

    session_id: SessionId
    dialogue_idx: Annotated[Whole, Field(ge=0)] | None  # the node to continue; null: the root


class MultiStateReply(NativeReply):
    """The native shapes, and the number of the new node."""

    def __init__(self, model: str, parent: int) -> None:
        super().__init__(model, id_="rwkv7-multi-state")
        self._parent = parent

    def whole(self, job: Job, rows: list[RowResult]) -> dict:
        return super().whole(job, rows) | {"dialogue_idx": _number(job.target)}

    def last(self, job: Job) -> list[dict]:
        return [
            {
                "object": "multi_state.dialogue_idx",
                "session_id": job.target,
                "dialogue_idx": _number(job.target),
            }
        ]

    def error(self, message: str, status: int) -> dict:
        return super().error(
            f"State not found for dialogue_idx={self._parent}" if status == 404 else message, status
        )


def prepare(body: dict, model_id: str) -> tuple[GenerateRequest, bool, MultiStateReply]:
    """What to run and how to answer. Raises ApiError."""
    if "dialogue_idx" not in body:
        raise ApiError(400, "Missing dialogue_idx parameter", param="dialogue_idx")
    demand_id(body)
    fields = validate(MultiStateFields, body)
    parent = fields.dialogue_idx or ROOT
    turn = SessionTurn(
        source=f"{fields.session_id}:{parent}", branch=fields.session_id, required=parent != ROOT, seam=SEAM
    )
    return (
        fields.request([single_prompt(fields.contents)], turn),
        fields.stream,
        MultiStateReply(fields.model, parent),
    )


def _number(key: str) -> int:
    return int(key.rpartition(":")[2])
