"""What the tests of the state pool share: tiny states with random contents, and waiting for callbacks."""

import shutil
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rwkv_batch.state.slots import States
from rwkv_batch.state.store import Store
from state_pool import StatePool

MODEL = "0123456789abcdef"
SLOTS = 12
SNAPSHOT_BYTES = 512 + 2 * 64 * 2 + 64 * 64 * 4
PATIENCE = 30.0  # seconds until a missing callback is a failure


@dataclass
class Result:
    """What a callback was called with: a value, where it takes one, and the error."""

    value: Any
    error: str | None


class Bench:
    """A pool over tiny states, with the caller's side of the agreement about slots."""

    def __init__(
        self,
        path: Path | None = None,
        *,
        l1: int = 2,
        l2: int = 2,
        durable: bool = True,
        limit: int | None = None,
        fingerprint: str = MODEL,
        wkv: torch.dtype = torch.float32,
        flush: Callable[[Collection[int]], None] = lambda slots: None,
    ) -> None:
        self.states = States(SLOTS, 1, 64, torch.float16, wkv)
        self.states.flush = flush
        self.free = set(range(SLOTS))
        self.results: dict[object, Result] = {}  # that nobody has waited for yet
        self._polling = False
        self._ready = threading.Event()
        self.pool = StatePool(
            self.states,
            fingerprint,
            l1=l1,
            l2=l2,
            store=Store(path, limit) if path else None,
            durable=durable,
            free=self.release,
            wake=self._ready.set,
        )
        self._numbers = torch.Generator().manual_seed(1)

    def slot(self) -> int:
        return self.free.pop()

    def fill(self, slot: int) -> torch.Tensor:
        """Random contents for a slot; a copy of them."""
        self.states.shift[slot] = torch.randn(self.states.shift.shape[1:], generator=self._numbers)
        self.states.wkv[slot] = torch.randn(self.states.wkv.shape[1:], generator=self._numbers)
        return self.states._memory[slot].clone()

    def release(self, slot: int) -> None:
        assert slot not in self.free, "a slot was handed back twice"
        self.free.add(slot)

    def callback(self, name: object) -> Callable[..., None]:
        """A callback for one call of the pool's methods, whose result `wait(name)` returns."""
        called = False

        def done(*arguments: Any) -> None:
            nonlocal called
            assert self._polling, "a callback outside of poll"
            assert not called, "a second callback for one call"
            called = True
            *values, error = arguments
            self.results[name] = Result(values[0] if values else None, error)

        return done

    def wait(self, name: object) -> Result:
        """The result of the callback of this name."""
        while True:
            self.poll()
            if name in self.results:
                return self.results.pop(name)
            assert self._ready.wait(PATIENCE), f"no callback for {name}"
            self._ready.clear()

    def poll(self) -> None:
        """Run the callbacks of what the pool has done."""
        self._polling = True
        self.pool.poll()
        self._polling = False

    def close(self) -> None:
        """Close the pool, which runs the callbacks that are left."""
        self._polling = True
        self.pool.close()
        self._polling = False

    def put(self, key: str, tokens: int = 1) -> torch.Tensor:
        """Save random contents under the key and wait until that is done; a copy of them."""
        slot = self.slot()
        state = self.fill(slot)
        result = self.do(self.pool.save, key, slot, tokens)
        assert result.error is None, result.error
        return state

    def delete(self, key: str, prefix: bool = False) -> int:
        """Delete for good; how many sessions there were."""
        result = self.do(self.pool.delete, key, prefix)
        assert result.error is None, result.error
        return result.value

    def load(self, key: str) -> tuple[Result, torch.Tensor]:
        """Load into a slot that is given back at once: its result, the state's tokens, and the contents."""
        slot = self.slot()
        self.states._memory[slot] = 255
        result = self.do(self.pool.load, key, slot)
        entry = self.pool.find(key)
        result.value = entry and entry.tokens
        state = self.states._memory[slot].clone()
        self.release(slot)
        return result, state

    def holds(self, key: str, state: torch.Tensor) -> bool:
        result, found = self.load(key)
        return result.error is None and torch.equal(found, state)

    def tier(self, key: str) -> str | None:
        info = self.pool.find(key)
        return info.tier if info else None

    def do(self, method: Callable[..., None], *arguments: Any) -> Result:
        """Call a method of the pool and wait for its callback."""
        name = object()
        method(*arguments, self.callback(name))
        return self.wait(name)

    def crash(self, path: Path) -> None:
        """Copy what a process killed now would leave on the disk, to another path, and close this pool."""
        database = self.pool._store.path
        # the log first reaches the file at a checkpoint, long after anything a test writes
        for suffix in ("", "-wal"):
            if database.with_name(database.name + suffix).exists():
                shutil.copy(f"{database}{suffix}", f"{path}{suffix}")
        self.close()


def keys(bench: Bench) -> list[tuple[str, str]]:
    """Every session and its tier."""
    return [(info.key, info.tier) for info in bench.pool.status()]
