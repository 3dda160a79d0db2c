"""The native routes about stored sessions of a model: list, delete, export to a file, import, copy."""

import time
import uuid
from typing import Annotated

from pydantic import Field
from robyn import Response

from routes.http.access import authorized_json, demand_access
from routes.http.errors import ApiError, Json, native_field
from routes.http.exchange import HttpRequest, file_response, json_response
from routes.http.frontend import Frontend
from routes.http.model_field import ask_model
from routes.http.schemas import RESPONSE, RequestBody
from routes.native.schemas import SessionFields, SessionId, StoredId, Whole
from routes.native.shapes import ListedSession, SessionTurns, SessionTurnText, StoredSessions, owner_of
from rwkv_batch.wire.commands import (
    DeleteSession,
    ExportParts,
    ExportSession,
    ForkSession,
    ImportSession,
    ListSessions,
    RewindSession,
    SessionHistory,
)
from rwkv_batch.wire.protocol import SessionInfo, TurnInfo, owner_and_name

LEVELS = {"L1": "L1 (VRAM)", "L2": "L2 (RAM)", "L3": "Database (Disk)"}


class DeleteFields(SessionFields):
    """The body of /state/delete."""

    delete_prefix: bool = False  # whether to delete all sessions whose id begins with "{session_id}:"


class StatusFields(RequestBody):
    """The body of /state/status."""

    limit: Annotated[Whole, Field(ge=1)] | None = None  # sessions listed, in the order of their ids
    after: StoredId | None = None  # the id behind which the list begins


class HistoryFields(SessionFields):
    """The URL parameters of /v1/state/history."""

    limit: Annotated[Whole, Field(ge=1)] | None = None  # turns
    after: Annotated[Whole, Field(ge=0)] = 0  # the number of the turn behind which they begin


class RewindFields(SessionFields):
    """The body of /v1/state/rewind."""

    session_id: SessionId
    turn: Annotated[Whole, Field(ge=0)]  # how many turns stay


class ExportFields(SessionFields):
    """The body of /v1/state/export, or its URL parameters."""

    what: ExportParts = "both"


class ImportFields(SessionFields):
    """The URL parameters of /v1/state/import."""

    session_id: SessionId


class ForkFields(SessionFields):
    """The body of /v1/state/fork."""

    new_session_id: SessionId
    overwrite: bool = False  # whether a session of the new id is replaced
    turn: Annotated[Whole, Field(ge=1)] | None = None  # the copy ends with this turn; null: with the last


async def status(front: Frontend, http: HttpRequest) -> Response:
    """POST /state/status: every stored session once, by the fastest tier that has it, or a page of them.

    Raises ApiError.
    """
    body = authorized_json(front, http)
    fields = StatusFields.from_json(body)
    found = await ask_model(front, http, body, ListSessions(uuid.uuid4().hex, fields.after, fields.limit))
    paged = fields.after is not None or fields.limit is not None
    sessions = found.sessions if paged else sorted(found.sessions, key=lambda s: s.tier)
    listed: StoredSessions = {
        "status": "success",
        "total_sessions": found.total,
        "l1_cache_count": found.l1,
        "l2_cache_count": found.l2,
        "database_count": found.total - found.l1 - found.l2,
        "sessions": [_listed(s) for s in sessions],
    }
    return json_response(http, listed)


def _listed(session: SessionInfo) -> ListedSession:
    owner, key = owner_and_name(session.key)
    return {
        **owner_of(owner),
        "session_id": key,
        "cache_level": LEVELS[session.tier],
        "timestamp": session.updated,
        "tokens": session.tokens,
        "last_updated": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(session.updated))
        if session.tier == "L3"
        else "In Memory",
    }


async def delete(front: Frontend, http: HttpRequest) -> Response:
    """POST /state/delete. Raises ApiError."""
    body = authorized_json(front, http)
    fields = DeleteFields.from_json(body)
    key = fields.session_id
    if fields.delete_prefix and key == RESPONSE:
        raise native_field(
            "session_id",
            "with delete_prefix this would take the states of stored responses; delete those one by one",
        )
    command = DeleteSession(uuid.uuid4().hex, key, fields.delete_prefix)
    if not (await ask_model(front, http, body, command)).found and not fields.delete_prefix:
        missing = {"status": "not_found", "message": f"Session {key} not found in database"}
        return json_response(http, missing, 404)
    return json_response(http, {"status": "success", "message": f"Session {key} deleted successfully"})


