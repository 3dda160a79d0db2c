"""Runs batches: as many rows at a time as keep all slots busy, each until it is answered.

A row that cannot be answered now, as while the engine is started again, is asked again later. A row that is
done is not done again, also by another process after this one has ended.
"""

import asyncio
import contextlib
import logging
import sqlite3
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, NamedTuple

from rwkv_batch.batches.lines import InputLine, check, numbered, parse, result_line
from rwkv_batch.batches.records import UNDER_WAY, BatchRecord, BatchStatus, LineError, RowResult, new_id
from rwkv_batch.batches.store import BatchStore

POLL = 0.2  # seconds between looks for new batches and those that are cancelled
LATER = (429, 503)  # statuses of rows that are asked again
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 2.0  # seconds before a row is asked again, unless the reply asks for more
MOST_WAITED = 60.0  # seconds that a reply may ask for: a key with no tokens left today may get others, or end
AGAIN = 2  # times that a row is asked again whose engine has failed
EVERY = 600.0  # seconds between looks for what has expired
REST = 2.0  # seconds until a batch goes on that the disk or the database has stopped
KEPT = 10.0  # seconds until contents of removed files are tried again that the disk has kept
GIVEN_UP = 86400.0  # seconds behind its window after which it has failed
EXPIRED = LineError(
    "batch_expired", "This request was not executed before the completion window had ended; send it again."
)

log = logging.getLogger(__name__)


class RowReply(NamedTuple):
    """What a route has answered."""

    status: int
    request: str  # its id
    body: dict[str, Any] | list[Any]
    retry_after: float = 0.0  # seconds, for which it asks


# Answers a line; with when it expires, in seconds since 1970, and its owner.
Answer = Callable[[InputLine, float, str], Awaitable[RowReply]]


class Width:
    """How many rows are under way at once, which may change. Who waits longest is the next."""

    def __init__(self, most: Callable[[], int]) -> None:
        self._most, self._under_way = most, 0
        self._waiting = deque[asyncio.Future[None]]()

    @property
    def _free(self) -> int:
        return max(1, self._most()) - self._under_way

    async def take(self) -> None:
        """Wait until one more may be."""
        if not self._waiting and self._free > 0:
            self._under_way += 1
            return
        place = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        self._wake()  # there may be more room than before
        try:
            await place
        except asyncio.CancelledError:
            if not place.cancelled():  # it has had its place
                self.give()
            raise

    def give(self) -> None:
        """One is over."""
        self._under_way -= 1
        self._wake()

    def _wake(self) -> None:
        while self._waiting and self._free > 0:
            place = self._waiting.popleft()
            if not place.done():
                self._under_way += 1  # from now on, so that nobody comes in between
                place.set_result(None)


async def answered(line: InputLine, answer: Answer, deadline: float, owner: str) -> tuple[str, bool]:
    """The row's line of the output or of the errors, and whether it has succeeded."""
    pause, failures = FIRST_PAUSE, 0
    while True:
        found = await answer(line, deadline, owner)
        failures += found.status == 500
        if found.status not in LATER and not (found.status == 500 and failures <= AGAIN):
            break
        await asyncio.sleep(max(pause, min(found.retry_after, MOST_WAITED)))
        pause = min(2 * pause, LONGEST_PAUSE)
    response = {"status_code": found.status, "request_id": found.request, "body": found.body}
    return result_line(new_id("batch_req_"), line.custom_id, response, None), found.status == 200


