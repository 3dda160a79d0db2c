"""What Robyn reads in place of what a client has sent, and what is read of a body."""

import ctypes
import errno
import fcntl
import gzip
import json
import os
import random
import select
import socket
import struct
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import odd_requests
import pytest
from frontend_process import PASSWORD, FrontendProcess
from odd_requests import chunked, request, sized

from routes.guard import lingering
from routes.guard.connection import Connection
from routes.guard.inbound import NOTE, Inbound, Note
from routes.guard.limits import Limits
from routes.guard.lingering import Lingering
from routes.guard.pieces import BytePieces
from routes.guard.reads import Guard, Unguarded
from routes.guard.watch import Watch
from routes.http.contents import PIECE, decode, read_form
from routes.http.errors import ApiError

LIMITS = Limits(body=1 << 20)


def read(*parts: bytes) -> bytes:
    """What is read of a connection on which `parts` come one after the other."""
    inbound, got = Inbound(LIMITS), b""
    for part in parts:
        if inbound.passes(part):
            got += part
        else:
            got += bytes(inbound.out)
            inbound.out = BytePieces()
    return got


ORDINARY = (
    request(method="GET", path="/health"),
    sized(b"{}"),
    sized(b"GET / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"),
    sized(b'{"a": "multipart/form-data"}') + request(method="GET", path="/"),
    sized(b"x" * 100_000, b"Accept: */*", b"Cookie: a=b"),
)


@pytest.mark.parametrize("data", ORDINARY, ids=range(len(ORDINARY)))
def test_ordinary_requests_are_read_as_they_are(data: bytes):
    assert Inbound(LIMITS).passes(data)
    inbound = Inbound(LIMITS)
    assert inbound.passes(data * 3) and not inbound.part
    assert read(*(data[i : i + 1] for i in range(len(data)))) == data
    with_lf = data.replace(b"\r\n", b"\n", data.partition(b"\r\n\r\n")[0].count(b"\r\n") + 2)
    assert read(with_lf) == with_lf


def test_a_head_in_a_body_is_no_head():
    """Else a request could be read that the client has not sent."""
    hidden = request(b"0\r\n\r\n", b"Transfer-Encoding: chunked")
    inbound = Inbound(LIMITS)
    assert not inbound.passes(sized(hidden)[:-1]) and not inbound.out
    assert not inbound.passes(b"\n") and bytes(inbound.out) == sized(hidden)
    inbound.out = BytePieces()
    assert not inbound.passes(hidden)


@pytest.mark.parametrize("seed", range(4))
def test_where_the_network_cuts_makes_no_difference(seed: int):
    """Not of a connection that ends by an error either."""
    draw = random.Random(seed)
    for odd in odd_requests.requests(seed, 300):
        cuts = sorted(draw.randrange(len(odd.data) + 1) for _ in range(draw.choice((1, 2, 9))))
        parts = [odd.data[a:b] for a, b in zip([0, *cuts], [*cuts, None], strict=True)]
        assert read(*filter(None, parts)) == read(odd.data), odd


@pytest.mark.parametrize("seed", range(20))
def test_chunks_become_a_body_with_a_length(seed: int):
    draw = random.Random(seed)
    body = draw.randbytes(draw.randrange(5000))
    data = request(chunked(body, draw, b";a", b"X: 1\r\n"), b"Transfer-Encoding: chunked", b"X-A: \xe9")
    got = read(data + request(method="GET", path="/health"))
    head, _, rest = got.partition(b"\r\n\r\n")
    assert rest == body + request(method="GET", path="/health")
    assert b"content-length: %d" % len(body) in head and b"x-a: \xe9" in head and b"ransfer" not in head


def test_what_comes_byte_by_byte_is_refused_once_it_can_be_no_request():
    """Not at the end of the longest head: what has come is looked at for each byte."""
    method, path = [b"G"] * 256, [b"a"] * 10_000
    assert read(*method, b" ", b"/", *path) == b"", "it may be one"
    assert b"no request of HTTP" in read(*method, b"G")


