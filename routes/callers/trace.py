"""What is known of a request that is traced. The spans are made of it in `tracing`."""

from dataclasses import dataclass, field
from typing import Any, Protocol

from rwkv_batch.wire.protocol import GenerateRequest, RowTimes


@dataclass(eq=False)
class RequestTrace:
    """Of one HTTP request."""

    span: Any  # OpenTelemetry's, of all of it
    recorded: bool  # whether its spans are sent, as the caller or the sampler has decided
    headers: dict[str, str]  # of the reply: the context in which later requests may go on
    requests: list[GenerateRequest] = field(default_factory=list)  # that the engine has got
    rows: list[RowTimes] = field(default_factory=list)


class Tracing(Protocol):
    """Where spans go."""

    def begin(self, traceparent: str | None, tracestate: str | None) -> RequestTrace:
        """A request has come, with these headers."""

    def end(self, trace: RequestTrace, route: str, status: int, tokens: tuple[int, int]) -> None:
        """Its reply has been made. tokens: of prompts and of answers."""

    def close(self) -> None:
        """Send what has not been sent."""
