"""The rows of one file, whose answers go into another one as they are made."""

import asyncio
import fcntl
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import msgspec

from rwkv_batch.batches.lines import numbered, parse
from rwkv_batch.batches.runner import Answer, Width, answered

BEGINNING = b'{"id":"batch_req_'  # of a line of the output


class NoAnswers(Exception):
    """A file that should have answers has something else; one sentence."""


def claimed(output: TextIO) -> bool:
    """Whether this process alone writes the file, until it closes it, as no other run does."""
    try:
        fcntl.flock(output, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # no file that can be locked
    return True


def done_in(output: Path) -> set[str]:
    """The rows that an earlier run has answered; what it has written of a further one is taken away.

    Raises NoAnswers, and leaves that file as it is.
    """
    if not output.exists():
        return set()
    whole, _, rest = output.read_bytes().rpartition(b"\n")
    try:
        done = {
            msgspec.json.decode(line, type=_Answer).custom_id for line in whole.splitlines() if line.strip()
        }
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        done = None
    if done is None or (rest and not rest.startswith(BEGINNING[: len(rest)])):
        raise NoAnswers(f"{output} has lines that are no answers; name another file")
    if rest:
        os.truncate(output, len(whole) + 1 if whole else 0)
    return done


class _Answer(msgspec.Struct):
    """What tells a line of the output from one of the input."""

    id: str
    custom_id: str
    response: dict[str, Any]


class FileRows:
    """`total`: rows of the source; `done`: those of them that are not answered again."""

    def __init__(self, source: Path, total: int, done: set[str], output: TextIO, failed: TextIO) -> None:
        self._source, self.total, self.done = source, total, done
        self._output, self._failed = output, failed
        self.errors = 0

    async def run(self, answer: Answer, width: Width, ended: Callable[[], object]) -> None:
        """Answer those that are left; `ended` is called behind each. Raises OSError."""

        async def one(text: bytes) -> None:
            try:
                line, succeeded = await answered(parse(text, ""), answer, math.inf, "")
            finally:
                width.give()
            file = self._output if succeeded else self._failed
            file.write(line + "\n")
            file.flush()
            self.errors += not succeeded
            ended()

        try:
            async with asyncio.TaskGroup() as rows:
                for text in self._left():
                    await width.take()
                    rows.create_task(one(text))
        except ExceptionGroup as failed:
            if refused := next((each for each in failed.exceptions if isinstance(each, OSError)), None):
                raise refused from None
            raise

    def _left(self) -> Iterator[bytes]:
        with open(self._source, "rb") as lines:
            for _, text in numbered(lines):
                if parse(text, "").custom_id not in self.done:
                    yield text
