"""The native routes about running requests: list them, stop one, pause one and have it go on later.

A request is named by its id, which every reply has in the header X-Request-Id, and which clients may choose
by sending that header.
"""

import asyncio
import logging
import uuid
from typing import Annotated

import msgspec
from msgspec.structs import replace
from pydantic import AliasChoices, Field
from robyn import Response

from routes.http.access import authorized, authorized_json
from routes.http.errors import ApiError, Json
from routes.http.exchange import HttpRequest, HttpResponse, json_response
from routes.http.frontend import ANSWERED_WITHIN, Frontend
from routes.http.generate import Prepared, run
from routes.http.schemas import RequestBody
from routes.native.batch import NativeReply
from routes.native.schemas import StoredId, Whole
from routes.native.shapes import (
    ListedRequest,
    PausedNow,
    PausedRequest,
    ServerStatus,
    StoppedRequest,
    owner_of,
)
from rwkv_batch.wire.client import Job, RequestFailed, RequestRejected
from rwkv_batch.wire.codec import decode_paused
from rwkv_batch.wire.commands import (
    PAUSED,
    GetDocument,
    ListRequests,
    PauseRequest,
    RemoveDocument,
    StopRequest,
)
from rwkv_batch.wire.protocol import RequestInfo, RowDelta, owner_and_name

log = logging.getLogger(__name__)


class RequestFields(RequestBody):
    """The body of /v1/server/stop and /v1/server/pause."""

    request_id: StoredId | None = None  # without one: the request that runs, if there is just one


class ResumeFields(RequestBody):
    """The body of /v1/server/resume."""

    request_id: Annotated[StoredId, Field(validation_alias=AliasChoices("request_id", "session_id"))]
    stream: bool = True
    chunk_size: Whole = 4  # tokens of a row per event of a stream; < 1: 1


class ResumedReply(NativeReply):
    """The native reply, which notices if the request is paused again."""

    paused = False

    def whole(self, job: Job, deltas: list[RowDelta]) -> Json:
        self._note(deltas)
        return super().whole(job, deltas)

    def events(self, deltas: list[RowDelta]) -> list[Json]:
        self._note(deltas)
        return super().events(deltas)

    def _note(self, deltas: list[RowDelta]) -> None:
        self.paused |= any(delta.finish_reason == "paused" for delta in deltas)


async def status(front: Frontend, http: HttpRequest) -> Response:
    """GET /v1/server/status: the models, and the requests that wait, run or are paused.

    Those who do not send the password learn only that the server runs. Raises ApiError.
    """
    engine = front.ready_engine()
    body: ServerStatus = {"status": "running"}
    if authorized(front, http):
        active: list[ListedRequest] = []
        paused: list[PausedRequest] = []
        async for model, found in front.ask_each(ListRequests("")):
            active += [{**_to_json(request), "model": model.model} for request in found.requests]
            paused += [_paused(stored, model.model) for stored in found.paused]
        body = {
            "status": "running",
            "models": list(front.models),
            "model": {"id": engine.model, "name": engine.model},
            "capabilities": {"stop": True, "pause_resume": front.settings.token_log, "session_cache": True},
            "active_request": active[-1] if active else None,
            "active_requests": active,
            "paused_requests": paused,
        }
    return json_response(http, body)


async def stop(front: Frontend, http: HttpRequest) -> Response:
    """POST /v1/server/stop: a request's texts end here; a paused one is forgotten. Raises ApiError."""
    name, listed, stopped = await _named(front, http), None, False
    if name is not None:
        async for _, found in front.ask_each(StopRequest("", name)):
            if found.requests or found.found:
                listed, stopped = _to_json(found.requests[0]) if found.requests else None, True
                break
    body: StoppedRequest = {"ok": True, "stopped": stopped, "active_request": listed}
    return json_response(http, body)


async def pause(front: Frontend, http: HttpRequest) -> Response:
    """POST /v1/server/pause: a request's texts end where they are, until it is resumed. Raises ApiError."""
    name, found = await _named(front, http), list[RequestInfo]()
    if name is not None:
        async for _, reply in front.ask_each(PauseRequest("", name)):
            if found := reply.requests:
                break
    listed = _to_json(found[0]) if found else None
    body: PausedNow = {"ok": True, "paused": bool(found), "active_request": listed}
    if found and name is not None:
        body["request_id"] = name
    return json_response(http, body)


async def resume(front: Frontend, http: HttpRequest) -> HttpResponse:
    """POST /v1/server/resume: what would have come after the pause, in the form of /v1/chat/completions.

    The request can be resumed until a reply has been sent to its end. Raises ApiError.
    """
    body = authorized_json(front, http, required=True)
    body = {name: value for name, value in body.items() if value != ""}
    if not (body.get("request_id") or body.get("session_id")):
        raise ApiError(400, "Missing request_id", param="request_id")
    fields = ResumeFields.from_json(body)
    name, command = fields.request_id, GetDocument("", PAUSED + fields.request_id)
    found = [(model, reply.data) async for model, reply in front.ask_each(command) if reply.data]
    if not found:
        raise ApiError(404, f"Paused request not found: {name}")
    model, data = found[0]
    http.id = name  # by which it is paused again
    flush_tokens = max(1, fields.chunk_size) if fields.stream else 0
    try:
        paused = decode_paused(data)
    except msgspec.DecodeError:
        raise ApiError(500, f"Another version has paused {name}, and this one cannot read it.") from None
    request = replace(paused, id=uuid.uuid4().hex, name=name, flush_tokens=flush_tokens)
    reply = ResumedReply(model.model, id_=name)

    async def forget() -> None:
        """Remove the document, also during a drain. What cannot be forgotten is no fault of the reply."""
        if reply.paused:
            return
        command = RemoveDocument(uuid.uuid4().hex, PAUSED + name, to_model=model.model)
        try:
            await asyncio.wait_for(front.client.ask(command), ANSWERED_WITHIN)
        except (RequestRejected, RequestFailed, TimeoutError) as error:
            log.warning("The paused request %s has ended and could not be forgotten: %s", name, error)

    return await run(front, model, http, Prepared(request, fields.stream, reply), forget)


async def _named(front: Frontend, http: HttpRequest) -> str | None:
    """The request that the body names, or the only one. Raises ApiError."""
    fields = RequestFields.from_json(authorized_json(front, http))
    if fields.request_id:
        return fields.request_id
    running: list[RequestInfo] = []
    async for _, found in front.ask_each(ListRequests("")):
        running += found.requests
    if len(running) > 1:
        raise ApiError(
            400, f"{len(running)} requests are running; name one of them in request_id.", param="request_id"
        )
    return owner_and_name(running[0].name)[1] if running else None


def _paused(stored: str, model: str) -> PausedRequest:
    owner, name = owner_and_name(stored)
    return {**owner_of(owner), "request_id": name, "model": model}


def _to_json(request: RequestInfo) -> ListedRequest:
    owner, name = owner_and_name(request.name)
    listed: ListedRequest = {
        "request_id": name,
        "rows": request.rows,
        "generated_tokens": request.drawn,
        "max_tokens": request.max_tokens,
    }
    if owner:
        listed["owner"] = owner
    return listed
