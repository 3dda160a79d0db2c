"""Which connections may be closed where files are scarce: never one whose client waits for a reply."""

import socket
import struct

import pytest

from routes.guard import connections
from routes.guard.connections import ASKED_NOTHING, SILENT, WAITING, silence


def info(sent: float, received: float, bytes_received: int, segments_sent: int, unsent: int = 0) -> bytes:
    """A tcp_info, as Linux gives it: seconds since the last data each way, and how much there was."""
    data = bytearray(160)
    struct.pack_into("=I", data, 44, int(sent * 1000))
    struct.pack_into("=I", data, 52, int(received * 1000))
    struct.pack_into("=Q", data, 128, bytes_received)
    struct.pack_into("=I", data, 144, unsent)
    struct.pack_into("=I", data, 156, segments_sent)
    return bytes(data)


LONG = WAITING + 1


@pytest.mark.parametrize(
    "connection",
    [
        info(ASKED_NOTHING, ASKED_NOTHING, 0, 0),
        info(SILENT, SILENT + 3, 200, 1),
        info(LONG, LONG, 17, 0),
    ],
    ids=["asked nothing", "answered", "half a request"],
)
def test_a_silent_connection_may_be_closed(connection: bytes) -> None:
    assert silence(connection, waiting=True) is not None


@pytest.mark.parametrize(
    "connection",
    [
        info(0.3, 0.3, 0, 0),
        info(0.3, 600, 200, 40),
        info(600, 600, 200, 40, unsent=5000),
        info(30, 30, 200, 0),
        info(90, 20, 400, 9),
    ],
    ids=["new", "stream", "client that does not read", "waiting for a reply", "waiting for a second reply"],
)
def test_a_connection_that_something_happens_on_stays(connection: bytes) -> None:
    assert silence(connection, waiting=True) is None


def test_half_a_request_is_told_from_a_wait_when_nobody_waits() -> None:
    half = info(30, 30, 17, 0)
    assert silence(half, waiting=True) is None and silence(half, waiting=False) == 30


def test_linux_gives_what_is_read_here() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as client,
        listener.accept()[0] as served,
    ):
        client.sendall(b"x" * 1234)
        assert len(served.recv(1234, socket.MSG_WAITALL)) == 1234
        served.sendall(b"y")
        assert client.recv(1) == b"y"
        found = served.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 160)
    assert len(found) == 160
    assert struct.unpack_from("=Q", found, 128) == (1234,)  # bytes received
    assert struct.unpack_from("=I", found, 156) == (1,)  # segments with data, sent
    assert struct.unpack_from("=I", found, 144) == (0,)  # bytes that are not sent yet
    sent_ago, received_ago = (struct.unpack_from("=I", found, place)[0] for place in (44, 52))
    assert sent_ago <= received_ago < 60_000


def test_a_new_connection_stays_that_has_the_number_of_a_silent_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as client,
        listener.accept()[0] as served,
    ):
        served.sendall(b"sent")
        client.sendall(b"sent back")
        assert served.recv(9, socket.MSG_WAITALL) and client.recv(4, socket.MSG_WAITALL)
        all_taken = max(each.fileno() for each in (listener, client, served)) + 1
        monkeypatch.setattr("resource.getrlimit", lambda kind: (all_taken, all_taken))
        looked_at = set[bytes]()

        def silent_once(found: bytes, waiting: bool) -> float | None:
            received = found[128:136]
            silent = received not in looked_at
            looked_at.add(received)
            return 9.0 if silent else None

        monkeypatch.setattr(connections, "silence", silent_once)
        connections.Connections().make_room(waiting=False)
        assert len(looked_at) >= 2
        served.sendall(b"x")
        assert client.recv(1) == b"x"
