"""What the tests of the state pool share: a model that anybody can compute, and waiting for callbacks.

The state after some tokens is a hash of them, and bytes that follow from it. So a
state that was copied wrongly, or is not that of a session's tokens, is found when it is looked at.
"""

import hashlib
import shutil
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from rwkv_batch.state.entries import NONE, Head, KeptState, Loaded, Session, SessionAt, message
from rwkv_batch.state.log.protocol import SessionStore
from rwkv_batch.state.log.store import Store
from rwkv_batch.state.pool.options import PoolOptions, PoolSlots
from rwkv_batch.state.slots import DeviceStates
from state_pool import StatePool

MODEL = "0123456789abcdef", 65536
SLOTS = 12
STATE_BYTES = 2 * 64 * 2 + 64 * 64 * 4
PATIENCE = 120.0  # seconds until a missing callback is a failure
ALWAYS = 1e-9  # a speed of replay at which every image is worth writing
NEVER = 1e18


def after(past: bytes, tokens: Sequence[int]) -> bytes:
    """The hash that stands for the state, 16 bytes; zeros are the state before the first token."""
    for token in tokens:
        past = _finite(hashlib.blake2b(past + token.to_bytes(4, "little"), digest_size=16).digest())
    return past


def _finite(data: bytes) -> bytes:
    """With the highest bit of each exponent cleared: no state that is not finite is taken from a store."""
    bits = np.frombuffer(data, np.uint8).copy()
    bits[1::2] &= 0xBF  # of numbers of 16 bits, and of 32
    return bits.tobytes()


BEGINNING = bytes(16)


def contents(state: bytes) -> torch.Tensor:
    """The bytes of a slot that holds the state."""
    if state == BEGINNING:
        return torch.zeros(STATE_BYTES, dtype=torch.uint8)
    rest = np.random.Generator(np.random.PCG64(int.from_bytes(state, "little"))).bytes(STATE_BYTES - 16)
    return torch.frombuffer(bytearray(state + _finite(rest)), dtype=torch.uint8)


ALL_TURNS = range(1 << 32)
OPTIONS = {"durable": True, "token_log": True, "replay_tokens": 8192, "replay_on_new_model": False}


@dataclass
class Result:
    """What a callback was called with: a value, where it takes one, and the error."""

    value: Any
    error: str | None


class BegunTurn(NamedTuple):
    """A turn that runs."""

    at: SessionAt
    appends: bool  # to the session that it continues
    session: Session | None
    parent: Head | None
    slot: int