def test_a_connection_may_go_on_in_another_version():
    old = sized(b"{}", b"Connection: keep-alive", version="HTTP/1.0")
    got = read(old + request(b"2\r\n{}\r\n0\r\n\r\n", b"Transfer-Encoding: chunked"))
    assert got.count(b"connection: keep-alive") == 1 and got.endswith(b"\r\ncontent-length: 2\r\n\r\n{}")


def test_no_client_knows_the_name_of_the_note():
    assert len(NOTE) > 30 and NOTE.encode() not in read(*ORDINARY)
    assert NOTE.encode() in read(request(b"ZZ\r\n", b"Transfer-Encoding: chunked"))


RAW = zlib.compressobj(wbits=-15)
TEXT = b'{"contents": ["hello"]}'
ENCODED = {
    "gzip": gzip.compress(TEXT, mtime=0),
    "x-gzip": gzip.compress(TEXT, mtime=0),
    "GZip": gzip.compress(TEXT[:9], mtime=0) + gzip.compress(TEXT[9:]),
    "deflate": zlib.compress(TEXT),
    "DEFLATE": RAW.compress(TEXT) + RAW.flush(),
    "gzip, deflate": zlib.compress(gzip.compress(TEXT, mtime=0)),
    "identity": TEXT,
    "": TEXT,
}


@pytest.mark.parametrize("encoding", ENCODED)
@pytest.mark.parametrize("in_chunks", [False, True])
def test_an_encoded_body_is_read(server: FrontendProcess, encoding: str, in_chunks: bool):
    body = ENCODED[encoding]
    content = iter([body[:7], body[7:]]) if in_chunks else body
    reply = server.http.post("/v2/chat/completions", content=content, headers={"Content-Encoding": encoding})
    assert reply.status_code == 200, reply.text
    assert reply.json()["choices"][0]["message"]["content"] == "hello"


@pytest.mark.parametrize(
    ("encoding", "body", "status"),
    [
        ("br", TEXT, 415),
        ("zstd", TEXT, 415),
        ("gzip, br", TEXT, 415),
        (", ".join(["gzip"] * 50), TEXT, 415),
        ("gzip", TEXT, 400),
        ("gzip", b"", 400),
        ("gzip", gzip.compress(TEXT, mtime=0)[:-4], 400),
        ("gzip", gzip.compress(TEXT, mtime=0) + b"x", 400),
        ("deflate", gzip.compress(TEXT, mtime=0), 400),
    ],
)
def test_a_body_that_cannot_be_decoded_is_refused(
    server: FrontendProcess, encoding: str, body: bytes, status: int
):
    for path, message in (("/v1/completions", "message"), ("/v1/state/import?session_id=s", None)):
        reply = server.http.post(path, content=body, headers={"Content-Encoding": encoding})
        assert reply.status_code == status, reply.text
        error = reply.json()["error"]
        assert "ncod" in (error[message] if message else error)


def test_the_limit_of_a_body_is_that_of_what_is_decoded():
    body = gzip.compress(b" " * 1000, mtime=0)
    assert decode(body, "gzip", 1000) == b" " * 1000
    for encodings, data in (
        ("gzip", body),
        ("gzip", gzip.compress(b" " * (64 << 20))),
        ("gzip, gzip", gzip.compress(gzip.compress(b" " * (64 << 20)))),
        ("gzip", gzip.compress(b" " * 500, mtime=0) * 2),
    ):
        with pytest.raises(ApiError) as refused:
            decode(data, encodings, 999)
        assert refused.value.status == 413


class CountingDecoder:
    """One of zlib, which counts the bytes that all of them are given."""

    given, make = 0, staticmethod(zlib.decompressobj)

    def __init__(self, window: int) -> None:
        self._decoder = self.make(window)

    def decompress(self, data: bytes, most: int) -> bytes:
        CountingDecoder.given += len(data)
        return self._decoder.decompress(data, most)

    def __getattr__(self, name: str) -> object:
        return getattr(self._decoder, name)


