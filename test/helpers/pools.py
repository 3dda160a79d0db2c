"""What the tests of the state pool share: tiny states with random contents, and waiting for the pool's
events.
"""

import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from rwkv_batch.state.slots import States
from rwkv_batch.state.store import Store
from state_pool import Event, Freed, StatePool

MODEL = "0123456789abcdef"
SLOTS = 12
SNAPSHOT_BYTES = 512 + 2 * 64 * 2 + 64 * 64 * 4
PATIENCE = 30.0  # seconds until a missing event is a failure


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
        settle: Callable[[list[int]], None] = lambda slots: None,
    ) -> None:
        self.states = States(SLOTS, 1, 64, torch.float16, wkv)
        self.free = set(range(SLOTS))
        self.events: dict[object, Event] = {}  # that nobody has waited for yet
        self._ready = threading.Event()
        self.pool = StatePool(
            self.states,
            fingerprint,
            l1=l1,
            l2=l2,
            store=Store(path, limit) if path else None,
            durable=durable,
            wake=self._ready.set,
            settle=settle,
        )
        self._numbers = torch.Generator().manual_seed(1)

    def slot(self) -> int:
        return self.free.pop()

    def fill(self, slot: int) -> torch.Tensor:
        """Random contents for a slot; a copy of them."""
        self.states.shift[slot] = torch.randn(self.states.shift.shape[1:], generator=self._numbers)
        self.states.wkv[slot] = torch.randn(self.states.wkv.shape[1:], generator=self._numbers)
        return self.states._memory[slot].clone()

    def release(self, slots: Sequence[int]) -> None:
        for slot in slots:
            assert slot not in self.free, "a slot was handed back twice"
            self.free.add(slot)

    def wait(self, token: object) -> Any:
        """The event of this token, which comes once; slots that fall free meanwhile are taken back."""
        while True:
            self.poll()
            if token in self.events:
                return self.events.pop(token)
            assert self._ready.wait(PATIENCE), f"no event for {token}"
            self._ready.clear()

    def poll(self) -> None:
        """Take in what the pool has done."""
        for event in self.pool.poll():
            self.release(getattr(event, "slots", []) + getattr(event, "freed", []))
            if not isinstance(event, Freed):
                assert event.token not in self.events, "a second event for one call"
                self.events[event.token] = event

    def put(self, key: str, tokens: int = 1) -> torch.Tensor:
        """Save random contents under the key and wait until that is done; a copy of them."""
        slot = self.slot()
        state = self.fill(slot)
        self.release(self.pool.save(key, slot, tokens, token=("put", key)))
        event = self.wait(("put", key))
        assert event.error is None, event.error
        return state

    def delete(self, key: str, prefix: bool = False) -> int:
        """Delete for good; how many sessions there were."""
        token = object()
        self.release(self.pool.delete(key, prefix, token=token))
        event = self.wait(token)
        assert event.error is None, event.error
        return event.found

    def load(self, key: str) -> Any:
        """Load into a slot that is given back at once; the event, with the contents as `state`."""
        slot = self.slot()
        self.states._memory[slot] = 255
        self.pool.load(key, slot, token=("load", key))
        event = self.wait(("load", key))
        state = self.states._memory[slot].clone()
        self.release([slot])
        return event, state

    def holds(self, key: str, state: torch.Tensor) -> bool:
        event, found = self.load(key)
        return event.error is None and torch.equal(found, state)

    def tier(self, key: str) -> str | None:
        info = self.pool.find(key)
        return info.tier if info else None

    def do(self, method: str, *arguments: Any) -> Any:
        """Call a method of the pool that an event answers, and wait for that."""
        token = object()
        getattr(self.pool, method)(*arguments, token=token)
        return self.wait(token)

    def crash(self, path: Path) -> None:
        """Copy what a process killed now would leave on the disk, to another path, and close this pool."""
        database = self.pool._store.path
        for suffix in (
            "",
            "-wal",
        ):  # the log first reaches the file at a checkpoint, long after anything a test writes
            if database.with_name(database.name + suffix).exists():
                shutil.copy(f"{database}{suffix}", f"{path}{suffix}")
        self.pool.close()
