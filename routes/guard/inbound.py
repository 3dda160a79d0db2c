"""The requests of one connection, as Robyn is to read them.

Robyn 0.88 aborts its process at a chunked body with trailers or a fault in it, answers a broken form before
any route sees it (or never, if it is cut short), and waits for ever where a client asks for another protocol.
So it gets none of these. Chunks are joined to a body with a length. A form has the type of any other bytes.
What cannot be served becomes a request with a note, which its route answers. Other requests stay as they are.
"""

import re
import secrets
from dataclasses import dataclass

import msgspec

from routes.guard.chunked import BadChunks, ChunkedBody
from routes.guard.limits import Limits
from routes.guard.pieces import BytePieces

MAX_HEAD = 136 << 10  # bytes; Robyn answers a head of more than 128 KiB itself
END_OF_HEAD = re.compile(rb"\r?\n\r?\n")
# A head of HTTP/1.1 with one of these, in lower case, is looked at line by line; one of HTTP/1.0 always is.
UNUSUAL = (b"transfer-encoding", b"multipart/", b"\nupgrade", b"\nexpect")
LENGTH = b"\ncontent-length"
REQUEST = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+) ([!-~]+) HTTP/1\.([01])")
# Of a head that is not complete. It is looked at each time that more comes, which may be a byte, so not far.
BEGINNING = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,256}(?: |$)")
BEGINS = re.compile(REQUEST.pattern + rb"\r?\n")
FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\x00-\x08\x0a-\x1f\x7f]*?)[ \t]*")
# Of the connection and not of the request, or written anew.
DROPPED = {
    b"content-length",
    b"transfer-encoding",
    b"trailer",
    b"te",
    b"upgrade",
    b"http2-settings",
    b"connection",
}
NOTE = f"x-note-{secrets.token_hex(16)}"  # a field that no client can send, as none knows its name
BYTES = b"application/octet-stream"
BOTH = "A request has Transfer-Encoding or Content-Length and not both; one of HTTP/1.0 has the latter."
NO_HTTP = "What was sent is no request of HTTP/1.1."


class Note(msgspec.Struct, omit_defaults=True):
    """What a route is to know of a request that has been changed."""

    status: int = 0  # the request is to be answered with this error
    message: str = ""
    content_type: str = ""  # the client's own
    old: bool = False  # of HTTP/1.0, which has no chunks
    connection: int = -1  # on which the request came, if it is old
    serial: int = 0


@dataclass
class ChangedHead:
    """The head of a request that is changed."""

    line: bytes
    fields: list[tuple[bytes, bytes]]
    note: Note

    @property
    def path(self) -> str:
        """Without what follows a question mark."""
        return self.line.split()[1].partition(b"?")[0].decode("latin-1")

    def write(self, length: int, closes: bool) -> bytes:
        fields = [*self.fields, (b"content-length", b"%d" % length)]
        if closes:
            fields.append((b"connection", b"close"))
        if self.note != Note():
            fields.append((NOTE.encode(), msgspec.json.encode(self.note)))
        return b"".join((self.line, *(b"\r\n%s: %s" % field for field in fields), b"\r\n\r\n"))