def test_a_body_of_many_short_members_is_decoded_in_pieces(monkeypatch: pytest.MonkeyPatch):
    """Each would otherwise be given, and copy, all that are behind it: minutes for 16 MB."""
    monkeypatch.setattr(zlib, "decompressobj", CountingDecoder)
    members, member = 5000, gzip.compress(b"12345678", mtime=0)
    assert decode(member * members, "gzip", 8 * members) == b"12345678" * members
    assert CountingDecoder.given <= members << 15


def test_members_may_end_anywhere():
    """Where a piece ends too, and in the middle of a member's head."""
    text = random.Random(1).randbytes(40_000)
    for length in range(PIECE - 40, PIECE + 10):
        body = gzip.compress(text[:length], 0, mtime=0) + gzip.compress(text[length:], mtime=0)
        assert decode(body, "gzip", len(text)) == text


FORM = {"Content-Type": "multipart/form-data; boundary=B"}
PART = b'--B\r\nContent-Disposition: form-data; name="file"; filename="%s"\r\n\r\nstate\r\n'
BROKEN = {
    "no end": PART % b"a.pth",
    "half an end": PART % b"a.pth" + b"--B",
    "empty": b"",
    "garbage": b"xxxx",
    "another boundary": (PART % b"a.pth").replace(b"--B", b"--C") + b"--C--\r\n",
    "two files of one name": PART % b"a.pth" + PART % b"a.pth" + b"--B--\r\n",
    "no name": b"--B\r\nContent-Disposition: form-data\r\n\r\nx\r\n--B--\r\n",
    "no disposition": b"--B\r\nX: y\r\n\r\nx\r\n--B--\r\n",
    "no field": b"--B\r\nno colon\r\n\r\nx\r\n--B--\r\n",
    "a name that is not UTF-8": PART % b"\xff.pth" + b"--B--\r\n",
    "a field that is not UTF-8": PART % b"a"
    + b'--B\r\nContent-Disposition: form-data; name="n"\r\n\r\n\xff\r\n--B--\r\n',
}


