"""Clients that send or read slowly, or stop: what they get, and that others are not held up by them."""

import json
import select
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from frontend_process import FrontendProcess
from odd_requests import request, sized

LIMITS = {
    # A busy machine may stop a client, or the server, for a second.
    "header_timeout": 2.0,
    "body_timeout": 2.0,
    "keep_alive_timeout": 2.0,
    "send_timeout": 0.8,
    "plain_seconds": 5.0,  # nothing is sent before a reply is complete
    "max_body": 1 << 20,
    "max_state": 1 << 20,
}
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def hasty() -> Iterator[FrontendProcess]:
    """With little patience."""
    with FrontendProcess(**LIMITS) as process:
        yield process


def connect(process: FrontendProcess) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", process.port))
    connection.settimeout(60)  # a deadline, not a wait
    return connection


def rest_of(connection: socket.socket) -> bytes:
    """All that comes until the server ends the connection."""
    return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def body(prompt: str, **fields: object) -> bytes:
    return json.dumps({"contents": [prompt]} | fields).encode()


UNFINISHED = {
    "half a line": b"POST /v1/chat",
    "half a head": b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nX-",
    "head without its end": b"GET /health HTTP/1.1\r\nHost: x\r\n",
    "no body": request(b"", b"Content-Length: 9", path="/v1/completions"),
    "half a body": request(b'{"prompt": ', b"Content-Length: 900", path="/v1/completions"),
    "half a body behind a request": sized(body("a"))
    + request(b'{"prompt": ', b"Content-Length: 900", path="/v1/completions"),
    "half a form": request(
        b"--B\r\n",
        b"Content-Length: 900",
        b"Content-Type: multipart/form-data; boundary=B",
        path="/v1/completions",
    ),
    "half a chunk": request(b"9\r\n{", b"Transfer-Encoding: chunked", path="/v1/completions"),
    "half a body of HTTP/1.0": request(
        b"{", b"Content-Length: 900", path="/v1/completions", version="HTTP/1.0"
    ),
}


def test_a_request_that_does_not_end_is_answered(hasty: FrontendProcess):
    with ExitStack() as opened:
        clients = {name: opened.enter_context(connect(hasty)) for name in UNFINISHED}
        for name, client in clients.items():
            client.sendall(UNFINISHED[name])
        for name, client in clients.items():
            head, _, content = rest_of(client).rpartition(b"\r\n\r\n")
            assert head.rpartition(b"HTTP/1.")[2][1:6] == b" 408 ", name
            error = json.loads(content)["error"]
            assert "took too long" in (error["message"] if b"/v1/completions" in UNFINISHED[name] else error)


def test_what_comes_slowly_but_steadily_is_taken(hasty: FrontendProcess):
    """It takes longer than a body may be silent."""
    data = sized(body("x" * 3000))
    while not sent_steadily(hasty, data):
        pass  # again where this process itself has stood still, as then the server may be right


def sent_steadily(process: FrontendProcess, data: bytes) -> bool:
    """Send a request slowly, and look at the reply; False: the pace could not be kept."""
    with connect(process) as client:
        last = time.monotonic()
        for at in range(0, len(data), 200):
            replied = select.select([client], [], [], 0.15)[0]  # the pace of the client
            before, last = last, time.monotonic()
            if last - before > LIMITS["body_timeout"] / 2:
                return False
            assert not replied
            client.sendall(data[at : at + 200])
        if time.monotonic() - last > LIMITS["body_timeout"] / 2:
            return False
        assert client.recv(4096).startswith(b"HTTP/1.1 200 ")
    return True


@pytest.mark.parametrize("data", [b"", request(method="GET", path="/health")], ids=["silent", "answered"])
def test_a_connection_that_asks_for_nothing_is_closed(hasty: FrontendProcess, data: bytes):
    with connect(hasty) as client:
        client.sendall(data)
        assert rest_of(client)[:12] == b"HTTP/1.1 200"[: len(data)]


@pytest.mark.parametrize("cut", [0, -3], ids=["whole", "body in two parts"])
def test_who_waits_for_a_reply_is_not_idle(hasty: FrontendProcess, cut: int):
    data = sized(body("held but well"))
    while not asked_again(hasty, data[:cut], data[cut:]):
        pass  # again where that took so long that the connection was idle


def asked_again(process: FrontendProcess, *parts: bytes) -> bool:
    """Send a request that is answered late, and another one at once; whether that was in time."""
    with connect(process) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for part in parts:
            client.sendall(part)
        assert not select.select([client], [], [], 2.5)[0], "an idle connection would be closed by now"
        released = time.monotonic()
        process.engine.release()
        assert b"held but well" in client.recv(1 << 16)
        client.sendall(request(method="GET", path="/health"))
        if client.recv(1 << 16).startswith(b"HTTP/1.1 200 "):
            return True
        assert time.monotonic() - released > LIMITS["keep_alive_timeout"] / 2
    return False


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/state/import?session_id=a"])
def test_a_body_that_is_too_long_is_refused_before_it_comes(hasty: FrontendProcess, path: str):
    with connect(hasty) as client:
        client.sendall(request(b"", b"Content-Length: 3000000000", b"Expect: 100-continue", path=path))
        reply = rest_of(client)
    assert reply.startswith(b"HTTP/1.1 413 ") and b"3000000000 bytes" in reply