class Inbound:
    """One connection. A request is held until it is whole, so that what is slow costs what has come of it."""

    def __init__(self, limits: Limits, number: int = -1, serial: int = 0) -> None:
        """`number`, `serial`: those of the connection."""
        self.out = BytePieces()  # what Robyn has not read yet
        self.old = False  # the last request is of HTTP/1.0
        self.waits = False  # the client sends its body when it has read "100 Continue"
        self._limits, self.number, self.serial = limits, number, serial
        self._held = bytearray()  # of a head that is not complete
        self._searched = 0  # bytes of it in which no head ends
        self._whole: list[bytes] = []  # a request with a length, as far as it has come
        self._left = self._length = 0  # bytes of its body that are to come, and of all of it
        self._chunks: ChunkedBody | None = None
        self._head: ChangedHead | bytes = b""  # of the body that is to come
        self.over = False  # the rest of what the client sends is of no use

    @property
    def part(self) -> str:
        """What a request has begun with and not ended: "head", "body", or nothing."""
        if self._left or self._chunks:
            return "body"
        return "head" if self._held else ""

    @property
    def holding(self) -> int:
        """Bytes of what is not complete."""
        came = self._length - self._left if self._left else 0
        return len(self._held) + came + (len(self._chunks.body) if self._chunks else 0)

    def passes(self, data: bytes) -> bool:
        """Take `data`. Whether Robyn may read it as it is; else `out` has what comes of it."""
        if self.out or self._held or self._left or self._chunks or self.over:
            self._take(data)
            return False
        at = 0
        while at < len(data):
            end = data.find(b"\r\n\r\n", at) + 4
            head = data[at:end]
            if end < 4 or head.count(b"\n") != head.count(b"\r\n"):  # a head may end in LF too
                break
            length = _ordinary(head)
            if length is None or length > self._limits.body or (at and end + length > len(data)):
                break
            if end + length > len(data):
                self._head, self._whole, self._length, self.old = head, [data], length, False
                self._left = end + length - len(data)
                return False
            at = end + length
        else:
            return True
        self._take(data)
        return False

    def end(self) -> None:
        """The client sends no more."""
        if self.part != "body":
            self._drop()
        elif self._chunks:
            self.refuse(400, "The body ends before its last chunk.")
        else:
            came = self._length - self._left
            self.refuse(400, f"The body ends after {came} of the {self._length} bytes of Content-Length.")

    def forget(self) -> None:
        """The connection is broken; nothing of it will be read."""
        self.out = BytePieces()  # and not emptied, as another thread may be reading it
        self._drop()

    def refuse(self, status: int, message: str) -> None:
        """Have the route answer with an error what has begun, without its rest, and end the connection."""
        if self.part == "body":
            head = self._head
            self._refuse(head if isinstance(head, ChangedHead) else _parsed(head), status, message)
        elif self.part:
            self._refuse(_unknown(), status, message)

    def _take(self, data: bytes) -> None:
        """Add to `out` what comes of `data`."""
        if self._left and not self._held and len(data) <= self._left:
            self._add(data)
        elif not self.over:
            self._held += data
            while self._held and not self.over and self._step():
                pass

    def _add(self, data: bytes) -> None:
        """More of a request with a length."""
        self._whole.append(data)
        self._left -= len(data)
        if not self._left:
            self.out.extend(self._whole)
            self._whole, self._head = [], b""

    def _step(self) -> bool:
        """Take one part of what is held. Returns whether there was a whole one."""
        held = self._held
        if self._chunks:
            return self._collect(self._chunks)
        if self._left:
            part = held[: self._left]
            del held[: len(part)]
            self._add(bytes(part))
            return True
        while held and held[0] in b"\r\n":  # which may stand before a request
            del held[0]
        found = END_OF_HEAD.search(held, max(0, self._searched - 3))
        self._searched = len(held)
        if not found:
            if len(held) > MAX_HEAD:
                self._refuse(_unknown(), 431, "The head of the request is too long.")
            elif held and not BEGINNING.match(held):
                self._refuse(_unknown(), 400, NO_HTTP)
            return False
        head = bytes(held[: found.end()])
        del held[: len(head)]
        self._searched = 0
        length = _ordinary(head)
        if length is None:
            self._change(head)
        else:
            self.old = False
            self._begin(head, head, length)
        return True

    def _collect(self, chunks: ChunkedBody) -> bool:
        head = self._head
        assert isinstance(head, ChangedHead)
        try:
            whole = chunks.take(self._held)
        except BadChunks as error:
            self._refuse(head, error.status, str(error))
            return False
        if whole:
            self.out.add(head.write(len(chunks.body), closes=False), bytes(chunks.body))
            self._chunks, self._head = None, b""
        return whole

    def _begin(self, head: ChangedHead | bytes, written: bytes, length: int) -> None:
        """Wait for a body of that length behind a head, which Robyn reads as it is written."""
        if length > self._limits.body:
            parsed = head if isinstance(head, ChangedHead) else _parsed(head)
            if length > (most := self._limits.most(parsed.path)):
                return self._refuse(parsed, 413, f"The body has {length} bytes and at most {most} are taken.")
        if length:
            self._head, self._whole = head, [written]
            self._left = self._length = length
        else:
            self.out.add(written)
        return None

    def _change(self, data: bytes) -> None:
        """Take a head that is not ordinary."""
        fields = _fields(data)
        if fields is None:
            return self._refuse(_unknown(), 400, NO_HTTP)
        head = _parsed(data)
        if head.line[:8].upper() == b"CONNECT ":
            return self._refuse(_unknown(), 405, "CONNECT is not served; this server is no proxy.")
        self.old = head.note.old
        if self.old:
            head.note.connection, head.note.serial = self.number, self.serial
        for at, (name, value) in enumerate(head.fields):
            if name == b"content-type" and b"multipart/" in value.lower():
                head.note.content_type = value.decode("latin-1")
                head.fields[at] = name, BYTES
        lengths, codings = _all(fields, b"content-length"), _all(fields, b"transfer-encoding")
        if codings and (lengths or self.old):
            return self._refuse(head, 400, BOTH)
        if codings and [each.lower() for each in codings] != [b"chunked"]:
            return self._refuse(head, 501, "Transfer-Encoding takes chunked, once and alone.")
        if len(lengths) > 1 or not all(each.isdigit() and len(each) < 19 for each in lengths):
            return self._refuse(head, 400, "Content-Length must be one number.")
        expected = _all(head.fields, b"expect")
        self.waits = not self.old and any(each.lower() == b"100-continue" for each in expected)
        head.fields = [field for field in head.fields if field[0] != b"expect"]
        if codings:
            self._head, self._chunks = head, ChunkedBody(self._limits.most(head.path))
            return None
        options = b",".join(_all(fields, b"connection")).lower()
        stays = self.old and b"keep-alive" in options  # what those of HTTP/1.1 do unless they say otherwise
        if stays:
            head.fields.append((b"connection", b"keep-alive"))
        length = int(lengths[0]) if lengths else 0
        written = head.write(length, closes=b"close" in options or self.old != stays)
        return self._begin(head, written, length)

    def _refuse(self, head: ChangedHead, status: int, message: str) -> None:
        """Have the route answer with an error, without the body, and end the connection."""
        head.note.status, head.note.message = status, message
        self.old = head.note.old
        head.fields = [field for field in head.fields if field[0] != b"expect"]
        self.out.add(head.write(0, closes=True))
        self._drop()

    def _drop(self) -> None:
        """Nothing more of the client is of use."""
        self.over, self._chunks, self._head, self._left = True, None, b"", 0
        self._whole = []
        self._held.clear()