@pytest.mark.parametrize("body", BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize(
    "path",
    ["/v1/state/upload", "/v1/chat/completions", "/openai/v1/completions", "/v1/messages", "/api/chat"],
)
def test_a_broken_form_is_a_bad_request_in_the_shape_of_the_route(
    server: FrontendProcess, path: str, body: bytes
):
    reply = server.http.post(path, content=body, headers=FORM)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert "form" in (error if isinstance(error, str) else error["message"])


@pytest.mark.parametrize(
    "kind",
    ["multipart/form-data", "multipart/form-data; boundary=", "Multipart/Mixed; boundary=" + "B" * 500],
)
def test_a_form_without_a_boundary_is_refused(server: FrontendProcess, kind: str):
    reply = server.http.post(
        "/v1/state/upload", content=PART % b"a.pth" + b"--B--\r\n", headers={"Content-Type": kind}
    )
    assert reply.status_code == 400 and "form" in reply.json()["error"]


def test_a_form_in_chunks_is_read(server: FrontendProcess):
    body = PART % b"in-chunks.pth" + b"--B--\r\n"
    reply = server.http.post("/v1/state/upload", content=iter([body[:30], body[30:]]), headers=FORM)
    assert reply.status_code == 200 and reply.json()["state_id"] == "in-chunks"


def test_a_broken_form_says_nothing_without_the_password(locked: FrontendProcess):
    assert locked.http.post("/v1/state/upload", content=b"xxxx", headers=FORM).status_code == 401
    bearer = {"Authorization": f"Bearer {PASSWORD}"}
    assert locked.http.post("/v1/state/upload", content=b"xxxx", headers=FORM | bearer).status_code == 400


@pytest.mark.parametrize(
    "name", ["a." + "b" * 600, "a.\x00", "a./../../b", "b/..", "a.pth\n", "ä" * 300 + ".safetensors"]
)
def test_no_file_name_of_a_client_is_part_of_a_path(server: FrontendProcess, name: str):
    reply = server.http.post(
        "/v1/state/upload", files={"file": (name, b"state")}, data={"state_id": json.dumps(name)[:60]}
    )
    assert reply.status_code in (200, 400), reply.text
    assert json.dumps("tmp")[1:-1] not in reply.text


def test_what_is_no_form_has_no_parts():
    assert read_form("application/json", b"{}") == ({}, {})


class Sockets:
    """Two ends of a connection, one of which is accepted and read through a guard."""

    def __init__(self, guard: Guard, listener: socket.socket) -> None:
        self.guard = guard
        self.client = socket.create_connection(listener.getsockname())
        self.client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.server = socket.socket(fileno=guard.accept(listener.fileno(), None, None, 0))
        self.server.setblocking(False)

    def read(self, room: int = 4096) -> bytes | int:
        """What `recv` gives: bytes, or the number of an error."""
        buffer = ctypes.create_string_buffer(room)
        ctypes.set_errno(0)
        got = self.guard.recv(self.server.fileno(), ctypes.addressof(buffer), room, 0)
        return buffer.raw[:got] if got >= 0 else ctypes.get_errno()

    def arrived(self) -> bytes | int:
        """What `read` gives once something has come."""
        assert select.select([self.server], [], [], 60)[0], "nothing comes"
        return self.read()

    def close(self) -> None:
        self.client.close()
        self.server.close()


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


@pytest.fixture
def sockets(listener: socket.socket) -> Iterator[Sockets]:
    both = Sockets(Guard(LIMITS), listener)
    yield both
    both.close()


def test_a_read_is_short_only_when_nothing_more_has_come(sockets: Sockets):
    """Robyn waits for news of the socket then, and there would be none."""
    body = random.Random(1).randbytes(100_000)
    data = request(chunked(body, random.Random(2)), b"Transfer-Encoding: chunked")
    sender = threading.Thread(target=sockets.client.sendall, args=(data,))
    sender.start()
    got: list[bytes] = []
    while sum(map(len, got)) < len(body):
        part = sockets.read()
        if part == errno.EAGAIN:
            select.select([sockets.server], [], [])
        else:
            assert isinstance(part, bytes)
            got.append(part)
    sender.join()
    assert b"".join(got).endswith(body) and sockets.read() == errno.EAGAIN
    assert {len(part) for part in got[:-1]} == {4096}


def test_a_read_ends_as_the_connection_does(sockets: Sockets):
    sockets.client.sendall(request(b"5\r\n", b"Transfer-Encoding: chunked"))
    assert sockets.read() == errno.EAGAIN
    sockets.client.close()
    assert b"before its last chunk" in sockets.read()
    assert sockets.read() == b""


def test_what_follows_the_last_request_is_thrown_away(sockets: Sockets):
    sockets.client.sendall(request(b"ZZ\r\n" * 1000, b"Transfer-Encoding: chunked"))
    assert b"hexadecimal" in sockets.read()
    sockets.client.sendall(sized(b"{}") * 100)
    assert sockets.read() == errno.EAGAIN
    sockets.client.close()
    assert sockets.read() == b""


def test_nothing_is_read_of_a_broken_connection(sockets: Sockets):
    sockets.client.sendall(request(b"5\r\n", b"Transfer-Encoding: chunked"))
    assert sockets.arrived() == errno.EAGAIN
    sockets.client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sockets.client.close()  # by a reset
    assert sockets.arrived() == errno.ECONNRESET
    assert sockets.read() == b"", "no error for the half of a request"


def test_the_slowest_body_ends_where_all_together_are_too_much(listener: socket.socket):
    guard, whole = Guard(Limits(body=100_000)), sized(b"x" * 100_000)
    slow, *others = (Sockets(guard, listener) for _ in range(5))
    for each, left in ((slow, 50_000), *((other, 1000) for other in others)):
        for at in range(0, len(whole) - left, 4000):
            each.client.sendall(whole[at : min(at + 4000, len(whole) - left)])
            assert each.arrived() == errno.EAGAIN
    for each in others:
        each.client.sendall(whole[-1000:])
    assert b'"status":503' in slow.arrived()
    for each in others:
        assert each.arrived() == whole[:4096]
    for each in (slow, *others):
        each.close()


def test_a_body_that_comes_faster_than_it_is_read_is_counted_as_it_comes(listener: socket.socket):
    guard, whole = Guard(Limits(body=100_000)), sized(b"x" * 100_000)
    fast, *others = (Sockets(guard, listener) for _ in range(5))
    for other in others:
        for at in range(0, 99_000, 4500):
            other.client.sendall(whole[at : at + 4500])
            assert other.arrived() == errno.EAGAIN
    fast.client.sendall(whole[:50_000])
    fast.client.shutdown(socket.SHUT_WR)
    end = select.poll()
    end.register(fast.server, select.POLLRDHUP)
    assert end.poll(60_000), "it does not come"
    assert b'"status":503' in fast.read(), "and not that its body is cut short"
    for each in (fast, *others):
        each.close()


def test_whole_bodies_that_nobody_reads_end_where_all_together_are_too_much(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
):
    """Robyn reads no further request while the reply to one before waits for its client."""
    monkeypatch.setattr("routes.guard.watch.BEHIND", 0.0)
    guard = Guard(Limits(body=100_000))
    every = [Sockets(guard, listener) for _ in range(6)]
    for each in every:
        each.client.sendall(sized(b"x" * 100_000))
        while each.arrived() == errno.EAGAIN:
            pass
    guard.watch.look()
    assert every[0].read() == b""
    assert every[0].client.recv(1) == b""
    assert len(every[-1].read(100_000)) > 90_000
    for each in every:
        each.close()


def test_connections_that_have_ended_leave_room_for_as_many(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("routes.guard.watch.SILENT", 0.0)
    guard = Guard(Limits(body=100, idle_seconds=1e-9, connections=2))
    for _ in range(4):
        Sockets(guard, listener).close()
        guard.watch.look()
    first, second = Sockets(guard, listener), Sockets(guard, listener)
    assert first.read() == errno.EAGAIN, "there was room for both"
    first.close()
    second.close()


def test_the_number_of_a_connection_that_has_ended_is_no_room(listener: socket.socket):
    guard = Guard(Limits(body=100, idle_seconds=1e-9, connections=2))
    ended, other = Sockets(guard, listener), Sockets(guard, listener)
    number = ended.server.fileno()
    ended.server.close()
    guard.watch.look()
    kept = os.dup(0)
    assert kept == number, "the lowest one that is free"
    clients = [socket.create_connection(listener.getsockname()) for _ in range(2)]
    third = socket.socket(fileno=guard.accept(listener.fileno(), None, None, 0))
    os.close(kept)
    assert guard.accept(listener.fileno(), None, None, 0) == -1
    assert b" 503 " in clients[1].recv(100)
    for each in (ended, other, third, *clients):
        each.close()


def test_a_request_is_not_lost_where_no_file_can_be_opened(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
):
    def scarce(number: int) -> int:
        raise OSError(errno.EMFILE, "no file")

    sockets = Sockets(Guard(Limits(body=100, head_seconds=-1.0)), listener)
    sockets.client.sendall(b"GET / HT")
    assert sockets.arrived() == errno.EAGAIN
    with monkeypatch.context() as patched:
        patched.setattr("routes.guard.watch.os.dup", scarce)
        sockets.guard.watch.look()
    sockets.guard.watch.look()
    assert b'"status":408' in sockets.arrived()
    sockets.close()


@pytest.mark.parametrize("part", [request()[:-2], sized(b"x" * 50)[:-2]], ids=["head", "body"])
def test_a_standstill_of_the_server_does_not_count_against_a_client(
    part: bytes, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
):
    clock = SimpleNamespace(now=1000.0)
    clock.monotonic = lambda: clock.now
    for module in ("watch", "connection"):
        monkeypatch.setattr(f"routes.guard.{module}.time", clock)
    sockets = Sockets(Guard(Limits(body=100, head_seconds=10.0, body_seconds=10.0)), listener)

    def pass_by(seconds: float, step: float) -> None:
        for _ in range(int(seconds / step)):
            clock.now += step
            sockets.guard.watch.tick()

    sockets.client.sendall(part)
    assert sockets.arrived() == errno.EAGAIN
    pass_by(5, 0.1)
    pass_by(60, 60)
    pass_by(4, 0.1)
    assert sockets.read() == errno.EAGAIN
    pass_by(2, 0.1)
    assert b'"status":408' in sockets.arrived()
    sockets.close()


@pytest.mark.parametrize("more", [b"\r\n", b"\0 is no request\r\n\r\n"])
def test_the_end_of_a_reply_of_http_1_0_is_seen_with_more_behind_the_request(sockets: Sockets, more: bytes):
    sockets.client.sendall(request(b"", b"Connection: keep-alive", method="GET", version="HTTP/1.0"))
    head = sockets.arrived()
    assert isinstance(head, bytes)
    note = next(line for line in head.split(b"\r\n") if line.startswith(NOTE.encode()))
    sockets.guard.release(msgspec.json.decode(note.partition(b":")[2], type=Note))
    sockets.client.sendall(more)
    sockets.arrived()
    sockets.server.shutdown(socket.SHUT_WR)  # as Robyn does
    sockets.server.close()
    sockets.client.settimeout(60)  # a deadline
    assert sockets.client.recv(1) == b""


def test_a_library_that_cannot_be_guarded_is_named(tmp_path: Path):
    file = tmp_path / "robyn.so"
    file.write_bytes(b"no library")
    with pytest.raises(Unguarded, match=r"robyn\.so"):
        Guard(LIMITS).install(str(file))


LOCK = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'w'), fcntl.LOCK_EX | fcntl.LOCK_NB)"


