"""How a route replies: the JSON that it makes of the rows of a job, whole or as events of a stream."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from routes.http.errors import ApiError, ErrorShape, Json, native_shape
from rwkv_batch.wire.client import Job, Wire
from rwkv_batch.wire.deltas import merge
from rwkv_batch.wire.protocol import GenerateRequest, RowDelta

ENDS_OF_LINES = ((b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"), (b"\xc2\x85", b"\\u0085"))


def encode_json(value: object) -> bytes:
    """`value` as JSON in UTF-8, in which no character ends a line.

    To Unicode, U+2028, U+2029 and U+0085 do, and clients that split streams into lines by its rules (httpx)
    would break there. JSON itself escapes all others.
    """
    data = msgspec.json.encode(value)
    if (
        0xE2 not in data and 0xC2 not in data
    ):  # with which these begin; a search for one byte costs next to nothing
        return data
    for character, escaped in ENDS_OF_LINES:  # only a string can hold one
        data = data.replace(character, escaped)
    return data


def timestamp(seconds: float | None = None) -> str:
    """Now, or that many seconds since 1970, as RFC 3339 writes it."""
    when = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return when.isoformat().replace("+00:00", "Z")


def merge_in_order(deltas: list[RowDelta]) -> list[RowDelta]:
    """One delta per row, which holds all of the row's deltas; in the order of the rows."""
    return sorted(merge(deltas), key=lambda delta: delta.row)


class Reply(ABC):
    """Turns the rows of one job into the reply of its route. One object serves one request."""

    shape: ErrorShape = staticmethod(native_shape)
    media_type = "text/event-stream"  # of a stream
    beat = b": \n\n"  # what a stream sends while there is nothing to say
    done = b"data: [DONE]\n\n"  # ends a stream
    slow = False  # what is done with what comes takes long, and is for the threads of streams
    ignored: Sequence[str] = ()  # members of lists of the request that are left out

    def begin(self, client: Wire, request: GenerateRequest) -> Job:
        """Submit the request."""
        return client.submit(request)

    @abstractmethod
    def whole(self, job: Job, deltas: list[RowDelta]) -> Json | list[Any]:
        """The JSON body of a reply that is not streamed, made of all deltas of the job as they came."""

    def made_by(self, fingerprint: str) -> None:  # noqa: B027 (most replies do not say it)
        """The fingerprint of the weights, before anything else."""

    def first(self, job: Job) -> list[Json]:
        """Events of a stream before any text."""
        return []

    @abstractmethod
    def events(self, deltas: list[RowDelta]) -> list[Json]:
        """Events for new text, in order."""

    def last(self, job: Job) -> list[Json]:
        """Events after all rows have finished, before `done`."""
        return []

    def error(self, message: str, status: int, param: str | None = None) -> Json:
        """The error body of the route's family. `param`: the field that is wrong."""
        return self.shape(ApiError(status, message, param))

    def row_error(self, row: RowDelta) -> Json:
        """What the choice of a row says besides, if it has ended with an error while others went on."""
        return {"error": self.error(row.error, 500)["error"]} if row.error else {}

    def failure(self, message: str, status: int) -> Json:
        """The last event of a stream whose job has failed."""
        return self.error(message, status)

    def frame(self, event: Json) -> bytes:
        """`event` as a server-sent event."""
        return b"data: " + encode_json(event) + b"\n\n"


class TypedEvents(Reply):
    """Events that have a type, which stands in a line of its own too; the last one ends the stream."""

    done = b""

    def frame(self, event: Json) -> bytes:
        return b"event: " + str(event["type"]).encode() + b"\n" + super().frame(event)


class JsonLines(Reply):
    """A stream of JSON objects, one a line. White space in front of one tells nothing."""

    media_type = "application/x-ndjson"
    beat = b" "
    done = b""

    def frame(self, event: Json) -> bytes:
        return encode_json(event) + b"\n"