def _fields(head: bytes) -> list[tuple[bytes, bytes]] | None:
    """The fields of a head, their names in lower case; None if it is none."""
    lines = [line.rstrip(b"\r") for line in head.rstrip(b"\r\n").split(b"\n")]
    found = [FIELD.fullmatch(line) for line in lines[1:]]
    fields = [(match[1].lower(), match[2]) for match in found if match]
    return fields if REQUEST.fullmatch(lines[0]) and len(fields) == len(found) else None


def _parsed(head: bytes) -> ChangedHead:
    """Of a head that has fields."""
    line = head.partition(b"\n")[0].rstrip(b"\r")
    fields = [field for field in _fields(head) or () if field[0] not in DROPPED]
    return ChangedHead(line, fields, Note(old=line.endswith(b"0")))


def _ordinary(head: bytes) -> int | None:
    """The length of the body behind a head that Robyn reads as it is meant; None for another one."""
    begins = BEGINS.match(head)
    if not begins or begins[3] == b"0":
        return None
    lower = head.lower()
    for word in UNUSUAL:  # this costs less than any() with a generator
        if word in lower:
            return None
    if lower.startswith(b"connect"):
        return None
    at = lower.find(LENGTH)
    if at < 0:
        return 0
    name, _, value = lower[at + 1 : lower.find(b"\n", at + 1)].partition(b":")
    value = value.strip(b" \t\r")
    once = name == LENGTH[1:] and lower.find(LENGTH, at + 1) < 0
    return int(value) if once and value.isdigit() and len(value) < 19 else None


def _all(fields: list[tuple[bytes, bytes]], name: bytes) -> list[bytes]:
    return [value for each, value in fields if each == name]


def _unknown() -> ChangedHead:
    """In place of a head that cannot be read."""
    return ChangedHead(b"GET / HTTP/1.1", [], Note())
