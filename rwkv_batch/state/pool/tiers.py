"""The two upper tiers: states in slots of the device (L1) and in host memory (L2), by the turn they end with.

Both are exact LRU. A state that leaves L1 is copied to L2 on the thread of the copies, and its slot is free
when that is done. A turn begins in a copy of a state. The state stays, for others that share it, or for its
own session until the turn has taken its place: a turn may fail, or have to be fed again. What is hardly
wanted again, as a turn goes on from it, leaves first, and for nowhere. L1 lends slots for savepoints of
running turns (rwkv_batch/state/pool/savepoints.py), and has so many fewer then.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from torch import Tensor

from rwkv_batch.state.entries import Head
from rwkv_batch.state.jobs import JobThread
from rwkv_batch.state.pool.options import PoolSlots
from rwkv_batch.state.slots import States
from rwkv_batch.state.snapshot import Transfer

log = logging.getLogger(__name__)

Left = Callable[[str, Head, Tensor], None]


@dataclass(eq=False)
class _Slot:
    key: str  # of the session that left it
    head: Head
    slot: int
    shared: bool = False  # other sessions may end with this turn too
    copies: int = 0  # to the host, under way; the slot may not change before they are done
    gone: bool = False  # it has left L1, or nobody wants it: the slot is freed after the last copy


@dataclass(eq=False)
class _Host:
    key: str
    head: Head
    image: Tensor  # a snapshot, perhaps not sealed; its body never changes


class Tiers:
    """All methods are for the pool's thread. `left` gets what leaves L2, or L1 where there is no L2."""

    def __init__(
        self,
        states: States,
        transfer: Transfer,
        copier: JobThread,
        slots: PoolSlots,
        left: Left,
    ) -> None:
        self._states, self._transfer, self._copier = states, transfer, copier
        self._slots, self._left = slots, left
        self._l1: OrderedDict[int, _Slot] = OrderedDict()
        self._continued: dict[int, None] = {}  # of these, those hardly wanted again, the oldest first
        self._leaving: dict[int, _Slot] = {}  # on their way from L1 to L2
        self._lent = 0  # slots
        self._l2: OrderedDict[int, _Host] = OrderedDict()

    def tier(self, turn: int) -> Literal["L1", "L2"] | None:
        """The faster tier that has the state at the end of this turn. Also for other threads."""
        if turn in self._l1 or turn in self._leaving:
            return "L1"
        return "L2" if turn in self._l2 else None

    def turns(self, tier: Literal["L1", "L2"]) -> list[int]:
        """What the tier has and no faster one, the least recently used first."""
        if tier == "L1":
            return [*self._leaving, *self._l1]
        return [turn for turn in self._l2 if self.tier(turn) == "L2"]

    def all_turns(self) -> list[int]:
        """What either tier has."""
        return self.turns("L1") + self.turns("L2")

    def contents(self) -> dict[str, Head]:
        """Sessions by their keys, as they were when they left their states here."""
        slots = {entry.key: entry.head for entry in (*self._leaving.values(), *self._l1.values())}
        return {host.key: host.head for host in self._l2.values()} | slots

    def head(self, turn: int) -> Head | None:
        """The turn, with what is known of its images."""
        entry = self._slot(turn) or self._l2.get(turn)
        return entry.head if entry else None

    def share(self, turn: int) -> None:
        """Another session ends with this turn, too, or its own does again."""
        if entry := self._l1.get(turn):
            entry.shared = True
            self._continued.pop(turn, None)

    def begin(self, turn: int, last: bool) -> Tensor | None:
        """The bytes of a state in L1, to be copied at once; None if it is not there.

        last: it is hardly wanted again before `rest`, unless others share it.
        """
        entry = self._l1.get(turn)
        if entry is None:
            return None
        self._l1.move_to_end(turn)
        self._continued.pop(turn, None)
        if last and not entry.shared:
            self._continued[turn] = None
        return self._states.flushed(entry.slot)

    def rest(self, turn: int) -> None:
        """The turn that went on from this one is over."""
        self._continued.pop(turn, None)

    def keep(self, key: str, head: Head, slot: int, before: int) -> None:
        """The caller's slot holds a turn's state, flushed; it becomes the most recent of L1.

        before: the turn whose state it takes the place of, unless others share that.
        """
        entry = self._l1.get(before)
        if entry and not entry.shared:
            self._drop_slot(before)
        self._l1[head.turn] = _Slot(key, head, slot)
        self._trim()

    def lend(self, before: int, at_once: bool) -> int | None:
        """A slot of L1 for a copy of a running turn's state, until `take_back`; None if there is none now.

        before: the turn that it goes on from, if its state is hardly wanted again before `rest`; else NONE.
        at_once: whether others make room for it. At most half of L1 is lent.
        """
        if self._lent >= self._slots.l1 // 2:
            return None
        entry = self._l1.get(before)
        if entry and not entry.shared:
            self._continued.setdefault(before)
        if at_once:
            self._trim(room=1)
        slot = self._slots.spare()
        self._lent += slot is not None
        return slot

    def take_back(self, slot: int) -> None:
        """A slot that was lent."""
        self._lent -= 1
        self._slots.free(slot)

    def hold(self, key: str, head: Head, image: Tensor) -> None:
        """A state in host memory becomes the most recent of L2."""
        self._l2[head.turn] = _Host(key, head, image)
        self._l2.move_to_end(head.turn)
        self._trim()

    def copy(self, turn: int, slot: int, done: Callable[[Exception | None], None]) -> bool:
        """Fill a slot of the caller's with a state of either tier; False if none has it.

        `done` is reported. The slot must not be used until then.
        """
        if entry := self._slot(turn):
            if turn in self._l1:
                self._l1.move_to_end(turn)
            self._states.duplicate(entry.slot, slot)
            self._copier.report(partial(done, None))
            return True
        if host := self._l2.get(turn):
            self._l2.move_to_end(turn)
            work = partial(self._transfer.restore, host.image, self._states.access(slot))
            self._copier.put(work, lambda _, error: done(error))
            return True
        return False

    def image(self, turn: int, done: Callable[[Tensor | None], None]) -> None:
        """`done` gets the state as a snapshot that may not be sealed, None if it cannot be had."""
        if host := self._l2.get(turn):
            done(host.image)
        elif entry := self._slot(turn):
            self._copy_out(entry, done)
        else:
            done(None)

    def image_now(self, turn: int) -> Tensor:
        """`image` on the calling thread, when that of the copies has ended."""
        if host := self._l2.get(turn):
            return host.image
        entry = self._slot(turn)
        assert entry
        return self._transfer.unsealed(self._states.access(entry.slot))

    def drop(self, turns: Iterable[int]) -> None:
        """Nobody wants these any longer."""
        for turn in turns:
            self._copier.discard(self._l2.pop(turn, None))
            if turn in self._l1:
                self._drop_slot(turn)
            elif entry := self._leaving.pop(turn, None):
                self._release(entry)

    def imaged(self, turn: int) -> None:
        """An image of this turn's end is stored, or will be."""
        for entry in (self._slot(turn), self._l2.get(turn)):
            if entry:
                entry.head = replace(entry.head, imaged=entry.head.tokens)

    def _trim(self, room: int = 0) -> None:
        """Push what is over the capacity out of L1 into L2, and out of L2. room: for so many more in L1."""
        l1, l2 = self._slots.l1, self._slots.l2
        while len(self._l1) + self._lent > l1 - room:
            if self._continued:
                self._drop_slot(next(iter(self._continued)))
                continue
            turn, entry = self._l1.popitem(last=False)
            self._leaving[turn] = entry
            self._copy_out(entry, partial(self._leave, entry))
        while len(self._l2) > l2:
            turn, host = self._l2.popitem(last=False)
            if self._slot(turn) is None:
                self._left(host.key, host.head, host.image)
            self._copier.discard(host)

    def _drop_slot(self, turn: int) -> None:
        """A state leaves L1 for nowhere."""
        self._continued.pop(turn, None)
        self._release(self._l1.pop(turn))

    def _leave(self, entry: _Slot, image: Tensor | None) -> None:
        """A state that leaves L1 is in host memory; without an image the copy has failed."""
        if self._leaving.get(entry.head.turn) is entry:
            del self._leaving[entry.head.turn]
            self._release(entry)
            if image is not None:
                self.hold(entry.key, entry.head, image)

    def _release(self, entry: _Slot) -> None:
        """Free its slot, after the copies that are under way."""
        entry.gone = True
        if not entry.copies:
            self._slots.free(entry.slot)

    def _copy_out(self, entry: _Slot, done: Callable[[Tensor | None], None]) -> None:
        entry.copies += 1

        def copied(image: Tensor | None, _: Exception | None) -> None:
            entry.copies -= 1
            if entry.gone and not entry.copies:
                self._slots.free(entry.slot)
            done(image)

        try:
            access = self._states.access(entry.slot)
        except Exception as error:
            log.exception("a state could not be copied to the host")
            self._copier.report(partial(copied, None, error))
        else:
            self._copier.put(partial(self._transfer.unsealed, access), copied)

    def _slot(self, turn: int) -> _Slot | None:
        return self._l1.get(turn) or self._leaving.get(turn)
