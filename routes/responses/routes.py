"""OpenAI's responses: make one, hand it out again, list what it was made from, delete it.

A response that is stored is two things under one key: the model's state at its end, which the turn itself
leaves, and a document with the reply, which is kept before the reply's last word is sent.
"""

import asyncio
import time
from collections.abc import Callable
from functools import partial
from uuid import uuid4

from robyn import Response, StreamingResponse

from routes.http import auth
from routes.http.errors import ApiError
from routes.http.exchange import Call, json_response, stream_response
from routes.http.frontend import Frontend
from routes.http.generate import PLAIN_WITHIN, end_stream, taken
from routes.http.stream import JobStream, failure_status
from routes.native.sessions import ANSWERED_WITHIN, ask, read
from routes.openai.schemas import bad
from routes.responses.prepare import ID, Document, Prepared, decode_document, key_of, not_found, prepare
from routes.responses.schemas import read as read_body
from routes.responses.stream import ResponseEvents, SlowResponse
from rwkv_batch.wire.client import RequestFailed, RequestRejected
from rwkv_batch.wire.protocol import DeleteSession, EngineInfo, GetDocument, PutDocument, RemoveDocument

PAGE = 20  # input items of a page unless the client says otherwise
LONGEST_PAGE = 100


async def create(front: Frontend, call: Call) -> Response | StreamingResponse:
    """POST /v1/responses. Raises ApiError."""
    fields = read(front, call)
    engine = front.ready_engine()
    body = read_body(fields)
    previous = None
    if body.previous_response_id is not None:
        previous = await _document(front, body.previous_response_id)
        if previous is None:
            raise not_found(body.previous_response_id)
    prepared = prepare(body, engine.model, previous)
    front.enter()
    try:
        response = await _run(front, engine, call, prepared)
    except BaseException:
        front.leave()
        raise
    if isinstance(response, Response):
        front.leave()
    return response


async def stored(front: Frontend, call: Call) -> Response:
    """GET and DELETE /v1/responses/{id}. Raises ApiError."""
    response_id = _authorized_id(front, call)
    if call.method == "DELETE":
        key = key_of(response_id)
        document = await ask(front, RemoveDocument(uuid4().hex, key))
        state = await ask(front, DeleteSession(uuid4().hex, key))
        if not document.found and not state.found:
            raise _missing(response_id)
        return json_response(call, {"id": response_id, "object": "response", "deleted": True})
    if call.parameter("stream").lower() not in ("", "false", "0"):
        raise bad("stream", "a response that is over is not streamed again; leave it out and read it whole")
    return json_response(call, (await _demand(front, response_id)).response)


async def input_items(front: Frontend, call: Call) -> Response:
    """GET /v1/responses/{id}/input_items: the items this response was asked with, newest first unless `order`
    is asc. Raises ApiError.
    """
    response_id = _authorized_id(front, call)
    limit = call.parameter("limit") or str(PAGE)
    if not (limit.isascii() and limit.isdigit() and len(limit) <= 3 and 1 <= int(limit) <= LONGEST_PAGE):
        raise bad("limit", f"input should be a number from 1 to {LONGEST_PAGE}")
    order = call.parameter("order") or "desc"
    if order not in ("asc", "desc"):
        raise bad("order", "input should be asc or desc")
    items = (await _demand(front, response_id)).input[:: 1 if order == "asc" else -1]
    after = call.parameter("after")
    if after:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise bad("after", "input should be the id of one of the items")
        items = items[ids.index(after) + 1 :]
    page = items[: int(limit)]
    return json_response(
        call,
        {
            "object": "list",
            "data": page,
            "has_more": len(items) > len(page),
            "first_id": page[0]["id"] if page else "",
            "last_id": page[-1]["id"] if page else "",
        },
    )


async def _run(
    front: Frontend, engine: EngineInfo, call: Call, prepared: Prepared
) -> Response | StreamingResponse:
    """A Response when the reply is complete; otherwise a stream, which leaves the front end when it is
    closed.
    """
    reply = prepared.reply
    try:
        async with taken(front, engine, prepared.request) as job:
            if not prepared.stream:
                until = time.monotonic() + PLAIN_WITHIN
                while not job.exhausted and (left := until - time.monotonic()) > 0:
                    reply.events(await job.read_async(left))
                if job.exhausted:
                    whole = reply.whole(job, [])
                    await _keep(front, prepared)
                    return json_response(call, whole)
    except (RequestRejected, RequestFailed) as error:
        if isinstance(error, RequestRejected) and error.reason == "not_found":
            raise not_found(reply.response["previous_response_id"]) from None
        status = failure_status(error, engine_lives=front.engine is engine)
        return json_response(call, reply.error(str(error), status), status)
    closed, keep = partial(end_stream, front, call), _keeper(front, prepared)
    replies: JobStream = (
        ResponseEvents(job, reply, closed, front.crowded, keep)
        if prepared.stream
        else SlowResponse(job, reply, closed, keep)
    )
    front.watch(replies)
    return stream_response(call, replies, "text/event-stream" if prepared.stream else "application/json")


def _keeper(front: Frontend, prepared: Prepared) -> Callable[[], None]:
    """`_keep` for the threads that pull streams."""
    loop = asyncio.get_running_loop()

    def keep() -> None:
        asyncio.run_coroutine_threadsafe(_keep(front, prepared), loop).result()

    return keep


async def _keep(front: Frontend, prepared: Prepared) -> None:
    """Store the document, also while the server drains. Raises RequestFailed."""
    if prepared.key is None:
        return
    command = PutDocument(uuid4().hex, prepared.key, prepared.document())
    try:
        await asyncio.wait_for(front.client.ask(command), ANSWERED_WITHIN)
    except RequestRejected as error:
        raise RequestFailed(f"The response was made but could not be stored: {error}") from None
    except TimeoutError:
        raise RequestFailed(
            "The response was made but could not be stored: the engine does not answer; try again in a "
            "moment."
        ) from None


def _authorized_id(front: Frontend, call: Call) -> str:
    """The id in the path."""
    auth.demand(front.settings.password, call.header("authorization"), None, call.passwords)
    front.ready_engine()
    return call.path.split("/responses/", 1)[1].split("/")[0]


async def _demand(front: Frontend, response_id: str) -> Document:
    document = await _document(front, response_id)
    if document is None:
        raise _missing(response_id)
    return document


async def _document(front: Frontend, response_id: str) -> Document | None:
    """What is kept of a response; None if nothing is."""
    if not ID.fullmatch(response_id):
        return None
    try:
        data = (await ask(front, GetDocument(uuid4().hex, key_of(response_id)))).data
    except ApiError as error:
        if error.status == 404:
            return None
        raise
    return decode_document(data) if data else None


def _missing(response_id: str) -> ApiError:
    return ApiError(
        404,
        f"There is no response {response_id[:60]}: it was deleted, or not stored.",
        code="response_not_found",
    )
