"""The way of a generation request: password, schema, engine, reply."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, NamedTuple

from msgspec.structs import replace

from routes.http.access import authorized_json
from routes.http.adapters import choose_adapter
from routes.http.errors import ApiError, Json
from routes.http.exchange import (
    HttpRequest,
    HttpResponse,
    json_response,
    log_access,
    stream_response,
    text_response,
)
from routes.http.frontend import ENGINE_LOST, NO_REPLY, Frontend
from routes.http.idempotency import with_key
from routes.http.model_field import read_model, with_defaults
from routes.http.replies import Reply
from routes.http.start_states import choose_state
from routes.http.stream import EventStream, JobStream, SlowJson
from rwkv_batch.wire.client import Job, RequestFailed, RequestRejected
from rwkv_batch.wire.protocol import GenerateRequest, RowDelta
from rwkv_batch.wire.supervision import EngineInfo

SESSION_HEADER = "x-rwkv-session-id"
ACCEPTED_WITHIN = 30.0  # seconds; the engine answers between two steps


class Prepared(NamedTuple):
    """A checked request: what the engine generates, and how the route replies."""

    request: GenerateRequest
    stream: bool
    reply: Reply


Prepare = Callable[[Json, EngineInfo], Prepared]  # from the JSON body and the model; raises ApiError
KeepReply = Callable[[], Coroutine[Any, Any, None]]  # stores a reply before its last piece is sent


async def generate(
    front: Frontend,
    http: HttpRequest,
    prepare: Prepare,
    *,
    is_chat: Callable[[Json], bool] = lambda fields: False,
) -> HttpResponse:
    """Reply to `http` with what `prepare` makes of its body. Raises ApiError.

    `is_chat`: whether a body is rendered as a chat, as a start state may say.
    """
    fields = authorized_json(front, http, required=True)
    return await generate_from(front, http, with_session_header(http, fields), prepare, is_chat)


async def generate_from(
    front: Frontend,
    http: HttpRequest,
    fields: Json,
    prepare: Prepare,
    is_chat: Callable[[Json], bool] = lambda fields: False,
    *,
    in_thread: bool = False,
) -> HttpResponse:
    """Reply to a body that has been read and may be served; see `generate`.

    in_thread: `prepare` takes long, and must not keep other requests waiting.
    """
    named = await read_model(front, http, fields)
    adapter = await choose_adapter(front, fields, named)
    state = await choose_state(front, http, fields, named)
    if state:
        fields = state.with_defaults(fields, is_chat(fields))
    fields = with_defaults(named.model, fields)
    if in_thread:
        prepared = await asyncio.to_thread(prepare, fields, named.model)
    else:
        prepared = prepare(fields, named.model)
    if state:
        prepared = prepared._replace(request=state.begin(prepared.request))
    prepared = prepared._replace(request=adapter.begin(prepared.request))
    if not prepared.request.prompts:
        return _without_rows(http, prepared)
    return await run(front, named.model, http, prepared)


def _without_rows(http: HttpRequest, prepared: Prepared) -> HttpResponse:
    """The reply to a request for which the engine has nothing to do."""
    job, reply = Job(prepared.request, lambda _: None), prepared.reply
    if not prepared.stream:
        return json_response(http, reply.whole(job, []))
    events = [*reply.first(job), *reply.events([]), *reply.last(job)]
    text = b"".join(map(reply.frame, events)) + reply.done
    return text_response(http, text.decode(), reply.media_type)


def with_session_header(http: HttpRequest, fields: Json) -> Json:
    """The body with the session that the header names. Raises ApiError 400 if the body names another."""
    header, given = http.headers.get(SESSION_HEADER) or "", fields.get("session_id")
    if not header or given == header:
        return fields
    if given not in (None, ""):
        raise ApiError(
            400, f"`session_id`: {SESSION_HEADER} names another one; send one of them.", "session_id"
        )
    return fields | {"session_id": header}


async def run(
    front: Frontend,
    model: EngineInfo,
    http: HttpRequest,
    prepared: Prepared,
    keep: KeepReply | None = None,
) -> HttpResponse:
    """Run the request by that model: a Response if its reply is complete within `plain_seconds`, or a stream.

    `keep` is awaited before the last piece of a reply that has succeeded. Raises ApiError.
    """
    request, stream, reply = prepared
    http.ignored = reply.ignored
    request = replace(request, to_model=model.model, name=request.name or http.id)
    request = with_key(http, request, front.settings.token_log)
    front.enter()
    try:
        job = reply.begin(front.client, request)
    except BaseException:
        front.leave()
        raise
    streams = False
    try:
        if not front.shared.models:  # lost before the submission: it did not fail with the other jobs
            raise RequestFailed(ENGINE_LOST)
        await job.accepted(ACCEPTED_WITHIN)
        http.fingerprint = job.acceptance.fingerprint
        reply.made_by(job.acceptance.fingerprint)
        deltas: list[RowDelta] = []
        if not (stream or reply.slow) and await _finishes(job, deltas, front.settings.plain_seconds):
            body = reply.whole(job, deltas)
            if keep:
                await keep()
            return json_response(http, body)
        streams = True  # which leaves the front end and cancels its job when it is closed
    except TimeoutError:
        raise ApiError(503, NO_REPLY) from None
    except (RequestRejected, RequestFailed) as error:
        status = front.status_of(error)
        param = error.field or None if isinstance(error, RequestRejected) else None
        return json_response(http, reply.error(str(error), status, param), status)
    finally:
        if not streams:
            job.cancel()
            front.leave()
    closed, blocking = partial(_end, front, http), partial(_wait, keep, asyncio.get_running_loop())
    dropped = front.shared.dropped.put
    pieces: JobStream = (
        EventStream(job, reply, closed, dropped, front.crowded, blocking)
        if stream
        else SlowJson(job, reply, closed, dropped, deltas, blocking)
    )
    front.watch(pieces)
    return stream_response(http, pieces, reply.media_type if stream else "application/json")


async def _finishes(job: Job, deltas: list[RowDelta], seconds: float) -> bool:
    """Read for so many seconds into `deltas`; whether they are complete."""
    until = time.monotonic() + seconds
    while not job.exhausted and (left := until - time.monotonic()) > 0:
        deltas += await job.read_async(left)
    return job.exhausted


def _wait(keep: KeepReply | None, loop: asyncio.AbstractEventLoop) -> None:
    """`keep` for the threads that pull streams."""
    if keep:
        asyncio.run_coroutine_threadsafe(keep(), loop).result()


def _end(front: Frontend, http: HttpRequest, outcome: str) -> None:
    """A stream has ended or was dropped. A turn that was being stored then is logged when that is done."""
    front.leave()
    http.caller.served.when_known(partial(log_access, http, 200, outcome))
