"""/v1/state/export makes a file of a session, /v1/state/import takes one, /v1/state/fork copies a session."""

import uuid

from robyn import Response

from routes.http.auth import authorized_json, demand_password
from routes.http.errors import ApiError, Json, native_field
from routes.http.exchange import HttpRequest, file_response, json_response
from routes.http.frontend import Frontend
from routes.native.schemas import SessionFields, SessionId
from rwkv_batch.wire.protocol import ExportSession, ForkSession, ImportSession

SUFFIX = ".rwkvstate"


class ImportFields(SessionFields):
    """The URL parameters of /v1/state/import."""

    session_id: SessionId


class ForkFields(SessionFields):
    """The body of /v1/state/fork."""

    new_session_id: SessionId
    overwrite: bool = False  # whether a session of the new id is replaced


async def export(front: Frontend, http: HttpRequest) -> Response:
    """GET or POST /v1/state/export: the session named in the URL or in the body. Raises ApiError."""
    body = authorized_json(front.settings.password, http)
    if "session_id" not in body:
        body = _url_fields(http)
    key = SessionFields.from_json(body).session_id
    reply = await front.ask(ExportSession(uuid.uuid4().hex, key))
    return file_response(http, reply.data, key + SUFFIX)


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
