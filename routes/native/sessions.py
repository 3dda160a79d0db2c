"""What the session routes share: the way to the engine, and the list of sessions and its deletions."""

import asyncio
import time
import uuid

from pydantic import BaseModel
from robyn import Response

from routes.http import auth, body
from routes.http.errors import ApiError
from routes.http.exchange import Call, json_response
from routes.http.frontend import Frontend
from routes.http.stream import failure_status
from routes.native.schemas import RESPONSE, StoredId, validate
from rwkv_batch.wire.client import RequestFailed, RequestRejected
from rwkv_batch.wire.protocol import DeleteSession, ListSessions, SessionCommand, SessionReply

ANSWERED_WITHIN = 60.0  # seconds; a command may have to read a state from disk behind others
LEVELS = {"L1": "L1 (VRAM)", "L2": "L2 (RAM)", "L3": "Database (Disk)"}


class Named(BaseModel):
    """A body about one session."""

    session_id: StoredId


class Deletion(Named):
    """The body of /state/delete."""

    delete_prefix: bool = False  # whether all sessions go whose id begins with "{session_id}:"


def demand_id(fields: dict) -> None:
    """Raises ApiError 400 if there is no `session_id`."""
    if fields.get("session_id") in (None, ""):
        raise ApiError(400, "Missing session_id parameter", param="session_id")


def read(front: Frontend, call: Call) -> dict:
    """The body of a command; none is as good as an empty object. Raises ApiError, of a wrong
    password first.
    """
    fields: dict | None = {}
    problem: ApiError | None = None
    if call.body:
        try:
            fields = body.parse(call.body, front.settings.max_body)
        except ApiError as error:
            fields, problem = None, error
    auth.demand(front.settings.password, call.header("authorization"), fields, call.passwords)
    if fields is None:
        assert problem
        raise problem
    return fields


async def ask(front: Frontend, command: SessionCommand) -> SessionReply:
    """Have the engine carry out `command`. Raises ApiError."""
    engine = front.ready_engine()
    front.enter()
    try:
        return await asyncio.wait_for(front.client.ask(command), ANSWERED_WITHIN)
    except (RequestRejected, RequestFailed) as error:
        raise ApiError(failure_status(error, engine_lives=front.engine is engine), str(error)) from None
    except TimeoutError:
        raise ApiError(503, "The engine does not answer; try again in a moment.") from None
    finally:
        front.leave()


async def status(front: Frontend, call: Call) -> Response:
    """POST /state/status: every stored session, each once, at the fastest place that has it.
    Raises ApiError.
    """
    read(front, call)
    found = (await ask(front, ListSessions(uuid.uuid4().hex))).sessions
    counts = {level: sum(1 for s in found if s.tier == level) for level in LEVELS}
    return json_response(
        call,
        {
            "status": "success",
            "total_sessions": len(found),
            "l1_cache_count": counts["L1"],
            "l2_cache_count": counts["L2"],
            "database_count": counts["L3"],
            "sessions": [
                {
                    "session_id": s.key,
                    "cache_level": LEVELS[s.tier],
                    "timestamp": s.updated,
                    "tokens": s.tokens,
                    "last_updated": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(s.updated))
                    if s.tier == "L3"
                    else "In Memory",
                }
                for s in sorted(found, key=lambda s: s.tier)
            ],
        },
    )  # fastest first; within a tier as they came


async def delete(front: Frontend, call: Call) -> Response:
    """POST /state/delete: a session, or a whole tree of them. Raises ApiError."""
    given = read(front, call)
    demand_id(given)
    fields = validate(Deletion, given)
    if fields.delete_prefix and fields.session_id == RESPONSE:
        raise ApiError(
            400,
            "`session_id`: with delete_prefix this would take the states of stored responses; delete those "
            "one by one.",
            param="session_id",
        )
    command = DeleteSession(uuid.uuid4().hex, fields.session_id, fields.delete_prefix)
    found = (await ask(front, command)).found
    if not found and not fields.delete_prefix:
        return json_response(
            call,
            {"status": "not_found", "message": f"Session {fields.session_id} not found in database"},
            404,
        )
    return json_response(
        call, {"status": "success", "message": f"Session {fields.session_id} deleted successfully"}
    )