async def export(front: Frontend, http: HttpRequest) -> Response:
    """GET or POST /v1/state/export: the session named in the URL or in the body. Raises ApiError."""
    body = authorized_json(front, http)
    body = body if "session_id" in body else _url_fields(http, "what", "model")
    fields = ExportFields.from_json(body)
    key = fields.session_id
    reply = await ask_model(front, http, body, ExportSession(uuid.uuid4().hex, key, fields.what))
    return file_response(http, reply.data, f"{key}.rwkvstate")


async def import_(front: Frontend, http: HttpRequest) -> Response:
    """POST /v1/state/import: an exported file replaces the session named in the URL. Raises ApiError."""
    demand_access(front, http)
    given = _url_fields(http, "model")
    key = ImportFields.from_json(given).session_id
    data = http.data(front.settings.max_state)
    if not data:
        raise ApiError(400, "The body is empty; send a file that /v1/state/export has made.")
    if len(data) > front.settings.max_state:
        raise ApiError(
            413, f"The file has {len(data)} bytes and at most {front.settings.max_state} are taken."
        )
    await ask_model(front, http, given, ImportSession(uuid.uuid4().hex, key, data))
    return json_response(
        http, {"status": "success", "message": f"Session {key} imported successfully", "session_id": key}
    )


async def fork(front: Frontend, http: HttpRequest) -> Response:
    """POST /v1/state/fork: a copy of a session under a new id; nothing is computed. Raises ApiError."""
    body = authorized_json(front, http)
    fields = ForkFields.from_json(body)
    old, new = fields.session_id, fields.new_session_id
    if new == old:
        raise native_field("new_session_id", "must differ from session_id")
    command = ForkSession(uuid.uuid4().hex, old, new, fields.turn, fields.overwrite)
    await ask_model(front, http, body, command)
    return json_response(
        http, {"status": "success", "message": f"Session {old} copied successfully", "session_id": new}
    )


async def history(front: Frontend, http: HttpRequest) -> Response:
    """GET /v1/state/history: the turns of the session named in the URL. Raises ApiError."""
    demand_access(front, http)
    given = _url_fields(http, "limit", "after", "model")
    fields = HistoryFields.from_json(given)
    key = fields.session_id
    command = SessionHistory(uuid.uuid4().hex, key, fields.after, fields.limit)
    found = await ask_model(front, http, given, command)
    turns = [_to_json(turn) for turn in found.turns]
    reply: SessionTurns = {
        "object": "session.history",
        "session_id": key,
        "position": found.position,
        "turns": turns,
    }
    return json_response(http, reply)


def _to_json(turn: TurnInfo) -> SessionTurnText:
    return {
        "turn": turn.number,
        "start": turn.start,
        "end": turn.end,
        "prompt": turn.prompt,
        "completion": turn.completion,
        "prompt_tokens": turn.prompt_tokens,
        "completion_tokens": turn.completion_tokens,
        "created": turn.created,
    }


async def rewind(front: Frontend, http: HttpRequest) -> Response:
    """POST /v1/state/rewind: the first turns of a session stay, the others are forgotten. Raises ApiError."""
    body = authorized_json(front, http)
    fields = RewindFields.from_json(body)
    key, turn = fields.session_id, fields.turn
    found = await ask_model(front, http, body, RewindSession(uuid.uuid4().hex, key, turn))
    return json_response(
        http, {"status": "success", "session_id": key, "turn": turn, "position": found.position}
    )


def _url_fields(http: HttpRequest, *optional: str) -> Json:
    """The session's id, and those of the other parameters that are there."""
    given = {name: http.parameter(name) for name in optional if name in http.query}
    return {"session_id": http.parameter("session_id")} | given
