"""HTTP/1.1 for load generators: a request and its reply over a connection of their own.

A library's client takes some milliseconds of CPU for a request, which a first token's time would hold.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import cache
from urllib.parse import urlsplit

READ = 1 << 18  # bytes at a time
MOST_HEAD = 1 << 16  # bytes of a reply's head
CUT_OFF = "peer closed connection without sending complete message body"


class HttpFailure(Exception):
    """A request has no whole reply; the message says why."""


class ReplyChunks:
    """Takes a body of Transfer-Encoding chunked in pieces, and gives what it holds (RFC 9112, 7.1)."""

    def __init__(self) -> None:
        self.over = False
        self._data = b""
        self._left = 0  # bytes of the chunk that has begun, with the line feed behind it

    def feed(self, data: bytes) -> bytes:
        """What of the body is in the next piece. Raises HttpFailure for what is no chunk."""
        self._data += data
        found = []
        while self._data and not self.over:
            if self._left:
                found.append(self._data[: max(0, self._left - 2)])
                taken = min(self._left, len(self._data))
                self._data, self._left = self._data[taken:], self._left - taken
                continue
            line, ended, rest = self._data.partition(b"\r\n")
            if not ended:
                break
            digits = line.partition(b";")[0].strip(b" \t")
            if not digits or digits.strip(b"0123456789abcdefABCDEF"):
                raise HttpFailure(f"the reply has no size of a chunk but {line[:40]!r}")
            size = int(digits, 16)
            self._data, self._left, self.over = rest, size + 2 if size else 0, not size
        return b"".join(found)


class HttpReply:
    """A reply whose head has come. Names of headers are in lower case."""

    def __init__(self, reader: asyncio.StreamReader, status: int, headers: Mapping[str, str]) -> None:
        self.status, self.headers, self._reader = status, headers, reader

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes. Raises HttpFailure where it ends early."""
        if "chunked" in self.headers.get("transfer-encoding", "").lower():
            chunks = ReplyChunks()
            while not chunks.over:
                if not (data := await self._reader.read(READ)):
                    raise HttpFailure(f"{CUT_OFF} (incomplete chunked read)")
                if piece := chunks.feed(data):
                    yield piece
            return
        length = self.headers.get("content-length")
        if length and not (length.isascii() and length.isdecimal()):
            raise HttpFailure(f"the reply's Content-Length is {length[:40]!r}")
        left = int(length) if length else None
        while left != 0:
            data = await self._reader.read(READ if left is None else min(READ, left))
            if not data and left is None:
                return
            if not data:
                raise HttpFailure(f"{CUT_OFF} ({left} bytes are missing)")
            left = None if left is None else left - len(data)
            yield data

    async def read(self) -> bytes:
        """The whole body. Raises HttpFailure where it ends early."""
        return b"".join([piece async for piece in self.pieces()])


@asynccontextmanager
async def post(
    url: str, path: str, body: bytes, headers: Mapping[str, str] | None = None
) -> AsyncIterator[HttpReply]:
    """Send a JSON body and wait for the head of the reply. url: http or https, with or without a path.

    Raises HttpFailure.
    """
    parts = urlsplit(url)
    secure = _trusted() if parts.scheme == "https" else None
    port = parts.port or (443 if secure else 80)
    fields = {
        "Host": parts.netloc.rpartition("@")[2],
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        **(headers or {}),
    }
    lines = [f"POST {parts.path}{path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    writer: asyncio.StreamWriter | None = None
    try:
        reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=secure, limit=MOST_HEAD)
        writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        yield await _head(reader)
    except OSError as error:
        raise HttpFailure(str(error) or type(error).__name__) from None
    finally:
        if writer:
            writer.close()


@cache
def _trusted() -> ssl.SSLContext:
    """Once: to read the system's certificates takes tens of milliseconds."""
    return ssl.create_default_context()


async def _head(reader: asyncio.StreamReader) -> HttpReply:
    status, first, lines = 100, "", list[str]()
    while status < 200:  # what comes before the reply (RFC 9110, 15.2)
        try:
            first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            version, code = first.split()[:2]
            status = int(code) if version in ("HTTP/1.0", "HTTP/1.1") else 0
        except asyncio.IncompleteReadError as error:
            if error.partial:
                raise HttpFailure(f"the reply begins with {error.partial[:40]!r}, and ends") from None
            raise HttpFailure("server disconnected without sending a response") from None
        except asyncio.LimitOverrunError:
            raise HttpFailure(f"the head of the reply has more than {MOST_HEAD} bytes") from None
        except ValueError:
            status = 0
        if status < 100:
            raise HttpFailure(f"the reply begins with {first[:40]!r}")
    pairs = (line.partition(":") for line in lines)
    return HttpReply(reader, status, {name.strip().lower(): value.strip() for name, _, value in pairs})
