"""A front end gets malformed and unusual HTTP requests: each is answered or its connection closed."""

import contextlib
import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import odd_requests
import pytest
from frontend_process import FrontendProcess
from odd_requests import Odd, request, sized

ANSWERED_WITHIN = 60  # seconds; generous, for machines that are busy otherwise


@pytest.fixture(scope="module")
def server() -> Iterator[FrontendProcess]:
    with FrontendProcess(max_body=1 << 20, max_state=1 << 20) as process:
        yield process


def play(port: int, data: bytes, ends: bool) -> bytes:
    """What comes back: all of it if the client `ends` its side, else the head of the first response."""
    with socket.create_connection(("127.0.0.1", port), ANSWERED_WITHIN) as client:
        got = b""
        with contextlib.suppress(ConnectionError):  # the server has closed it
            client.sendall(data)
            if ends:
                client.shutdown(socket.SHUT_WR)
            while (ends or b"\r\n\r\n" not in got) and (more := client.recv(1 << 16)):
                got += more
        return got


def test_two_thousand_odd_requests_end_no_process(server: FrontendProcess):
    """A stream that waits on the same front end goes on, and none of them is a fault of the server."""
    wrong: list[tuple[Odd, bytes]] = []

    def answered(odd: Odd) -> None:
        got = play(server.port, odd.data, ends=not odd.whole)
        status = int(got[9:12]) if got else 400
        if (status >= 500 and status != 501) or (odd.whole and not got):
            wrong.append((odd, got[:300]))

    body = {"contents": ["hang"], "stream": True}
    with (
        server.http.stream("POST", "/v2/chat/completions", json=body) as stream,
        ThreadPoolExecutor(8) as clients,
    ):
        beats = stream.iter_raw()
        next(beats)
        odd = odd_requests.requests(seed=62, count=2000)
        list(clients.map(answered, odd))
        assert not wrong, wrong[:3]
        assert server.process.is_alive()
        for _ in range(3):
            next(beats)
    assert len({each.kind for each in odd}) > 40


CHUNKED = b"Transfer-Encoding: chunked"
ASK = b'{"contents": ["hello"]}'
IN_CHUNKS = b"%x\r\n" % len(ASK) + ASK + b"\r\n0\r\n"


def answer(server: FrontendProcess, data: bytes, ends: bool = False) -> tuple[int, bytes, dict]:
    """Status, head in lower case and JSON of the first response."""
    with (
        socket.create_connection(("127.0.0.1", server.port), ANSWERED_WITHIN) as client,
        client.makefile("rb") as got,
    ):
        client.sendall(data)
        if ends:
            client.shutdown(socket.SHUT_WR)
        status = int(got.readline().split()[1])
        head = b"".join(iter(got.readline, b"\r\n")).lower()
        length = int(head.partition(b"content-length: ")[2].split()[0])
        return status, head, json.loads(got.read(length))


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (request(IN_CHUNKS + b"X: 1\r\n\r\n", CHUNKED), "hello"),
        (
            request(IN_CHUNKS + b"X: 1\r\nDigest:\r\n\r\n", b"Trailer: X", b"transfer-encoding: Chunked"),
            "hello",
        ),
        (request(IN_CHUNKS + b"\r\n", CHUNKED, b"Upgrade: websocket", b"Connection: Upgrade"), "hello"),
        (sized(ASK, b"Upgrade: h2c", b"Connection: Upgrade, HTTP2-Settings"), "hello"),
        (b"\r\n" + request(IN_CHUNKS.replace(b"0\r\n", b"000;a=b\r\n") + b"\r\n", CHUNKED), "hello"),
    ],
    ids=["a trailer", "two trailers", "chunks and an upgrade", "an upgrade", "an extension"],
)
def test_unusual_requests_are_answered_like_others(server: FrontendProcess, data: bytes, text: str):
    status, _, reply = answer(server, data)
    assert status == 200 and reply["choices"][0]["message"]["content"] == text


