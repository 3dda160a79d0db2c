"""Savepoints: copies of the states of running turns, for those that may see more than their texts.

The text of a turn that ends at a stop string of several tokens ends before what its state has seen, and it is
known only then. The state goes back to a savepoint, and is fed what the text has behind it. A turn has two,
made in turns: the stop string may have begun before the newer one. They lie in slots of L1.
"""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

from torch import Tensor

from rwkv_batch.state.entries import NONE
from rwkv_batch.state.pool.tiers import Tiers
from rwkv_batch.state.slots import States

LEAST_TOKENS = 32  # between two savepoints of a turn
WORTHWHILE = 0.8e-3  # seconds that feeding them takes; a copy takes the host as long as feeding a small model


@dataclass(frozen=True)
class RunningTurn:
    """A turn whose state is to be saved."""

    owner: Hashable  # the same for all savepoints of the turn
    slot: int
    drawn: int  # tokens behind its prompt that the state has seen
    before: int  # the turn whose state it takes the place of at its end, or NONE


class Savepoints:
    """Those of all turns. For the pool's thread. `every`: after how many tokens the next one is due."""

    def __init__(self, states: States, tiers: Tiers, comes_back: bool, rate: float) -> None:
        """comes_back: whether a state can be had again without L1 and L2. rate: tokens fed a second."""
        self.every = max(LEAST_TOKENS, int(rate * WORTHWHILE))
        self._states, self._tiers, self._comes_back = states, tiers, comes_back
        self._saved: dict[Hashable, list[tuple[int, int]]] = {}  # (drawn, slot), the older first

    def first(self, tokens: int) -> int:
        """After how many drawn tokens the first one of a turn is due that is fed so many before."""
        return max(self.every - tokens, 0) if self.every > LEAST_TOKENS else 0

    def save(self, turns: Iterable[RunningTurn]) -> None:
        """Copy the states as they are behind what is queued; the first stays if L1 has no room for two."""
        copies, owners = {}, []
        for turn in turns:
            saved = self._saved.setdefault(turn.owner, [])
            slot = saved.pop(0)[1] if len(saved) == 2 else self._new_slot(NONE if saved else turn.before)
            if slot is not None:
                saved.append((turn.drawn, slot))
                copies[slot] = turn.slot
                owners.append(turn.owner)
        try:
            self._states.copy(copies)
        except Exception:  # then nobody knows what these hold
            for owner in owners:
                self.drop(owner)
            raise

    def find(self, owner: Hashable, serves: Callable[[int], bool]) -> tuple[int, Tensor] | None:
        """The last savepoint whose number of drawn tokens serves; its bytes are to be copied at once."""
        for drawn, slot in reversed(self._saved.get(owner, ())):
            if serves(drawn):
                return drawn, self._states.flushed(slot)
        return None

    def drop(self, owner: Hashable) -> None:
        """The turn needs none any longer."""
        for _, slot in self._saved.pop(owner, ()):
            self._tiers.take_back(slot)

    def _new_slot(self, before: int) -> int | None:
        return self._tiers.lend(before if self._comes_back else NONE, self._comes_back)
