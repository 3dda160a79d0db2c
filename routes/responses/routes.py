"""The handlers of /v1/responses: create a response, read it, list or count its input, delete it.

A response that is stored is two things under one key: the model's state at its end, which the engine stores
with the turn, and a document with the reply, which is stored before the last piece of the reply is sent.
"""

import asyncio
from contextlib import suppress
from functools import partial
from typing import NamedTuple
from uuid import uuid4

import msgspec
from robyn import Response

from routes.http.access import authorized_json, demand_access
from routes.http.adapters import choose_adapter
from routes.http.errors import ApiError, openai_field
from routes.http.exchange import HttpRequest, HttpResponse, json_response
from routes.http.frontend import ANSWERED_WITHIN, NO_REPLY, Frontend
from routes.http.generate import Prepared, run
from routes.http.idempotency import key_of
from routes.http.model_field import read_model, with_defaults
from routes.http.start_states import choose_state
from routes.responses.items import is_reference, response_of
from routes.responses.prepare import ID, Document, prepare, state_key, without_answer
from routes.responses.reply import InputTokens, ResponseReply, item_not_found, previous_not_found
from routes.responses.schemas import ResponsesBody
from routes.responses.shapes import DeletedResponse
from rwkv_batch.chat.checkpoints import settings_for
from rwkv_batch.wire.client import RequestFailed, RequestRejected
from rwkv_batch.wire.commands import DeleteSession, GetDocument, PutDocument, RemoveDocument
from rwkv_batch.wire.protocol import GenerateRequest
from rwkv_batch.wire.supervision import EngineInfo

PAGE = 20  # input items of a page unless the client says otherwise
LONGEST_PAGE = 100


class Asked(NamedTuple):
    """What a body asks for."""

    model: EngineInfo
    body: ResponsesBody
    request: GenerateRequest
    reply: ResponseReply
    document: Document


async def create(front: Frontend, http: HttpRequest) -> HttpResponse:
    """POST /v1/responses. Raises ApiError."""
    model, body, request, reply, document = await _asked(front, http)
    store = partial(_store, front, model.model, reply, document) if body.store else None
    return await run(front, model, http, Prepared(request, body.stream, reply), store)


async def input_tokens(front: Frontend, http: HttpRequest) -> HttpResponse:
    """POST /v1/responses/input_tokens: what such a response would count as its input. Raises ApiError."""
    asked = await _asked(front, http, stores=False)
    reply = InputTokens()
    reply.ignored = asked.reply.ignored
    return await run(front, asked.model, http, Prepared(without_answer(asked.request), False, reply))


async def cancel(front: Frontend, http: HttpRequest) -> Response:
    """POST /v1/responses/{id}/cancel: 400 for a response that is there, as it is over. Raises ApiError."""
    response_id = _authorized_id(front, http)
    await _document(front, response_id, _not_found(response_id))
    raise openai_field(
        "id",
        f"{response_id} is over; a response that is being made ends when its client closes the connection",
    )


async def _asked(front: Frontend, http: HttpRequest, stores: bool = True) -> Asked:
    """`stores`: whether the response may be stored. Raises ApiError."""
    fields = authorized_json(front, http)
    named = await read_model(front, http, fields)
    adapter = await choose_adapter(front, fields, named)
    state = await choose_state(front, http, fields, named)
    fields = with_defaults(named.model, state.with_defaults(fields, is_chat=True) if state else fields)
    body = ResponsesBody.from_json(fields, front.settings.sampling_profile)
    if not (stores and front.settings.token_log):
        body = body.model_copy(update={"store": False})
    body = body.model_copy(update={"input": await _resolved(front, body.input)})
    previous = None
    if body.previous_response_id is not None:
        missing = previous_not_found(body.previous_response_id, front.settings.token_log)
        previous = await _document(front, body.previous_response_id, missing, named.model.model)
    settings = settings_for(named.model, front.settings)
    request, reply, document = prepare(body, named.model.model, previous, settings, key_of(http))
    if state and previous is None:
        request = state.begin(request)
    return Asked(named.model, body, adapter.begin(request), reply, document)


async def _resolved(front: Frontend, given: object) -> object:
    """The input with the items in the places of those that refer to them. Raises ApiError 400 or 404."""
    if not (isinstance(given, list) and any(map(is_reference, given))):
        return given
    items, documents = list(given), dict[str, Document]()
    for i, item in enumerate(given):
        if not is_reference(item):
            continue
        at, identity = f"input[{i}].id", item.get("id")
        if not isinstance(identity, str) or not identity:
            raise openai_field(at, "input should be a string that is not empty")
        missing = item_not_found(identity, at, front.settings.token_log)
        response_id = response_of(identity)
        if response_id not in documents:
            documents[response_id] = await _document(front, response_id, missing)
        document = documents[response_id]
        known = {each["id"]: each for each in (*document.input, *document.response["output"])}
        if identity not in known:
            raise missing
        items[i] = known[identity]
    return items


