"""/state/status lists the stored sessions, /state/delete deletes one, or a whole tree of them."""

import time
import uuid

from robyn import Response

from routes.http.auth import authorized_json
from routes.http.errors import native_field
from routes.http.exchange import HttpRequest, json_response
from routes.http.frontend import Frontend
from routes.http.schemas import RESPONSE
from routes.native.schemas import SessionFields
from rwkv_batch.wire.protocol import DeleteSession, ListSessions, SessionInfo

LEVELS = {"L1": "L1 (VRAM)", "L2": "L2 (RAM)", "L3": "Database (Disk)"}


class DeleteFields(SessionFields):
    """The body of /state/delete."""

    delete_prefix: bool = False  # whether to delete all sessions whose id begins with "{session_id}:"


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
    updated = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(session.updated))
    return {
        "session_id": session.key,
        "cache_level": LEVELS[session.tier],
        "timestamp": session.updated,
        "tokens": session.tokens,
        "last_updated": updated if session.tier == "L3" else "In Memory",
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
