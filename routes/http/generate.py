"""The way of a generation request: body, password, schema, engine, reply."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from robyn import Response, StreamingResponse

from routes.http import auth, body
from routes.http.errors import ApiError
from routes.http.exchange import Call, Shape, json_response, log_access, stream_response
from routes.http.frontend import ENGINE_LOST, Frontend
from routes.http.replies import Reply, RowResult
from routes.http.stream import EventStream, JobStream, SlowJson, failure_status
from rwkv_batch.wire.client import Job, RequestFailed, RequestRejected
from rwkv_batch.wire.protocol import EngineInfo, GenerateRequest

ACCEPTED_WITHIN = 30.0  # seconds; the engine answers between two steps
PLAIN_WITHIN = 0.25  # seconds in which a reply is made at once; later ones must notice a client that leaves

Prepare = Callable[[dict, str], tuple[GenerateRequest, bool, Reply]]


@dataclass(frozen=True)
class Kind:
    """A family of requests: what to run for a body, and how errors are told."""

    prepare: Prepare
    shape: Shape
    open: bool = False  # needs no password


async def generate(
    front: Frontend, choose: Callable[[Call, dict | None], Kind], call: Call
) -> Response | StreamingResponse:
    """Answer `call`. `choose` picks the kind by the body, which is None where there is no valid one. Raises
    ApiError.
    """
    fields: dict | None = None
    problem: ApiError | None = None
    try:
        fields = body.parse(call.body, front.settings.max_body)
    except ApiError as error:
        problem = error
    kind = choose(call, fields)
    call.shape = kind.shape
    if not kind.open:
        auth.demand(front.settings.password, call.header("authorization"), fields, call.passwords)
    if fields is None:
        assert problem
        raise problem
    engine = front.ready_engine()
    request, stream, reply = kind.prepare(fields, engine.model)
    if not request.prompts:
        return json_response(call, reply.whole(Job(request, lambda _: None), []))
    front.enter()
    try:
        response = await _run(front, engine, call, request, stream, reply)
    except BaseException:
        front.leave()
        raise
    if isinstance(response, Response):
        front.leave()
    return response


async def _run(
    front: Frontend, engine: EngineInfo, call: Call, request: GenerateRequest, stream: bool, reply: Reply
) -> Response | StreamingResponse:
    """A Response when the reply is complete; otherwise a stream, which leaves the front end when it is
    closed.
    """
    try:
        async with taken(front, engine, request) as job:
            rows = [RowResult() for _ in range(job.rows)]
            if not stream:
                until = time.monotonic() + PLAIN_WITHIN
                while not job.exhausted and (left := until - time.monotonic()) > 0:
                    for delta in await job.read_async(left):
                        rows[delta.row].add(delta)
    except (RequestRejected, RequestFailed) as error:
        status = failure_status(error, engine_lives=front.engine is engine)
        return json_response(call, reply.error(str(error), status), status)
    if not stream and job.exhausted:
        return json_response(call, reply.whole(job, rows))
    closed = partial(end_stream, front, call)
    replies: JobStream = (
        EventStream(job, reply, closed, front.crowded) if stream else SlowJson(job, reply, closed, rows)
    )
    front.watch(replies)
    return stream_response(call, replies, "text/event-stream" if stream else "application/json")


@asynccontextmanager
async def taken(front: Frontend, engine: EngineInfo, request: GenerateRequest) -> AsyncIterator[Job]:
    """A job that the engine has taken, cancelled if the block raises. Raises RequestRejected, RequestFailed
    or ApiError.
    """
    job = front.client.submit(request)
    try:
        if front.engine is not engine:  # lost between the check and the submission: nobody will fail this job
            raise RequestFailed(ENGINE_LOST)
        await asyncio.wait_for(job.accepted(), ACCEPTED_WITHIN)
        yield job
    except BaseException as error:
        job.cancel()
        if isinstance(error, TimeoutError):
            raise ApiError(503, "The engine does not answer; try again in a moment.") from None
        raise


def end_stream(front: Frontend, call: Call, outcome: str) -> None:
    """What is due once when a stream has ended or was dropped."""
    front.leave()
    log_access(call, 200, outcome)
