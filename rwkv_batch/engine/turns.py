"""Turns on stored states, and session commands: what the engine does with the state pool.

A turn's way: it waits until its session is free (the scheduler), gets a slot, its state is brought there
(`begin`), its row runs, its state is brought to exactly the end of its text (`end`), and is stored. Only when
that is committed does its reader get the last delta, and the session's next turn begins.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from rwkv_batch.engine.scheduler import Scheduler
from rwkv_batch.engine.sequence import Sequence
from rwkv_batch.text.tokenizer import Tokenizer
from rwkv_batch.wire.protocol import (
    Event,
    Failed,
    GenerateRequest,
    Progress,
    Rejected,
    RowDelta,
    SessionCommand,
    SessionReply,
    SessionTurn,
)
from state_pool import Deleted, DocumentDone, Exported, Forked, Freed, Imported, Loaded, Saved, StatePool

Key = tuple[bytes, str]


@dataclass
class _Begun:
    """What a turn must remember until it is over."""

    source: str | None  # what it continues, if that was there when it began
    updated: float  # when the source was stored
    tokens: int  # that the source's state had seen
    prompt: list[int]
    last: RowDelta | None = None  # waits for the commit
    length: int = 0  # tokens of the state that is stored
    discard: bool = False  # its session was deleted meanwhile: its text counts, its state does not
    abandoned: bool = False  # while its state was on the way to the slot


class Sessions:
    """The turns under way.

    `tokens(request, continued)` is a turn's prompt, `clear(slot)` zeroes a state, `emit(key, event)` takes
    what a request's front end is to hear.
    """

    def __init__(
        self,
        pool: StatePool,
        scheduler: Scheduler,
        tokenizer: Tokenizer,
        tokens: Callable[[GenerateRequest, bool], list[int]],
        clear: Callable[[int], None],
        emit: Callable[[Key, Event], None],
    ) -> None:
        self._pool, self._scheduler, self._tokenizer = pool, scheduler, tokenizer
        self._tokens, self._clear, self._emit = tokens, clear, emit
        self._begun: dict[Sequence, _Begun] = {}
        self._numbers: dict[str, int] = {}  # the last number given to each branching session

    def target(self, turn: SessionTurn) -> str | None:
        """The key under which this turn's state will be stored."""
        if turn.branch is None:
            return turn.target
        if turn.branch not in self._numbers:
            tails = (key.removeprefix(f"{turn.branch}:") for key in self._pool.keys(f"{turn.branch}:"))
            self._numbers[turn.branch] = max((int(tail) for tail in tails if tail.isdecimal()), default=0)
        while True:  # a fork, an import or a turn may have taken the next one
            self._numbers[turn.branch] += 1
            key = f"{turn.branch}:{self._numbers[turn.branch]}"
            if key not in self._scheduler.queues and self._pool.find(key) is None:
                return key

    def expects(self, turn: SessionTurn) -> bool:
        """Whether the turn will find its source, as far as is known now: it is stored, or a turn before it is
        to store it.
        """
        return turn.source is not None and (
            turn.source in self._scheduler.queues or self._pool.find(turn.source) is not None
        )

    def begin(self, row: Sequence, turn: SessionTurn) -> bool:
        """Whether the row begins with the zero state, which the caller puts into its slot. Otherwise bring
        the state it continues into its slot, or the row to the state's.
        """
        assert row.slot is not None
        info = self._pool.find(turn.source) if turn.source is not None else None
        if info is None and turn.required:
            self._emit(
                row.key,
                Rejected(row.key[1], "not_found", f"The session {turn.source} has been deleted meanwhile."),
            )
            self._scheduler.release(row)
            self._scheduler.unlock(row.target)
            return False
        row.prompt = self._tokens(row.request, info is not None)
        begun = self._begun[row] = _Begun(
            info.key if info else None, info.updated if info else 0.0, info.tokens if info else 0, row.prompt
        )
        if row.request.max_tokens == 0:  # the prompt is only read
            begun.last, begun.length = RowDelta(row.row, "", 0, "length"), begun.tokens + len(row.prompt)
            row.close(row.prompt)
        if info is None:
            return True
        slot = self._pool.take(info.key) if info.key == row.target else None
        if slot is not None:
            self._scheduler.move(row, slot)
        else:
            self._load(row, info.key)
        return False

    def end(self, row: Sequence, last: RowDelta) -> None:
        """The row's text has ended with the delta `last`."""
        begun = self._begun[row]
        begun.last = last
        if row.target is None or begun.discard:
            self._over(row, begun)
            return
        kept = row.kept(self._tokenizer)
        begun.length = begun.tokens + len(begun.prompt) + len(kept)
        if kept[: row.returned] == row.drawn[: row.returned]:
            row.close(kept[row.returned :])
            self.closed(row)
            return
        row.close(
            begun.prompt + kept
        )  # the state has run past the end of the text: once more from the start of the turn
        assert row.slot is not None
        if begun.source is None:
            self._clear(row.slot)
            return
        info = self._pool.find(begun.source)
        if info is None or info.updated != begun.updated:
            self._emit(
                row.key,
                Failed(
                    row.key[1],
                    f"The session {begun.source} was changed or deleted while this turn ran from it.",
                ),
            )
            self.abandon(row)
            return
        self._load(row, begun.source)

    def closed(self, row: Sequence) -> None:
        """Store the state if the row has been brought to the end of its text."""
        begun = self._begun[row]
        if row.prompt_left:
            return
        if begun.discard or row.target is None:
            self._over(row, begun)
            return
        self._scheduler.free(
            *self._pool.save(row.target, self._scheduler.give_away(row), begun.length, token=row)
        )

    def abandon(self, row: Sequence) -> None:
        """A running row that has failed or that nobody wants. What was stored before its turn stays."""
        begun = self._begun.get(row)
        if begun and not row.ready:
            begun.abandoned = True  # its slot is being written to
            return
        self._begun.pop(row, None)
        self._scheduler.release(row)
        self._scheduler.unlock(row.target)

    def command(self, key: Key, command: SessionCommand) -> None:
        """Carry a command out; its answer is emitted, now or later."""
        match command.command:
            case "status":
                self._emit(key, SessionReply(command.id, sessions=self._pool.status()))
            case "delete":
                self._delete(key, command)
            case "put":
                self._pool.put_document(command.key, command.data, token=key)
            case "get":
                self._pool.get_document(command.key, token=key)
            case "remove":
                self._pool.remove_document(command.key, token=key)
            case "fork" | "import" if self._taken(command):
                self._emit(
                    key,
                    Rejected(
                        command.id,
                        "overloaded",
                        "That session is busy with a turn or a copy; try again in a moment.",
                    ),
                )
            case "import":
                self._scheduler.lock(command.key)
                self._pool.import_(command.key, command.data, token=key)
            case "fork" | "export" if self._pool.find(command.key) is None:
                self._emit(key, Rejected(command.id, "not_found", f"There is no session {command.key}."))
            case "fork" if self._pool.find(command.target) and not command.replace:
                self._emit(
                    key, Rejected(command.id, "exists", f"There is a session {command.target} already.")
                )
            case "fork":
                self._scheduler.lock(command.target)
                self._pool.fork(command.key, command.target, token=key)
            case "export":
                self._pool.export(command.key, token=key)

    def poll(self) -> None:
        """Take in what the pool has finished."""
        for event in self._pool.poll():
            match event:
                case Loaded():
                    self._loaded(event)
                case Saved():
                    self._saved(event)
                case Freed(slots=slots):
                    self._scheduler.free(*slots)
                case Imported():
                    self._scheduler.unlock(event.key)
                    key = cast(Key, event.token)
                    self._emit(
                        key, Rejected(key[1], "invalid", event.error) if event.error else SessionReply(key[1])
                    )
                case Deleted():
                    self._answer(event, SessionReply(cast(Key, event.token)[1], found=event.found))
                case Forked():
                    self._scheduler.unlock(event.key)
                    self._answer(event, SessionReply(cast(Key, event.token)[1]))
                case Exported():
                    self._answer(event, SessionReply(cast(Key, event.token)[1], data=event.data or b""))
                case DocumentDone():
                    self._answer(
                        event,
                        SessionReply(cast(Key, event.token)[1], found=event.found, data=event.data or b""),
                    )

    def _load(self, row: Sequence, key: str) -> None:
        assert row.slot is not None
        row.ready = False
        self._pool.load(key, row.slot, token=row)

    def _loaded(self, event: Loaded) -> None:
        row = cast(Sequence, event.token)
        row.ready = True
        if self._begun[row].abandoned:
            self.abandon(row)
        elif event.error:
            self._emit(row.key, Failed(row.key[1], event.error))
            self.abandon(row)

    def _saved(self, event: Saved) -> None:
        row = cast(Sequence, event.token)
        self._scheduler.free(*event.freed)
        begun = self._begun.pop(row)
        assert begun.last
        self._emit(
            row.key, Failed(row.key[1], event.error) if event.error else Progress(row.key[1], [begun.last])
        )
        self._scheduler.unlock(row.target)

    def _over(self, row: Sequence, begun: _Begun) -> None:
        """The turn ends without storing anything."""
        assert begun.last
        self.abandon(row)
        self._emit(row.key, Progress(row.key[1], [begun.last]))

    def _delete(self, key: Key, command: SessionCommand) -> None:
        self._scheduler.free(*self._pool.delete(command.key, command.prefix, token=key))
        for row, begun in self._begun.items():
            if row.target is not None and (
                row.target == command.key or (command.prefix and row.target.startswith(f"{command.key}:"))
            ):
                begun.discard = True

    def _taken(self, command: SessionCommand) -> bool:
        return (command.target if command.command == "fork" else command.key) in self._scheduler.queues

    def _answer(self, event: Deleted | Forked | Exported | DocumentDone, reply: SessionReply) -> None:
        key = cast(Key, event.token)
        self._emit(key, Failed(key[1], event.error) if event.error else reply)
