"""The lines of the audit log, one for each request that the engine has got, chained by hashes.

A line is a JSON object. Its member `previous` is the SHA-256 of the line before it, so no line can be changed
or taken out without all that follow being made anew; who keeps the last hash elsewhere sees that too. Texts
stand there as hashes only.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator
from hashlib import sha256
from typing import BinaryIO

HASH = re.compile("[0-9a-f]{64}")
FIRST = "0" * 64  # what the first line has for the hash of the one before


class AuditError(Exception):
    """The file cannot be used. The message is one sentence with the way out."""


def text_hash(texts: Iterable[str | bytes]) -> str:
    """Of one text its SHA-256; of several that of their hashes, one after the other."""
    digests = [sha256(_bytes(text)).hexdigest() for text in texts]
    return digests[0] if len(digests) == 1 else sha256("".join(digests).encode()).hexdigest()


def ids_text(ids: Iterable[int]) -> str:
    """What is hashed of a prompt of token ids."""
    return ",".join(map(str, ids))


def previous_hash(line: bytes) -> str | None:
    """What the line has for the hash of the one before; None: it is no line of an audit log."""
    try:
        previous = json.loads(line)["previous"]
        return previous if isinstance(previous, str) and HASH.fullmatch(previous) else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def verify(file: BinaryIO, size: float = math.inf) -> tuple[int, str]:
    """How many lines the log has, and the hash of the last one. Raises AuditError at the first wrong line.

    size: bytes from which on lines are passed over, as they may be being written.
    """
    number, last = 0, FIRST
    for number, line in enumerate(_lines(file, size), 1):
        if (previous := previous_hash(line)) is None:
            raise AuditError(f"line {number} is no line of an audit log")
        if previous != last:
            what = "does not begin the log" if number == 1 else f"does not follow line {number - 1}"
            raise AuditError(f"line {number} {what}: a line was changed, taken out or put in")
        last = sha256(line).hexdigest()
    return number, last


def _lines(file: BinaryIO, size: float) -> Iterator[bytes]:
    begin = 0
    for number, line in enumerate(file, 1):
        if begin >= size:
            return
        begin += len(line)
        if not line.endswith(b"\n"):
            raise AuditError(f"line {number} was cut off; the server removes it when it writes again")
        yield line[:-1]


def _bytes(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode(errors="surrogatepass")
