"""What a family of routes must know to answer: how rows become JSON. Sending it is
`routes/http.py`'s part.
"""

from dataclasses import dataclass, field
from typing import Protocol

from rwkv_batch.wire.client import Job
from rwkv_batch.wire.protocol import RowDelta, TokenLogprob


@dataclass
class RowResult:
    """A row's whole output."""

    text: str = ""
    tokens: int = 0
    finish_reason: str = "stop"
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def add(self, delta: RowDelta) -> None:
        self.text += delta.text
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs
        self.finish_reason = delta.finish_reason or self.finish_reason


class Reply(Protocol):
    """Turns the rows of one job into the reply of its route. One object serves one request."""

    def whole(self, job: Job, rows: list[RowResult]) -> dict:
        """The JSON body of a reply that is not streamed."""

    def first(self, job: Job) -> list[dict]:
        """Events of a stream before any text."""

    def events(self, deltas: list[RowDelta]) -> list[dict]:
        """Events for new text, in order."""

    def last(self, job: Job) -> list[dict]:
        """Events after all rows have ended, before `[DONE]`."""

    def error(self, message: str, status: int) -> dict:
        """The error body of the route's family; in a stream, an event."""