async def stored(front: Frontend, http: HttpRequest) -> Response:
    """GET and DELETE /v1/responses/{id}. Raises ApiError."""
    response_id = _authorized_id(front, http)
    if http.method == "DELETE":
        key = state_key(response_id)
        # What is found by its id goes last: a deletion that fails before can be asked for again.
        found = [reply.found async for _, reply in front.ask_each(DeleteSession("", key))]
        found += [reply.found async for _, reply in front.ask_each(RemoveDocument("", key))]
        if not any(found):
            raise _not_found(response_id)
        gone: DeletedResponse = {"id": response_id, "object": "response", "deleted": True}
        return json_response(http, gone)
    if http.parameter("stream").lower() not in ("", "false", "0"):
        raise openai_field(
            "stream", "a response that is over is not streamed again; leave it out and read it whole"
        )
    document = await _document(front, response_id, _not_found(response_id))
    return json_response(http, document.response)


async def input_items(front: Frontend, http: HttpRequest) -> Response:
    """GET /v1/responses/{id}/input_items: newest first unless `order` is asc. Raises ApiError."""
    response_id = _authorized_id(front, http)
    limit = http.parameter("limit") or str(PAGE)
    if not (limit.isascii() and limit.isdigit() and len(limit) <= 3 and 1 <= int(limit) <= LONGEST_PAGE):
        raise openai_field("limit", f"input should be a number from 1 to {LONGEST_PAGE}")
    order = http.parameter("order") or "desc"
    if order not in ("asc", "desc"):
        raise openai_field("order", "input should be asc or desc")
    document = await _document(front, response_id, _not_found(response_id))
    items = document.input[:: 1 if order == "asc" else -1]
    after = http.parameter("after")
    if after:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise openai_field("after", "input should be the id of one of the items")
        items = items[ids.index(after) + 1 :]
    page = items[: int(limit)]
    found = {
        "object": "list",
        "data": page,
        "has_more": len(items) > len(page),
        "first_id": page[0]["id"] if page else "",
        "last_id": page[-1]["id"] if page else "",
    }
    return json_response(http, found)


async def _store(front: Frontend, model: str, reply: ResponseReply, document: Document) -> None:
    """Store the document with the response as it is now, also during a drain. If that fails, nothing stays.

    Raises RequestFailed, and RequestRejected where the database cannot store anything now.
    """
    data = msgspec.json.encode(msgspec.structs.replace(document, response=reply.response))
    key = state_key(reply.response["id"])
    command = PutDocument(uuid4().hex, key, data, to_model=model)
    try:
        await asyncio.wait_for(front.client.ask(command), ANSWERED_WITHIN)
    except RequestFailed:
        await _forget_session(front, model, key)
        raise
    except (RequestRejected, TimeoutError) as error:
        reason = str(error) or NO_REPLY[0].lower() + NO_REPLY[1:]  # a timeout gives none
        sentence = f"The response was made but could not be stored: {reason}"
        if isinstance(error, RequestRejected):
            await _forget_session(front, model, key)
            if error.reason == "unavailable":
                raise RequestRejected(error.reason, sentence) from None
        raise RequestFailed(sentence) from None


async def _forget_session(front: Frontend, model: str, key: str) -> None:
    """Of a response that has no document, which nobody could go on from or delete."""
    with suppress(RequestFailed, RequestRejected, TimeoutError):
        command = DeleteSession(uuid4().hex, key, to_model=model)
        await asyncio.wait_for(front.client.ask(command), ANSWERED_WITHIN)


def _authorized_id(front: Frontend, http: HttpRequest) -> str:
    """The id in the path. Raises ApiError 401 or 503."""
    demand_access(front, http)
    front.ready_engine()
    return http.path.split("/responses/", 1)[1].split("/")[0]


async def _document(
    front: Frontend, response_id: str, missing: ApiError, model: str | None = None
) -> Document:
    """What that model, or any, has stored of a response. Raises `missing` if there is nothing."""
    command, data = GetDocument(uuid4().hex, state_key(response_id), to_model=model or ""), b""
    if ID.fullmatch(response_id):
        if model is not None:
            data = (await front.ask(command)).data
        else:
            data = next(filter(None, [reply.data async for _, reply in front.ask_each(command)]), b"")
    if not data:
        raise missing
    return msgspec.json.decode(data, type=Document)


def _not_found(response_id: str) -> ApiError:
    return ApiError(
        404,
        f"There is no response {response_id[:60]}: it was deleted, or not stored.",
        code="response_not_found",
    )