def test_a_file_with_the_number_of_an_ended_connection_is_let_alone(tmp_path: Path) -> None:
    """It is opened by nobody a second time, and its locks stay: those of a database, for one."""
    connections: dict[int, Connection] = {}
    watch = Watch(LIMITS, connections)
    pair = socket.socketpair()
    with (tmp_path / "file").open("w") as file, select.epoll() as poll, pair[0], pair[1]:
        fcntl.lockf(file, fcntl.LOCK_EX)
        for serial, each in enumerate((file, poll, pair[0])):
            connections[each.fileno()] = Connection(LIMITS, each.fileno(), serial)
            connections[each.fileno()].clock.due = 0.0
        before = set(os.listdir("/proc/self/fd"))
        watch.look()
        assert all(each.clock.gone for each in connections.values())
        assert set(os.listdir("/proc/self/fd")) <= before, "others may end meanwhile"
        assert all(map(os.fstat, connections))
        other = subprocess.run([sys.executable, "-c", LOCK, file.name], stderr=subprocess.DEVNULL)
        assert other.returncode, "the file is not locked any more"


def test_a_refused_client_that_says_nothing_more_is_let_go(monkeypatch: pytest.MonkeyPatch):
    """The first one, and one that comes when all before it have ended."""
    monkeypatch.setattr(lingering, "SILENT", 0.05)
    refused = Lingering()
    for _ in range(3):
        client, own = socket.socketpair()
        with client:
            client.settimeout(60)
            with own:
                refused.add(own.fileno())
            assert client.recv(1) == b"", "no copy of the connection is left"
