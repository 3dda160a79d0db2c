"""/v1/batches: create a batch, look at it, list all, cancel one. Another process runs them."""

import asyncio
import re
import time
from functools import partial
from typing import Annotated, Literal

from pydantic import AfterValidator, Field
from robyn import Response

from routes.batches import files
from routes.batches.folder import PAGE, id_in_path, open_folder, owner_of, page_of, seen_by
from routes.batches.shapes import BatchList, BatchObject
from routes.http.access import authorized_json
from routes.http.errors import ApiError, openai_field
from routes.http.exchange import HttpRequest, json_response
from routes.http.frontend import Frontend
from routes.http.schemas import RequestBody
from rwkv_batch.batches.records import BatchRecord, new_id
from rwkv_batch.batches.store import BatchStore

Endpoint = Literal[
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/translate",
    "/translate/batch",
    "/translate/v1/batch-translate",
    "/v2/translate",
    "/language/translate/v2",
]
UNITS = {"m": 60, "h": 3600, "d": 86400}
WINDOW = re.compile(r"^[1-9][0-9]{0,4}[mhd]$")
LONGEST_WINDOW = 30 * 86400  # seconds
MOST_LISTED = 100
MOST_PAIRS, MOST_KEY, MOST_VALUE = 16, 64, 512  # of metadata


def _window(text: str) -> str:
    if not WINDOW.fullmatch(text):
        raise ValueError("input should be a number of minutes, hours or days, such as 90m, 24h or 7d")
    return text


class BatchBody(RequestBody):
    """POST /v1/batches."""

    field_error = staticmethod(openai_field)

    input_file_id: str
    endpoint: Endpoint
    completion_window: Annotated[
        str, AfterValidator(_window), Field(json_schema_extra={"pattern": WINDOW.pattern})
    ] = "24h"
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=MOST_KEY)], Annotated[str, Field(max_length=MOST_VALUE)]],
            Field(max_length=MOST_PAIRS),
        ]
        | None
    ) = None

    @property
    def seconds(self) -> int:
        """The window. Raises ApiError 400."""
        seconds = int(self.completion_window[:-1]) * UNITS[self.completion_window[-1]]
        if seconds > LONGEST_WINDOW:
            raise openai_field("completion_window", f"input should be at most {LONGEST_WINDOW // 86400}d")
        return seconds


async def create(front: Frontend, http: HttpRequest) -> Response:
    """POST /v1/batches. Raises ApiError."""
    fields = authorized_json(front, http, required=True)
    store = await open_folder(front, http)
    body = BatchBody.from_json(fields)
    file = await files.find(store, http, body.input_file_id, "input_file_id")
    if file.purpose != "batch":
        raise openai_field("input_file_id", "input should be a file that was uploaded for a batch")
    now = int(time.time())
    batch = BatchRecord(
        id=new_id("batch_"),
        owner=owner_of(http),
        endpoint=body.endpoint,
        input_file=file.id,
        window=body.completion_window,
        created=now,
        expires=now + body.seconds,
        metadata=body.metadata,
    )
    await asyncio.to_thread(store.add_batch, batch)
    return json_response(http, described(batch))


async def list_(front: Frontend, http: HttpRequest) -> Response:
    """GET /v1/batches: the newest first. Raises ApiError."""
    store = await open_folder(front, http)
    found = await asyncio.to_thread(store.batches, seen_by(http))
    page, more = page_of(http, found, PAGE, MOST_LISTED)
    body: BatchList = {
        "object": "list",
        "data": [described(batch) for batch in page],
        "has_more": more,
        "first_id": page[0].id if page else None,
        "last_id": page[-1].id if page else None,
    }
    return json_response(http, body)


async def one(front: Frontend, http: HttpRequest) -> Response:
    """GET /v1/batches/{id}. Raises ApiError."""
    return json_response(http, described(await _find(await open_folder(front, http), http)))


async def cancel(front: Frontend, http: HttpRequest) -> Response:
    """POST /v1/batches/{id}/cancel: rows that are done stay done. Raises ApiError."""
    store = await open_folder(front, http)
    batch = await _find(store, http)
    change = partial(store.change, batch.id, ("validating", "in_progress"), "cancelling")
    changed = await asyncio.to_thread(change) or batch
    if changed.status not in ("cancelling", "cancelled"):
        raise ApiError(409, f"The batch is {changed.status} and cannot be cancelled any more.")
    return json_response(http, described(changed))


def described(batch: BatchRecord) -> BatchObject:
    at, problems = (
        batch.at,
        [{"code": e.code, "message": e.message, "line": e.line, "param": e.param} for e in batch.errors],
    )
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": {"object": "list", "data": problems} if problems else None,  # type: ignore[typeddict-item]
        "input_file_id": batch.input_file,
        "completion_window": batch.window,
        "status": batch.status,
        "output_file_id": batch.output_file,
        "error_file_id": batch.error_file,
        "created_at": batch.created,
        "in_progress_at": at.get("in_progress"),
        "expires_at": batch.expires,
        "finalizing_at": at.get("finalizing"),
        "completed_at": at.get("completed"),
        "failed_at": at.get("failed"),
        "expired_at": at.get("expired"),
        "cancelling_at": at.get("cancelling"),
        "cancelled_at": at.get("cancelled"),
        "request_counts": {"total": batch.total, "completed": batch.completed, "failed": batch.failed},
        "metadata": batch.metadata,
    }


async def _find(store: BatchStore, http: HttpRequest) -> BatchRecord:
    name = id_in_path(http, "/batches/")
    batch = await asyncio.to_thread(store.batch, name)
    if batch is None or seen_by(http) not in (None, batch.owner):
        raise ApiError(404, f"There is no batch {name[:100]}; it was deleted when it was old.")
    return batch
