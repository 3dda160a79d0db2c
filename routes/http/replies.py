"""How a route replies: the JSON that it makes of the rows of a job, whole or as events of a stream."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import msgspec

from routes.http.errors import ApiError, ErrorShape, Json, native_shape
from rwkv_batch.wire.client import Job
from rwkv_batch.wire.protocol import RowDelta, TokenLogprob

encode_json = msgspec.json.encode


@dataclass
class RowResult:
    """A row's whole output."""

    text: str = ""
    tokens: int = 0
    finish_reason: str = "stop"
    logprobs: list[TokenLogprob] = field(default_factory=list)
    deltas: list[RowDelta] = field(default_factory=list)  # as they came

    def add(self, delta: RowDelta) -> None:
        self.text += delta.text
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs
        self.finish_reason = delta.finish_reason or self.finish_reason
        self.deltas.append(delta)


class Reply(ABC):
    """Turns the rows of one job into the reply of its route. One object serves one request."""

    shape: ErrorShape = staticmethod(native_shape)
    done = b"data: [DONE]\n\n"  # ends a stream

    @abstractmethod
    def whole(self, job: Job, rows: list[RowResult]) -> Json:
        """The JSON body of a reply that is not streamed."""

    def first(self, job: Job) -> list[Json]:
        """Events of a stream before any text."""
        return []

    @abstractmethod
    def events(self, deltas: list[RowDelta]) -> list[Json]:
        """Events for new text, in order."""

    def last(self, job: Job) -> list[Json]:
        """Events after all rows have finished, before `done`."""
        return []

    def error(self, message: str, status: int) -> Json:
        """The error body of the route's family."""
        return self.shape(ApiError(status, message))

    def failure(self, message: str, status: int) -> Json:
        """The last event of a stream whose job has failed."""
        return self.error(message, status)

    def frame(self, event: Json) -> bytes:
        """`event` as a server-sent event."""
        return b"data: " + encode_json(event) + b"\n\n"
