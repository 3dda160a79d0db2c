"""Sessions as files: /v1/state/export hands one out, /v1/state/import takes one in; /v1/state/fork copies one
on the server.
"""

import uuid

from pydantic import BaseModel
from robyn import Response

from routes.http import auth
from routes.http.errors import ApiError
from routes.http.exchange import Call, file_response, json_response
from routes.http.frontend import Frontend
from routes.native.schemas import SessionId, validate
from routes.native.sessions import Named, ask, demand_id, read
from rwkv_batch.wire.protocol import ExportSession, ForkSession, ImportSession

SUFFIX = ".rwkvstate"


class Fork(Named):
    """The body of /v1/state/fork."""

    new_session_id: SessionId
    overwrite: bool = False  # whether a session of the new id is replaced


async def export(front: Frontend, call: Call) -> Response:
    """GET or POST /v1/state/export: the session named in the URL or in the body, as a file.
    Raises ApiError.
    """
    given = read(front, call)
    key = _named(given if "session_id" in given else _url(call))
    reply = await ask(front, ExportSession(uuid.uuid4().hex, key))
    return file_response(call, reply.data, key + SUFFIX)


async def import_(front: Frontend, call: Call) -> Response:
    """POST /v1/state/import: the body is an exported file and takes the place of the session named in the
    URL. Raises ApiError.
    """
    auth.demand(front.settings.password, call.header("authorization"), None, call.passwords)
    given = _url(call)
    demand_id(given)
    key = validate(Import, given).session_id
    data = call.body if isinstance(call.body, bytes) else call.body.encode()
    if not data:
        raise ApiError(400, "The body is empty; send a file that /v1/state/export has made.")
    if len(data) > front.settings.max_state:
        raise ApiError(
            413, f"The file has {len(data)} bytes and at most {front.settings.max_state} are taken."
        )
    await ask(front, ImportSession(uuid.uuid4().hex, key, data))
    return json_response(
        call, {"status": "success", "message": f"Session {key} imported successfully", "session_id": key}
    )


async def fork(front: Frontend, call: Call) -> Response:
    """POST /v1/state/fork: a copy of a session under a new id, with nothing computed again.
    Raises ApiError.
    """
    given = read(front, call)
    demand_id(given)
    fields = validate(Fork, given)
    if fields.new_session_id == fields.session_id:
        raise ApiError(400, "`new_session_id`: must differ from session_id.", param="new_session_id")
    await ask(
        front,
        ForkSession(uuid.uuid4().hex, fields.session_id, fields.new_session_id, fields.overwrite),
    )
    return json_response(
        call,
        {
            "status": "success",
            "message": f"Session {fields.session_id} copied successfully",
            "session_id": fields.new_session_id,
        },
    )


class Import(BaseModel):
    """The parameters of /v1/state/import."""

    session_id: SessionId


def _url(call: Call) -> dict:
    return {"session_id": call.parameter("session_id")}


def _named(given: dict) -> str:
    demand_id(given)
    return validate(Named, given).session_id
