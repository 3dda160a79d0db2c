"""A small HTTP/1.1 client for load generation: one request a connection, the body handed on as it arrives.

General clients cost several times more per streamed event; here a read is one callback and no task switch.
"""

import asyncio
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit


class ExchangeError(Exception):
    """The server could not be reached, broke off, or did not speak HTTP/1.1. The text is one sentence."""


@dataclass(frozen=True)
class Target:
    """Where requests go. `address` is resolved once, so that no look-up runs while measuring."""

    host: str  # as the user wrote it: Host header and TLS name
    port: int
    tls: bool
    prefix: str  # path before /v1, without a slash at its end
    address: str = ""

    @classmethod
    def parse(cls, url: str) -> "Target":
        """From a base URL, with or without a final /v1. Raises ValueError with a sentence."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"--url {url} is not an http or https address, such as http://127.0.0.1:8000.")
        tls = parts.scheme == "https"
        return cls(
            parts.hostname,
            parts.port or (443 if tls else 80),
            tls,
            parts.path.rstrip("/").removesuffix("/v1").rstrip("/"),
        )

    @property
    def addresses(self) -> list[str]:
        """Numeric addresses of the host, best first. Raises OSError."""
        return list(
            dict.fromkeys(
                str(info[4][0]) for info in socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
            )
        )

    def message(self, method: str, path: str, headers: dict[str, str], body: bytes = b"") -> bytes:
        """The bytes of one request."""
        name = f"[{self.host}]" if ":" in self.host else self.host
        fields = {
            "Host": f"{name}:{self.port}",
            "Connection": "close",
            "Content-Length": str(len(body)),
            **headers,
        }
        lines = [f"{method} {self.prefix}{path} HTTP/1.1", *(f"{k}: {v}" for k, v in fields.items())]
        return "\r\n".join([*lines, "", ""]).encode() + body


class Exchange(asyncio.Protocol):
    """One request and its answer.

    `receive(data, now)` gets the bytes of the body in order, with the time at which they were read.
    """

    def __init__(self, request: bytes, receive: Callable[[bytes, float], None]) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request, self._receive = request, receive
        self._buffer = bytearray()
        self._parse = self._read_head
        self._left = 0  # body bytes to come under Content-Length

    async def run(self, target: Target) -> None:
        """Send the request and wait for the whole answer. Raises ExchangeError."""
        context = ssl.create_default_context() if target.tls else None
        try:
            transport, _ = await asyncio.get_running_loop().create_connection(
                lambda: self,
                target.address,
                target.port,
                ssl=context,
                server_hostname=target.host if context else None,
            )
        except OSError as error:
            raise ExchangeError(f"no connection: {error.strerror or error}") from None
        try:
            await self.finished
        finally:
            transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if self.finished.done():
            return
        self._buffer += data
        try:
            self._parse(time.monotonic())
        except (ValueError, IndexError):
            self._end("the reply is not valid HTTP/1.1")

    def connection_lost(self, exc: Exception | None) -> None:
        if self._parse == self._read_rest and exc is None:
            self._end()
        else:
            self._end(
                "the connection closed before the " + ("end of the answer" if self.status else "answer began")
            )

    def _end(self, problem: str = "") -> None:
        if self.finished.done():
            return
        if problem:
            self.finished.set_exception(ExchangeError(problem))
        else:
            self.finished.set_result(None)

    def _read_head(self, now: float) -> None:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        lines = self._buffer[:end].decode("latin-1").split("\r\n")
        del self._buffer[: end + 4]
        if not lines[0].startswith("HTTP/1."):
            raise ValueError(lines[0])
        self.status = int(lines[0].split()[1])
        if self.status < 200:  # an interim reply; the real one follows
            self._read_head(now)
            return
        self.headers = {
            k.strip().lower(): v.strip() for k, _, v in (line.partition(":") for line in lines[1:])
        }
        if "chunked" in self.headers.get("transfer-encoding", "").lower():
            self._parse = self._read_chunks
        elif "content-length" in self.headers:
            self._left = int(self.headers["content-length"])
            self._parse = self._read_sized
        else:
            self._parse = self._read_rest
        self._parse(now)

    def _read_chunks(self, now: float) -> None:
        buffer, position, parts, over = self._buffer, 0, [], False
        while not over:
            line_end = buffer.find(b"\r\n", position)
            if line_end < 0:
                break
            size = int(buffer[position:line_end].split(b";")[0], 16)
            chunk_end = line_end + 2 + size
            if size == 0:
                over = True  # trailers carry nothing that is measured
            elif len(buffer) < chunk_end + 2:
                break
            else:
                parts.append(buffer[line_end + 2 : chunk_end])
                position = chunk_end + 2
        del buffer[:position]
        if parts:
            self._receive(b"".join(parts), now)
        if over:
            self._end()

    def _read_sized(self, now: float) -> None:
        self._left -= len(self._buffer)
        self._read_rest(now)
        if self._left <= 0:
            self._end()

    def _read_rest(self, now: float) -> None:
        if self._buffer:
            self._receive(bytes(self._buffer), now)
            self._buffer.clear()
