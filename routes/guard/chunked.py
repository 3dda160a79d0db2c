"""A chunked body (RFC 9112, section 7.1), read strictly and as it comes."""

import re

MAX_LINE = 4096  # bytes of the line before a chunk, with its extensions
MAX_TRAILERS = 16 << 10  # bytes of all fields behind the last chunk
# Its size, and extensions, which mean nothing here.
SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[^\x00-\x08\x0a-\x1f\x7f]*)?")
TRAILER = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+:[^\x00-\x08\x0a-\x1f\x7f]*")


class BadChunks(Exception):
    """The text is one sentence, `status` that of the response."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class ChunkedBody:
    """Takes what a client sends until the body is complete. Trailers are read and dropped."""

    def __init__(self, most: int) -> None:
        """`most`: bytes that the body may have."""
        self.body = bytearray()
        self._most = most
        self._left = 0  # bytes of the chunk that are to come
        self._trailers = -1  # bytes of these so far; -1: before the last chunk
        self._ended_by = False  # a chunk is to be followed by the end of a line

    def take(self, data: bytearray) -> bool:
        """Remove from `data` what belongs to the body; whether it is complete. Raises BadChunks."""
        while data:
            if self._left:
                part = data[: self._left]
                del data[: len(part)]
                self.body += part
                self._left -= len(part)
                self._ended_by = not self._left
            elif self._ended_by:
                if data[:2] != b"\r\n"[: len(data)]:
                    raise BadChunks(400, "A chunk of the body is longer or shorter than the size before it.")
                if len(data) < 2:
                    return False
                del data[:2]
                self._ended_by = False
            else:
                line = self._line(data)
                if line is None:
                    return False
                if self._trailers >= 0:
                    if not line:
                        return True
                    self._trailer(line)
                else:
                    self._begin(line)
        return False

    def _line(self, data: bytearray) -> bytes | None:
        """The next line, removed; None until it is complete."""
        end = data.find(b"\n", 0, MAX_LINE)
        if end < 0:
            if len(data) >= MAX_LINE:
                raise BadChunks(400, "A line between the chunks of the body is too long.")
            return None
        if data[end - 1 : end] != b"\r":
            raise BadChunks(400, "A line between the chunks of the body does not end in CR LF.")
        line = bytes(data[: end - 1])
        del data[: end + 1]
        return line

    def _begin(self, line: bytes) -> None:
        found = SIZE.fullmatch(line)
        if not found:
            raise BadChunks(400, "A chunk of the body begins without its size in hexadecimal digits.")
        self._left = int(found[1], 16)
        if len(self.body) + self._left > self._most:
            raise BadChunks(413, f"The body has more than the {self._most} bytes that are taken at most.")
        if not self._left:
            self._trailers = 0

    def _trailer(self, line: bytes) -> None:
        self._trailers += len(line)
        if self._trailers > MAX_TRAILERS:
            raise BadChunks(400, "The trailers behind the body are too long.")
        if not TRAILER.fullmatch(line):
            raise BadChunks(400, "A trailer behind the body is not a field of HTTP.")