class Bench:
    """A pool over tiny states, with the caller's side of the agreement about slots."""

    def __init__(
        self,
        path: Path | None = None,
        *,
        l1: int = 2,
        l2: int = 2,
        limit: int | None = None,
        model: tuple[str, int] = MODEL,
        wkv: torch.dtype = torch.float32,
        flush: Callable[[Collection[int]], None] = lambda slots: None,
        replay_rate: float = ALWAYS,
        store: SessionStore | None = None,
        **options: Any,
    ) -> None:
        """store: in place of a file of its own."""
        self.states = DeviceStates(SLOTS, 1, 64, torch.float16, wkv)
        self.states.flush = flush
        self.free = set(range(SLOTS))
        self._rows = SLOTS - l1
        self._running: set[int] = set()  # slots of turns
        self.results: dict[object, Result] = {}  # that nobody has waited for yet
        self._polling = False
        self._ready = threading.Event()
        self.pool = StatePool(
            self.states,
            model,
            slots=PoolSlots(l1, l2, self.release, self.spare),
            options=PoolOptions(replay_rate=replay_rate, **{**OPTIONS, **options}),
            store=Store(path, limit) if path else store,
            wake=self._ready.set,
        )

    # Slots

    def slot(self) -> int:
        if not self.free:
            self.settle()
        self._running.add(slot := self.free.pop())
        return slot

    def release(self, slot: int) -> None:
        assert slot not in self.free, "a slot was handed back twice"
        self._running.discard(slot)
        self.free.add(slot)

    def spare(self) -> int | None:
        """A slot that no row needs, as Scheduler.spare gives one."""
        return self.free.pop() if len(self.free) > self._rows - len(self._running) else None

    def state(self, slot: int) -> bytes:
        """The state in the slot, which has to be one."""
        state = self.states.memory[slot][:16].numpy().tobytes()
        assert torch.equal(self.states.memory[slot], contents(state)), "the slot holds no state"
        return state

    def feed(self, slot: int, tokens: Sequence[int]) -> None:
        self.states.memory[slot] = contents(after(self.state(slot), tokens))

    # Callbacks

    def callback(self, name: object) -> Callable[..., None]:
        """A callback for one call of the pool's methods, whose result `wait(name)` returns."""
        called = False

        def done(*arguments: Any) -> None:
            nonlocal called
            assert self._polling, "a callback outside of poll"
            assert not called, "a second callback for one call"
            called = True
            *values, error = arguments
            sentence = message(error) if isinstance(error, Exception) else error
            self.results[name] = Result(values[0] if values else None, sentence)

        return done

    def wait(self, name: object) -> Result:
        """The result of the callback of this name."""
        self.wait_until(lambda: name in self.results)
        return self.results.pop(name)

    def wait_until(self, condition: Callable[[], object]) -> None:
        """Poll until the condition holds."""
        while True:
            self._ready.clear()
            self.poll()
            if condition():
                return
            assert self._ready.wait(PATIENCE), "nothing happens"

    def do(self, method: Callable[..., None], *arguments: Any) -> Result:
        """Call a method of the pool and wait for its callback."""
        return self.wait(self.ask(method, *arguments))

    def ask(self, method: Callable[..., None], *arguments: Any) -> object:
        """Call a method of the pool; the name of its callback."""
        name = object()
        method(*arguments, self.callback(name))
        return name

    def poll(self) -> None:
        """Run the callbacks of what the pool has done."""
        self._polling = True
        self.pool.poll()
        self._polling = False

    def settle(self) -> None:
        """Wait until copies, reads, images and commits that were asked for before are done."""
        pool = self.pool
        for _ in range(2):  # what is done may ask for more
            for worker in (pool.parts.threads.copier, pool.parts.threads.reader):
                self.do(lambda done, worker=worker: worker.put(lambda: None, lambda _, error: done(None)))
            self.wait_until(lambda: not pool.images.waiting)
            self.do(lambda done: pool.parts.writer.put([], lambda _, error: done(None)))

    def close(self) -> None:
        """Close the pool, which runs the callbacks that are left."""
        self._polling = True
        self.pool.close()
        self._polling = False

    def crash(self, path: Path) -> None:
        """Copy what a process killed now would leave on the disk, to another path, and close this pool."""
        database = self.pool.store.path
        assert database
        while True:  # until nothing has changed in the meantime
            before = files(database)
            for target in (path, Path(f"{path}-wal")):
                target.unlink(missing_ok=True)
            shutil.rmtree(f"{path}.images", ignore_errors=True)
            for file, data in before.items():
                copy = Path(str(file).replace(str(database), str(path), 1))
                copy.parent.mkdir(exist_ok=True)
                copy.write_bytes(data)
            if files(database) == before:
                break
        self.close()

    # Sessions

    def begin(self, key: str, last: bool = True) -> tuple[Session | None, Head | None, int]:
        """Bring a session's state into a slot: the session as it is, its head, and the slot."""
        session = self.pool.find(key)
        if session is None:
            slot = self.slot()
            self.states.clear([slot])
            return None, None, slot
        self.pool.pin(session.head)
        slot = self.slot()
        if found := self.pool.begin(session.head, last):
            self.states.replace({slot: found[0]})
            return session, found[1], slot
        result = self.do(self.pool.load, session, slot)
        if result.error:
            self.pool.unpin(session.head)
            self.release(slot)
            raise LookupError(result.error)
        loaded: Loaded = result.value
        self.feed(slot, loaded.replay)
        return session, loaded.head, slot

    def turn(self, key: str, tokens: Sequence[int], target: str | None = None, wait: bool = True) -> object:
        """A turn of a session, stored as `target`; the name of its callback, unless that is waited for."""
        name = self.end_turn(self.begin_turn(key, target), tokens)
        if wait:
            result = self.wait(name)
            assert result.error is None, result.error
        return name

    def begin_turn(self, key: str, target: str | None = None) -> BegunTurn:
        """A turn of a session, as `turn`, that runs until `end_turn`."""
        at = self.pool.at(target or key)
        return BegunTurn(at, target in (None, key), *self.begin(key, target in (None, key)))

    def end_turn(self, turn: BegunTurn, tokens: Sequence[int]) -> object:
        """The name of the callback of its commit."""
        name, session, slot = object(), turn.session, turn.slot
        self.feed(slot, tokens)
        self._running.remove(slot)  # it becomes the pool's
        split = len(tokens) // 2
        if self.pool.token_log:
            done = self.callback(name)
            head = self.pool.commit(turn.at, turn.parent, tokens[:split], tokens[split:], done)
            before = session.head.turn if session and turn.appends else NONE
            self.pool.keep([KeptState(turn.at.key, head, slot, before)])
        else:
            seen = (session.head.tokens if session else 0) + len(tokens)
            self.pool.save(turn.at, slot, seen, self.callback(name))
        if session:
            self.pool.unpin(session.head)
        return name

    def begin_in(self, key: str, past: Sequence[int], tokens: int) -> None:
        """Store a session that begins in the state after `past`, which counts as so many tokens."""
        slot, name = self.slot(), object()
        self.states.clear([slot])
        self.feed(slot, past)
        self._running.remove(slot)  # it becomes the pool's
        self.pool.save(self.pool.at(key), slot, tokens, self.callback(name))
        assert self.wait(name).error is None

    def fork(self, source: str, target: str, turn: int | None = None) -> str | None:
        """Let `target` end where `source` does, or with its turn of that number; the error."""
        session = self.pool.find(source)
        if session is None:
            return f"There is no session {source}."
        head = session.head
        if turn is not None:
            turns = self.do(self.pool.turns, session, ALL_TURNS).value
            found = next(entry for entry in turns if entry.number == turn)
            head = found.head(head.imaged if head.imaged <= found.end else 0)
        return self.do(self.pool.point, self.pool.at(target), head).error

    def look(self, key: str) -> bytes | None:
        """The state of a session, None if there is no such session."""
        session = self.pool.find(key)
        if session is None:
            return None
        slot = self.slot()
        self.states.memory[slot] = 255
        result = self.do(self.pool.load, session, slot)
        try:
            if result.error:
                raise LookupError(result.error)
            self.feed(slot, result.value.replay)
            return self.state(slot)
        finally:
            self.release(slot)

    def import_(self, key: str, data: bytes, done: Callable[..., None]) -> None:
        self.pool.files.import_(key, data, tokens=self.pool.token_log, done=done)

    def delete(self, key: str, prefix: bool = False) -> int:
        """Delete for good; how many sessions there were."""
        result = self.do(self.pool.delete, key, prefix)
        assert result.error is None, result.error
        return result.value

    def tier(self, key: str) -> str | None:
        return dict(self.tiers()).get(key)

    def tiers(self) -> list[tuple[str, str]]:
        """Every session and its tier."""
        result = self.do(self.pool.status, None, None)
        assert result.error is None, result.error
        return [(entry.key, entry.tier) for entry in result.value.sessions]


def files(database: Path) -> dict[Path, bytes]:
    """The database, its log and its images."""
    found = [database, Path(f"{database}-wal"), *sorted(Path(f"{database}.images").glob("*"))]
    data = {}
    for file in found:
        try:
            data[file] = file.read_bytes()
        except FileNotFoundError:
            continue
    return data
