"""The native routes about stored sessions: list, delete, export to a file, import, copy."""

import time
import uuid

from robyn import Response

from routes.http.errors import ApiError, Json, native_field
from routes.http.exchange import HttpRequest, authorized_json, demand_password, file_response, json_response
from routes.http.frontend import Frontend
from routes.http.schemas import RESPONSE
from routes.native.schemas import SessionFields, SessionId
from rwkv_batch.wire.protocol import (
    DeleteSession,
    ExportSession,
    ForkSession,
    ImportSession,
    ListSessions,
    SessionInfo,
)

LEVELS = {"L1": "L1 (VRAM)", "L2": "L2 (RAM)", "L3": "Database (Disk)"}


class DeleteFields(SessionFields):
    """The body of /state/delete."""

    delete_prefix: bool = False  # whether to delete all sessions whose id begins with "{session_id}:"


class ImportFields(SessionFields):
    """The URL parameters of /v1/state/import."""

    session_id: SessionId


class ForkFields(SessionFields):
    """The body of /v1/state/fork."""

    new_session_id: SessionId
    overwrite: bool = False  # whether a session of the new id is replaced


async def status(front: Frontend, http: HttpRequest) -> Response:
    """POST /state/status: every stored session once, by the fastest tier that has it. Raises ApiError."""
    authorized_json(front.settings.password, http)
    found = (await front.ask(ListSessions(uuid.uuid4().hex))).sessions
    counts = {level: sum(1 for s in found if s.tier == level) for level in LEVELS}
    return json_response(
        http,
        {
            "status": "success",
            "total_sessions": len(found),
            "l1_cache_count": counts["L1"],
            "l2_cache_count": counts["L2"],
            "database_count": counts["L3"],
            "sessions": [_listed(s) for s in sorted(found, key=lambda s: s.tier)],
        },
    )


def _listed(session: SessionInfo) -> dict[str, object]:
    return {
        "session_id": session.key,
        "cache_level": LEVELS[session.tier],
        "timestamp": session.updated,
        "tokens": session.tokens,
        "last_updated": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(session.updated))
        if session.tier == "L3"
        else "In Memory",
    }


async def delete(front: Frontend, http: HttpRequest) -> Response:
    """POST /state/delete. Raises ApiError."""
    fields = DeleteFields.from_json(authorized_json(front.settings.password, http))
    key = fields.session_id
    if fields.delete_prefix and key == RESPONSE:
        raise native_field(
            "session_id",
            "with delete_prefix this would take the states of stored responses; delete those one by one",
        )
    command = DeleteSession(uuid.uuid4().hex, key, fields.delete_prefix)
    if not (await front.ask(command)).found and not fields.delete_prefix:
        missing = {"status": "not_found", "message": f"Session {key} not found in database"}
        return json_response(http, missing, 404)
    return json_response(http, {"status": "success", "message": f"Session {key} deleted successfully"})


async def export(front: Frontend, http: HttpRequest) -> Response:
    """GET or POST /v1/state/export: the session named in the URL or in the body. Raises ApiError."""
    body = authorized_json(front.settings.password, http)
    if "session_id" not in body:
        body = _url_fields(http)
    key = SessionFields.from_json(body).session_id
    reply = await front.ask(ExportSession(uuid.uuid4().hex, key))
    return file_response(http, reply.data, f"{key}.rwkvstate")


async def import_(front: Frontend, http: HttpRequest) -> Response:
    """POST /v1/state/import: an exported file replaces the session named in the URL. Raises ApiError."""
    demand_password(front.settings.password, http)
    key = ImportFields.from_json(_url_fields(http)).session_id
    data = http.body if isinstance(http.body, bytes) else http.body.encode()
    if not data:
        raise ApiError(400, "The body is empty; send a file that /v1/state/export has made.")
    if len(data) > front.settings.max_state:
        raise ApiError(
            413, f"The file has {len(data)} bytes and at most {front.settings.max_state} are taken."
        )
    await front.ask(ImportSession(uuid.uuid4().hex, key, data))
    return json_response(
        http, {"status": "success", "message": f"Session {key} imported successfully", "session_id": key}
    )


async def fork(front: Frontend, http: HttpRequest) -> Response:
    """POST /v1/state/fork: a copy of a session under a new id; nothing is computed. Raises ApiError."""
    fields = ForkFields.from_json(authorized_json(front.settings.password, http))
    old, new = fields.session_id, fields.new_session_id
    if new == old:
        raise native_field("new_session_id", "must differ from session_id")
    await front.ask(ForkSession(uuid.uuid4().hex, old, new, fields.overwrite))
    return json_response(
        http, {"status": "success", "message": f"Session {old} copied successfully", "session_id": new}
    )


def _url_fields(http: HttpRequest) -> Json:
    return {"session_id": http.parameter("session_id")}
