"""Spans of requests by OpenTelemetry, with the names of its conventions for generative models.

A request has a span of its own. Each of its first rows has one for its time in the queue, one until the first
token, one until the end of the text and, of a session's turn, one until the commit. No span holds a text.
"""

import time
from collections.abc import Iterator

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from routes.callers.trace import RequestTrace
from rwkv_batch import __version__
from rwkv_batch.wire.protocol import GenerateRequest, RowTimes

MOST_ROWS = 16  # of a request that have spans of their own
PROVIDER = "rwkv"
CHATS = ("/chat/", "/responses", "/messages", "/api/chat")  # in the paths of routes that answer conversations
Value = str | int | float | list[str]

_context = TraceContextTextMapPropagator()


class SpanSender:
    """Sends spans to a collector from a thread of its own. `url`: where it takes them by OTLP over HTTP."""

    def __init__(self, url: str) -> None:
        resource = Resource.create({"service.name": "rwkv-batch", "service.version": __version__})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
        self._tracer = self._provider.get_tracer("rwkv_batch", __version__)

    def begin(self, traceparent: str | None, tracestate: str | None) -> RequestTrace:
        """A request has come; it goes on in the caller's context if there is one. See Tracing."""
        given = {"traceparent": traceparent, "tracestate": tracestate}
        parent = _context.extract({name: value for name, value in given.items() if value})
        span = self._tracer.start_span("request", parent, SpanKind.SERVER)
        headers: dict[str, str] = {}
        _context.inject(headers, set_span_in_context(span))
        return RequestTrace(span, span.is_recording(), headers)

    def end(self, trace: RequestTrace, route: str, status: int, tokens: tuple[int, int]) -> None:
        """Its reply has been made; see Tracing."""
        span: Span = trace.span
        if not trace.recorded:
            return
        operation = "chat" if any(part in route for part in CHATS) else "text_completion"
        first = trace.requests[0]
        span.update_name(f"{operation} {first.to_model}")
        span.set_attributes(
            {
                "gen_ai.operation.name": operation,
                "gen_ai.usage.input_tokens": tokens[0],
                "gen_ai.usage.output_tokens": tokens[1],
                "gen_ai.response.finish_reasons": [times.reason for times in trace.rows],
                "http.route": route,
                "http.response.status_code": status,
                **_asked(first),
            }
        )
        if status >= 400:
            span.set_attribute("error.type", str(status))
        if status >= 500:
            span.set_status(Status(StatusCode.ERROR))
        for times in trace.rows[:MOST_ROWS]:
            self._row(span, times)
        span.end()

    def close(self) -> None:
        """Send what has not been sent."""
        self._provider.shutdown()

    def _row(self, parent: Span, times: RowTimes) -> None:
        # The engine's clock is monotonic, and that of spans the time of day.
        offset, context = time.time() - time.monotonic(), set_span_in_context(parent)
        for name, began, ended in _phases(times):
            start = int((began + offset) * 1e9)
            span = self._tracer.start_span(
                name, context, start_time=start, attributes={"rwkv.row": times.row}
            )
            span.end(int((ended + offset) * 1e9))


def _phases(times: RowTimes) -> Iterator[tuple[str, float, float]]:
    """What a row has come through, with beginning and end; the last one ends with the row."""
    names = ("queue", "prefill", "decode", "commit")
    marks = [times.arrived, times.admitted, times.first_token, times.text_ended, times.answered]
    known = [mark for mark in marks[:-1] if mark is not None]
    ends = [*known[1:], times.answered if times.answered is not None else known[-1]]
    places = [place for place, mark in enumerate(marks[:-1]) if mark is not None]
    for place, began, ended in zip(places, known, ends, strict=True):
        if names[place] != "commit" or times.committed:
            yield names[place], began, ended


def _asked(request: GenerateRequest) -> dict[str, Value]:
    """What a request asks for, by the names of the conventions; nothing that is a text."""
    sampling = request.sampling
    asked: dict[str, Value] = {
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": request.to_model,
        "gen_ai.response.model": request.to_model,
        "gen_ai.request.max_tokens": request.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.choice.count": request.n * len(request.prompts),
        "gen_ai.request.stream": request.flush_tokens > 0,
    }
    return asked if sampling.seed is None else asked | {"gen_ai.request.seed": sampling.seed}
