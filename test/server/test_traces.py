"""Spans of requests, as a collector on this machine gets them."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from serving import Server, events, until

SECRET = "the parrot Polynesia"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CHAT = {
    "messages": [{"role": "user", "content": f"Who is {SECRET}?"}],
    "max_tokens": 6,
    "temperature": 0,
    "seed": 7,
    "user": SECRET,
}


class Collector(ThreadingHTTPServer):
    """Keeps the spans that it gets."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.raw, self.spans = b"", []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def of(self, trace: str) -> dict[str, list]:
        """The spans of a trace by their names."""
        found: dict[str, list] = {}
        for span in list(self.spans):
            if span.trace_id.hex() == trace:
                found.setdefault(span.name, []).append(span)
        return found


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        request = ExportTraceServiceRequest.FromString(data)
        self.server.raw += data
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.server.spans += scope.spans
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as running:
        yield running
        running.shutdown()


@pytest.fixture(scope="module")
def traced(collector: Collector) -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")  # milliseconds, until spans are sent
        url = f"http://127.0.0.1:{collector.server_port}/v1/traces"
        running = Server("--device", "cpu", "--frontends", "1", "--traces", url)
    yield running
    assert running.stop() == 0, running.log()


def ask(server: Server, trace: str, path: str, body: dict, flags: str = "01") -> httpx.Response:
    headers = {"traceparent": f"00-{trace}-{PARENT}-{flags}"}
    reply = httpx.post(server.url + path, json=body, headers=headers, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply


def values(span) -> dict[str, object]:
    """Its attributes."""
    found = {}
    for each in span.attributes:
        kind = each.value.WhichOneof("value")
        value = getattr(each.value, kind)
        found[each.key] = [v.string_value for v in value.values] if kind == "array_value" else value
    return found


def test_a_chat_has_spans_for_queue_prefill_and_decode(traced: Server, collector: Collector):
    reply = ask(traced, TRACE, "/v1/chat/completions", CHAT)
    until(lambda: len(collector.of(TRACE)) == 4)
    found = collector.of(TRACE)
    (root,) = found["chat rwkv7-demo"]
    assert root.parent_span_id.hex() == PARENT
    assert reply.headers["traceparent"] == f"00-{TRACE}-{root.span_id.hex()}-01"
    usage = reply.json()["usage"]
    assert values(root) == values(root) | {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "rwkv7-demo",
        "gen_ai.request.max_tokens": 6,
        "gen_ai.request.temperature": 0.0,
        "gen_ai.request.seed": 7,
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
        "gen_ai.response.finish_reasons": [reply.json()["choices"][0]["finish_reason"]],
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
    }
    parts = [found[name][0] for name in ("queue", "prefill", "decode")]
    assert all(part.parent_span_id == root.span_id for part in parts)
    times = [time for part in parts for time in (part.start_time_unix_nano, part.end_time_unix_nano)]
    assert times == sorted(times), "one after the other"
    slack = 50_000_000  # of two clocks, in nanoseconds
    assert root.start_time_unix_nano <= times[0] + slack and times[-1] <= root.end_time_unix_nano + slack


def test_a_turn_ends_with_its_commit_and_a_stream_is_traced(traced: Server, collector: Collector):
    trace = "1" * 32
    body = {"contents": [f"User: {SECRET}\n\nAssistant:"], "session_id": "s", "max_tokens": 4, "stream": True}
    headers = {"traceparent": f"00-{trace}-{PARENT}-01"}
    with httpx.stream(
        "POST", f"{traced.url}/state/chat/completions", json=body, headers=headers, timeout=60
    ) as stream:
        assert list(events(stream))[-1] == "[DONE]"
    until(lambda: "chat rwkv7-demo" in collector.of(trace))  # which is sent last
    assert set(collector.of(trace)) == {"chat rwkv7-demo", "queue", "prefill", "decode", "commit"}


def test_each_row_has_its_spans(traced: Server, collector: Collector):
    trace = "2" * 32
    ask(traced, trace, "/v1/completions", {"prompt": SECRET, "n": 3, "max_tokens": 2})
    until(lambda: "text_completion rwkv7-demo" in collector.of(trace))  # which is sent last
    (root,) = collector.of(trace)["text_completion rwkv7-demo"]
    assert values(root)["gen_ai.request.choice.count"] == 3
    assert sorted(values(span)["rwkv.row"] for span in collector.of(trace)["queue"]) == [0, 1, 2]


def test_what_the_caller_does_not_sample_is_not_sent_and_no_span_holds_a_text(
    traced: Server, collector: Collector
):
    unsampled, last = "3" * 32, "4" * 32
    ask(traced, unsampled, "/v1/chat/completions", CHAT, flags="00")
    ask(traced, last, "/v1/chat/completions", CHAT)
    until(lambda: len(collector.of(last)) == 4)
    assert not collector.of(unsampled)
    assert SECRET.encode() not in collector.raw and b"Polynesia" not in collector.raw


def test_a_client_that_leaves_ends_its_spans(traced: Server, collector: Collector):
    trace = "5" * 32
    body = CHAT | {"max_tokens": 100_000, "stream": True, "ignore_eos": True, "stop_tokens": []}
    headers = {"traceparent": f"00-{trace}-{PARENT}-01"}
    with httpx.stream(
        "POST", f"{traced.url}/v1/chat/completions", json=body, headers=headers, timeout=60
    ) as stream:
        next(events(stream))
    until(lambda: "chat rwkv7-demo" in collector.of(trace))
