"""Where rows end, and what their readers get.

Nothing else gives the slot of a row back, lets the next turn of its session begin, counts how it has ended,
or writes to front ends. A row's life decides when (`lives.py`, `stored_turns.py`).
"""

from collections.abc import Callable, Iterable
from errno import EIO, EMFILE, ENFILE, ENOMEM
from typing import Any

from rwkv_batch.engine.scheduling.counts import EngineCounts
from rwkv_batch.engine.scheduling.row import FINALIZING, Outbox, Row
from rwkv_batch.engine.scheduling.scheduler import Scheduler
from rwkv_batch.ops.device import is_out_of_memory
from rwkv_batch.state.entries import TOO_LITTLE_MEMORY, Moved, Unavailable, message
from rwkv_batch.wire.protocol import CommandReply, Event, Failed, Progress, Rejected, RequestKey, RowDelta

NO_THREAD = "can't start new thread"  # in CPython's error


class Refusal(ValueError):
    """Why a request or command is not carried out, in one sentence. reason and field: of Rejected."""

    def __init__(self, reason: str, message: str, field: str = "") -> None:
        super().__init__(message)
        self.reason, self.field = reason, field


def refusal_of_file(error: Exception) -> Refusal:
    """The refusal of a file that cannot be used; "unavailable" where the system refuses it just now."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__
    now = isinstance(cause, OSError) and cause.errno in (EIO, EMFILE, ENFILE, ENOMEM)
    return Refusal("unavailable" if now else "invalid", str(error))


class Rows:
    """The rows of all requests. Methods are for the engine's thread."""

    def __init__(self, scheduler: Scheduler, counts: EngineCounts) -> None:
        self._scheduler, self._counts = scheduler, counts
        self._events: Outbox = []
        self._deltas: dict[RequestKey, list[RowDelta]] = {}  # which leave together, by request

    # To readers

    @property
    def pending(self) -> bool:
        """Whether there are events that have not left."""
        return bool(self._events or self._deltas)

    def emit(self, key: RequestKey, event: Event) -> None:
        """An event of a request or a command, behind those before it."""
        self._events.append((key, event))

    def reply(self, command: RequestKey, error: str | Exception | None, **fields: Any) -> None:
        """Answer a command with a CommandReply of these fields, or with the error, as of `failure`."""
        answer = CommandReply(command[1], **fields)
        self.emit(command, failure(command[1], error) if error else answer)

    def show(self, row: Row, delta: RowDelta) -> None:
        """Text of a row, which leaves with that of others of its request."""
        if row.leads:
            self._deltas.setdefault(row.key, []).append(delta)

    def gather(self) -> None:
        """Texts that were shown come before what is emitted from now on."""
        for key, deltas in self._deltas.items():
            self._events.append((key, Progress(key[1], deltas)))
        self._deltas.clear()

    def take(self) -> Outbox:
        """The events since the last call."""
        self.gather()
        events, self._events = self._events, []
        return events

    # Ends

    def answer(self, row: Row, reason: str, event: Event | None = None) -> None:
        """The text of a row has ended, though its state may be needed still. reason: for the metrics."""
        if times := self._counts.finish(row, reason):
            self.emit(row.key, times)
        if event:
            self.emit(row.key, event)

    def leave(self, row: Row) -> None:
        """Its slot is free at once, if it has one."""
        row.end()
        if row.slot is not None:
            self._scheduler.free(self._scheduler.detach(row))

    def end(self, row: Row, reason: str = "abort", event: Event | None = None) -> None:
        """Nothing more comes of a row, and the next turn of its session may begin.

        What was answered before stays so.
        """
        self.answer(row, reason, event)
        self.leave(row)
        self._scheduler.unlock(row.life.target)

    def drop(self, unwanted: Callable[[Row], bool], reason: str = "abort") -> None:
        """End all that wait or run of which this is true."""
        doomed = [row for row in self._scheduler.rows() if unwanted(row)]
        running = self._scheduler.drop(unwanted)
        for row in doomed:
            if row.slot is None:  # it has waited
                self.answer(row, row.text.finish_reason or reason)
        for row in running:
            row.life.drop(row, (row.state is not FINALIZING and row.text.finish_reason) or reason)

    def end_together(self, row: Row, reason: str) -> None:
        """End a row that runs, and those that draw as one with it."""
        for each in row.together:
            if each.slot is not None:
                each.life.drop(each, reason)

    def fail_row(self, row: Row, message: str) -> None:
        """A row that runs cannot go on; the others of its request do."""
        first = row.together[0]
        self.show(first, first.fail(message))
        self.end_together(row, "error")

    def fail(self, key: RequestKey, why: str | Refusal) -> None:
        """End what there is of a request, of which something has failed or is refused."""
        self.drop(lambda row: row.key == key, "error")
        self._deltas.pop(key, None)
        self.emit(key, failure(key[1], why))

    def fail_step(self, fed: Iterable[Row], message: str) -> None:
        """A step over these rows has failed: their requests have, but for those that are answered already."""
        stored = [row for row in fed if row.life.stored]
        for row in stored:
            row.life.drop(row, "error")
        for key in {row.key for row in fed if row not in stored}:
            self.fail(key, message)


def failure(request_id: str, error: str | Exception) -> Failed | Rejected:
    """What a reader gets of an error, which says what it is in one sentence.

    It is a refusal too if a session has been changed by others meanwhile, or if the database is away.
    """
    if isinstance(error, Refusal):
        return Rejected(request_id, error.reason, str(error), error.field)
    why = error if isinstance(error, str) else message(error) or ""
    if isinstance(why, Moved | Unavailable):
        return Rejected(request_id, "conflict" if isinstance(why, Moved) else "unavailable", str(why))
    return Failed(request_id, why)


def could_not_run(error: Exception) -> str:
    """What a reader gets of an error that nobody has expected.

    A lack of memory or of threads is a matter of time.
    """
    if is_out_of_memory(error):
        return Unavailable(TOO_LITTLE_MEMORY)
    if isinstance(error, RuntimeError) and NO_THREAD in str(error):
        return Unavailable("The engine can start no thread for this request; try again later.")
    return f"The engine could not run this request ({type(error).__name__})."