@pytest.mark.parametrize("version", ["HTTP/1.0", "HTTP/1.1"])
@pytest.mark.parametrize(
    ("length", "status"), [(b"Content-Length: 16777216", b"413"), (b"Content-Length: 1, 2", b"400")]
)
def test_who_is_refused_may_send_all_and_then_read(
    hasty: FrontendProcess, length: bytes, status: bytes, version: str
):
    """As proxies do that hold a body. A reset in the middle would take the reply from them."""
    with connect(hasty) as client:
        client.sendall(request(b"", length, version=version))
        replied = select.poll()
        replied.register(client, select.POLLRDHUP)
        assert replied.poll(60_000), "the server does not end its side"
        for _ in range(64):
            client.sendall(b"x" * (1 << 18))
        assert rest_of(client).split()[1] == status


def test_a_file_may_be_longer_than_other_bodies(hasty: FrontendProcess):
    data = b"x" * (LIMITS["max_body"] + 1)
    with connect(hasty) as client:
        client.sendall(sized(data, path="/v1/state/import?session_id=a"))
        reply = client.recv(4096)
    assert b"413" in reply and b"The file has" in reply


@pytest.mark.parametrize("coded", [False, True])
def test_who_waits_to_be_asked_for_the_body_is(hasty: FrontendProcess, coded: bool):
    data = body("hello")
    kind = b"Transfer-Encoding: chunked" if coded else b"Content-Length: %d" % len(data)
    with connect(hasty) as client:
        client.sendall(request(b"", kind, b"Expect: 100-continue"))
        assert client.recv(4096) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.sendall(b"%x\r\n%s\r\n0\r\n\r\n" % (len(data), data) if coded else data)
        assert b"hello" in client.recv(4096)


@pytest.mark.parametrize("stream", [False, True])
def test_who_sends_no_more_gets_the_answer(hasty: FrontendProcess, stream: bool):
    prompt = "slow" * 8
    with connect(hasty) as client:
        client.sendall(sized(body(prompt, stream=stream, chunk_size=1)))
        client.shutdown(socket.SHUT_WR)
        reply = rest_of(client)
    assert b"[DONE]" in reply if stream else prompt.encode() in reply


def test_half_a_body_at_the_end_is_a_bad_request(hasty: FrontendProcess):
    with connect(hasty) as client:
        client.sendall(request(b"{", b"Content-Length: 9"))
        client.shutdown(socket.SHUT_WR)
        reply = rest_of(client)
    assert reply.startswith(b"HTTP/1.1 400 ") and b"ends after 1 of the 9 bytes" in reply


@pytest.mark.parametrize("version", ["HTTP/1.1", "HTTP/1.0"])
def test_who_reads_nothing_is_let_go(hasty: FrontendProcess, version: str):
    """The rows end, and so does the connection with all that waits in it."""
    flood = body("flood" + "x" * 1_000_000, stream=True, chunk_size=1 << 16, max_tokens=1 << 30)
    with connect(hasty) as client:
        client.sendall(sized(flood, version=version))
        assert client.recv(1000)
        wanted = hasty.engine.requests[-1].id
        assert hasty.engine.wait_for(lambda: wanted in hasty.engine.cancelled, 30)
        ended = select.poll()
        ended.register(client, 0)  # a reset, and no end that must be read
        assert ended.poll(60_000)


def test_a_client_that_resets_frees_its_rows(hasty: FrontendProcess):
    with connect(hasty) as client:
        client.sendall(sized(body("hang and reset", stream=True)))
        assert client.recv(1000)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    wanted = hasty.engine.request("hang and reset").id
    assert hasty.engine.wait_for(lambda: wanted in hasty.engine.cancelled, 30)


def test_a_new_client_takes_the_place_of_a_silent_one():
    """And none that of a client which waits for its reply."""
    with FrontendProcess(max_connections=4, patches={"routes.guard.watch.SILENT": 0.2}) as process:
        hanging = [connect(process) for _ in range(2)]
        for client in hanging:
            client.sendall(sized(body("hang", stream=True)))
            assert client.recv(1000)
        for _ in range(8):
            with connect(process) as client:
                client.sendall(request(method="GET", path="/health"))
                silent = client.recv(1000)
                assert silent[:12] in (b"HTTP/1.1 200", b"HTTP/1.1 503")
        more = [connect(process) for _ in range(8)]
        answers = []
        for client in more:
            client.sendall(sized(body("hang", stream=True)))
            answers.append(client.recv(12))
        assert b"HTTP/1.1 503" in answers
        for client in hanging:
            assert client.recv(1000)
        for client in [*hanging, *more]:
            client.close()