@pytest.mark.parametrize(
    ("data", "status", "word"),
    [
        (request(b"ZZ\r\n", CHUNKED), 400, "size"),
        (request(b"2\r\n{}}0\r\n\r\n", CHUNKED), 400, "longer or shorter"),
        (request(b"2\n{}\n0\n\n", CHUNKED), 400, "CR LF"),
        (request(b"0\r\nno field\r\n\r\n", CHUNKED), 400, "trailer"),
        (request(b"100001\r\n", CHUNKED), 413, "1048576"),
        (request(IN_CHUNKS, CHUNKED, b"Content-Length: 2"), 400, "not both"),
        (request(IN_CHUNKS, CHUNKED, version="HTTP/1.0"), 400, "HTTP/1.0"),
        (request(IN_CHUNKS, b"Transfer-Encoding: gzip, chunked"), 501, "alone"),
        (request(b"{}", b"Content-Length: 2", b"Content-Length: 2"), 400, "one number"),
        (request(method="CONNECT", path="localhost:80"), 405, "no proxy"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, "HTTP/1.1"),
    ],
    ids=["no size", "a size too small", "LF", "no trailer", "a size too large", "two lengths",
         "chunks of HTTP/1.0", "gzip", "twice", "CONNECT", "TLS"],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_though_the_client_goes_on(
    server: FrontendProcess, data: bytes, status: int, word: str
):
    found, head, reply = answer(server, data)
    assert (found, word in reply["error"]) == (status, True), reply
    assert b"connection: close" in head or b"HTTP/1.0" in data


@pytest.mark.parametrize("sent", [IN_CHUNKS[:-1], IN_CHUNKS[:4], b""])
def test_a_body_in_chunks_that_is_cut_short_is_refused(server: FrontendProcess, sent: bytes):
    status, _, reply = answer(server, request(sent, CHUNKED, path="/v1/completions"), ends=True)
    assert (
        status == 400
        and reply["error"]["type"] == "invalid_request_error"
        and "ends" in reply["error"]["message"]
    )


def test_a_body_shorter_than_its_length_is_refused(server: FrontendProcess):
    status, _, reply = answer(server, request(ASK, b"Content-Length: %d" % (len(ASK) + 1)), ends=True)
    assert status == 400 and "ends" in reply["error"]


def test_chunks_wait_for_100_continue(server: FrontendProcess):
    with (
        socket.create_connection(("127.0.0.1", server.port), ANSWERED_WITHIN) as client,
        client.makefile("rb") as got,
    ):
        client.sendall(request(b"", CHUNKED, b"Expect: 100-continue"))
        assert got.readline() == b"HTTP/1.1 100 Continue\r\n" and got.readline() == b"\r\n"
        client.sendall(IN_CHUNKS + b"\r\n")
        assert got.readline() == b"HTTP/1.1 200 OK\r\n"


def of_http_1_0(server: FrontendProcess, data: bytes) -> tuple[bytes, bytes]:
    """Head in lower case, and body up to where the connection ends."""
    with (
        socket.create_connection(("127.0.0.1", server.port), ANSWERED_WITHIN) as client,
        client.makefile("rb") as got,
    ):
        client.sendall(data)
        head, _, body = got.read().partition(b"\r\n\r\n")
        return head.lower(), body


@pytest.mark.parametrize("fields", [[], [b"Connection: keep-alive"]])
@pytest.mark.parametrize("path", ["/v2/chat/completions", "/v1/batch/completions"])
def test_a_stream_of_http_1_0_has_no_chunks(server: FrontendProcess, path: str, fields: list[bytes]):
    ask = b'{"contents": ["half hello"], "stream": true, "chunk_size": 1}'
    with (
        socket.create_connection(("127.0.0.1", server.port), ANSWERED_WITHIN) as client,
        client.makefile("rb") as got,
    ):
        client.sendall(sized(ask, *fields, path=path, version="HTTP/1.0"))
        head = b"".join(iter(got.readline, b"\r\n")).lower()
        first = got.readline()  # which comes before the last
        server.engine.release()
        body = first + got.read()
    assert (
        b" 200 " in head
        and b"transfer-encoding" not in head
        and b"\r\ncontent-type: text/event-stream" in head
    )
    assert b"x-request-id" in head and b"\r\nconnection: close" in head
    data = [line.removeprefix(b"data: ") for line in body.split(b"\n") if line.startswith(b"data: ")]
    assert data.pop() == b"[DONE]" and len(data) > 1
    assert (
        "".join(json.loads(each)["choices"][0]["delta"].get("content", "") for each in data) == "half hello"
    )
    assert server.logs(lambda log: f"POST {path} 200" in log)


def test_a_slow_reply_of_http_1_0_ends_with_its_connection(server: FrontendProcess):
    head, body = of_http_1_0(server, sized(b'{"contents": ["late"]}', version="HTTP/1.0"))
    assert b"transfer-encoding" not in head and json.loads(body)["choices"][0]["message"]["content"] == "late"


def test_a_client_of_http_1_0_that_leaves_frees_its_row(server: FrontendProcess):
    before = len(server.engine.cancelled)
    with socket.create_connection(("127.0.0.1", server.port), ANSWERED_WITHIN) as client:
        client.sendall(sized(b'{"contents": ["hang"], "stream": true}', version="HTTP/1.0"))
        assert client.recv(12) == b"HTTP/1.1 200"
    assert server.engine.wait_for(lambda: len(server.engine.cancelled) > before, ANSWERED_WITHIN)


def test_a_whole_reply_of_http_1_0_has_its_length(server: FrontendProcess):
    head, body = of_http_1_0(server, sized(ASK, version="HTTP/1.0"))
    assert b"transfer-encoding" not in head and b"\r\ncontent-length: %d" % len(body) in head
    assert b"hello" in body


def test_a_client_of_http_1_0_may_keep_its_connection(server: FrontendProcess):
    ask = sized(ASK, b"Connection: Keep-Alive", version="HTTP/1.0")
    with (
        socket.create_connection(("127.0.0.1", server.port), ANSWERED_WITHIN) as client,
        client.makefile("rb") as got,
    ):
        for _ in range(3):
            client.sendall(ask)
            assert got.readline().split()[1] == b"200"
            head = b"".join(iter(got.readline, b"\r\n")).lower()
            assert b"connection: keep-alive" in head
            assert b"hello" in got.read(int(head.partition(b"content-length: ")[2].split()[0]))
        client.sendall(sized(ASK, version="HTTP/1.0"))
        assert got.read().count(b"hello") == 1