class BatchRunner:
    """All batches of a folder. `answer` answers a row; `width`: how many rows are under way at most."""

    def __init__(self, store: BatchStore, answer: Answer, width: Callable[[], int], days: float) -> None:
        self._store, self._answer, self._days = store, answer, days
        self._most, self._width = width, Width(width)
        self._owners: dict[str, Width] = {}  # rows of each that are under way, or wait to be asked again
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by batch
        self._ending: set[str] = set()  # of these, those that nothing cancels any more
        self._seen: int | None = None  # the version of the store that was looked at last

    async def run(self) -> None:
        """Until it is cancelled."""
        cleaned, remove_again = float("-inf"), 0.0
        while True:
            try:
                version, now = self._store.version, time.monotonic()
                if version != self._seen or self._tasks:
                    self._look()
                if version != self._seen or now > remove_again:
                    remove_again = now + (EVERY if self._store.remove_contents() else KEPT)
                self._seen = version
            except sqlite3.Error as error:
                log.error("batches cannot be looked at now: %s", error)
                await asyncio.sleep(REST)
            if time.monotonic() - cleaned > EVERY:
                cleaned = time.monotonic()
                try:
                    await asyncio.to_thread(self._store.expire, self._days)
                except (OSError, sqlite3.Error) as error:
                    log.error("what has expired cannot be removed now: %s", error)
            await asyncio.sleep(POLL)

    def _look(self) -> None:
        """Begin with batches that are new, and end those that are cancelled or late."""
        for batch in self._store.under_way():
            task = self._tasks.get(batch.id)
            if task is None:
                task = self._tasks[batch.id] = asyncio.create_task(self._run(batch), name=batch.id)
                task.add_done_callback(self._ended)
            elif batch.id not in self._ending and _is_cut_off(batch):
                self._ending.add(batch.id)
                task.cancel()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task.get_name(), None)
        self._ending.discard(task.get_name())
        self._seen = None  # it may be under way still, and no other process changes it then

    async def _run(self, batch: BatchRecord) -> None:
        try:
            if batch.status == "validating":
                await self._validate(batch)
                batch = self._store.batch(batch.id) or batch
            if batch.status == "in_progress":
                with contextlib.suppress(asyncio.CancelledError):
                    await self._rows(batch)
            self._ending.add(batch.id)  # a thread that writes cannot be cancelled, and another would join it
            await asyncio.to_thread(self._finish, batch.id)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            log.exception("the batch %s cannot go on", batch.id)
            if not _of_the_disk(error) or time.time() >= batch.expires + GIVEN_UP:
                errors = [LineError("server_error", "The server could not run this batch; its log says why.")]
                self._store.change(batch.id, ("validating", "in_progress"), "failed", errors=errors)
            await asyncio.sleep(REST)  # if it is under way still, it is begun with again

    async def _validate(self, batch: BatchRecord) -> None:
        """Its lines are all requests, or it has failed."""
        count, errors = await asyncio.to_thread(self._check, batch)
        if errors:
            self._store.change(batch.id, ("validating",), "failed", errors=errors, total=0)
            log.info("%s has failed: %s", batch.id, errors[0].code)
        else:
            self._store.change(batch.id, ("validating",), "in_progress", total=count)
            log.info("%s begins with %d rows", batch.id, count)

    def _check(self, batch: BatchRecord) -> tuple[int, list[LineError]]:
        try:
            with open(self._store.path(batch.input_file), "rb") as lines:
                return check(lines, batch.endpoint)
        except FileNotFoundError:
            return 0, [LineError("missing_file", f"The file {batch.input_file} is not there any more.")]

    async def _rows(self, batch: BatchRecord) -> None:
        """Those that are not done yet, until all are, or it is cancelled."""
        width = self._owners.setdefault(batch.owner, Width(self._most))
        async with asyncio.TaskGroup() as rows:
            for number, line in self._left(batch):
                await width.take()
                try:
                    row = rows.create_task(self._row(batch, number, line))
                except RuntimeError:  # one has failed, so that the others end
                    width.give()
                    raise
                # Of a task that is cancelled before it begins nothing else runs.
                row.add_done_callback(lambda _: width.give())

    def _left(self, batch: BatchRecord) -> Iterator[tuple[int, InputLine]]:
        done = self._store.done(batch.id)
        with open(self._store.path(batch.input_file), "rb") as lines:
            for number, text in numbered(lines):
                if number not in done:
                    yield number, parse(text, batch.endpoint)

    async def _row(self, batch: BatchRecord, number: int, line: InputLine) -> None:
        text, succeeded = await answered(line, self._ask, batch.expires, batch.owner)
        self._store.put_result(batch.id, RowResult(number, succeeded, text))

    async def _ask(self, line: InputLine, deadline: float, owner: str) -> RowReply:
        """While a row of a key that has reached a limit waits, rows of others take its place."""
        await self._width.take()
        try:
            return await self._answer(line, deadline, owner)
        finally:
            self._width.give()

    def _finish(self, name: str) -> None:
        """Write what there is to files, and bring the batch to its last status."""
        batch = self._store.batch(name)
        if batch is None or batch.status not in UNDER_WAY:
            return
        if batch.status == "in_progress":
            late = batch.completed + batch.failed < batch.total
            if late and not _is_late(batch):
                return  # this process ends, and another goes on
            if late:
                self._give_up(batch)
            batch = self._store.change(name, ("in_progress",), "finalizing", late=late) or batch
        files = {
            "output_file": self._store.write_results(batch, True),
            "error_file": self._store.write_results(batch, False),
        }
        completed, failed = self._store.counts(name)
        ending: BatchStatus = "expired" if batch.late else "completed"
        ending = "cancelled" if batch.status == "cancelling" else ending
        self._store.change(name, (batch.status,), ending, **files, completed=completed, failed=failed)
        self._store.forget_results(name)
        log.info("%s is %s: %d rows answered, %d not", name, ending, completed, failed)

    def _give_up(self, batch: BatchRecord) -> None:
        """The rows that are left have expired."""
        for number, line in self._left(batch):
            text = result_line(new_id("batch_req_"), line.custom_id, None, EXPIRED)
            self._store.put_result(batch.id, RowResult(number, False, text))


def _is_late(batch: BatchRecord) -> bool:
    return time.time() >= batch.expires


def _is_cut_off(batch: BatchRecord) -> bool:
    """Whether its rows end here; lines that are checked and files that are written take little time."""
    return batch.status == "cancelling" or (batch.status == "in_progress" and _is_late(batch))


def _of_the_disk(error: Exception) -> bool:
    """Whether the disk or the database refuses something, which may be otherwise soon; not a lost file."""
    if isinstance(error, ExceptionGroup):
        return any(map(_of_the_disk, error.exceptions))
    return isinstance(error, OSError | sqlite3.Error) and not isinstance(error, FileNotFoundError)
