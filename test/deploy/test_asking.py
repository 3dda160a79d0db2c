"""What a replica of Ray Serve makes of a server that does not answer as it should: nothing, and no error."""

import socket
import threading

import pytest

from deploy.cluster.asking import ask
from deploy.cluster.scaling import said

OK = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    ("reply", "body"),
    [
        (OK + b"Content-Length: 2\r\n\r\n{}", b"{}"),
        (OK + b"Content-Length: 0\r\n\r\n", b" "),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
        (b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n", b""),
        (OK + b"Content-Length: 20\r\n\r\n{}", b""),  # it has died meanwhile
        (OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", b""),
        (b"SSH-2.0-of another program\r\n", b""),
        (b"HTTP/1.1 two hundred\r\n\r\n", b""),
        (b"HTTP/1.1 302 Found\r\nLocation: ftp:///\r\n\r\n", b""),
        (b"", b""),
    ],
)
def test_only_a_whole_answer_counts(reply: bytes, body: bytes):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(reply)

        server = threading.Thread(target=answer)
        server.start()
        assert ask(f"127.0.0.1:{listener.getsockname()[1]}", "/health/live") == body
        server.join()


@pytest.mark.parametrize(
    "stats",
    [
        b"",
        b" ",
        b"<html>",
        b"[]",
        b"\xff",
        b'{"models": 1}',
        b'{"models": [{"rows": 0, "running": 1, "waiting": 0}]}',
        b'{"models": [{"rows": 8, "running": NaN, "waiting": 0}]}',
        b'{"models": [{"rows": 8, "running": 1e999, "waiting": 0}]}',
        b'{"models": [{"rows": 8, "running": "1", "waiting": 0}]}',
        b'{"models": [{"rows": 8}]}',
    ],
)
def test_a_server_without_numbers_says_nothing(stats: bytes):
    assert said(stats) == {}


def test_a_server_with_numbers_says_its_share():
    assert said(b'{"models": [{"rows": 8, "running": 4, "waiting": 0}]}') == {"busy": 0.5}
