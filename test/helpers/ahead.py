"""Steps on a CPU that say late what they have drawn and put off what they do to states, as those
on a GPU do.
"""

from collections.abc import Collection, Mapping, Sequence

from torch import Tensor

from rwkv_batch.engine.runner import Draws, Known, Steps
from rwkv_batch.engine.sequence import LAST
from rwkv_batch.model.rwkv7 import RWKV7, States
from rwkv_batch.wire.protocol import Sampling

NONSENSE = 1  # an id for rows that had ended
PERIOD = 3  # steps of one token, of which the last writes the state


class LateSteps(Steps):
    """Does to tokens and states what the kernels of cuda/feed.cu do, and lets nobody look at a draw before
    the next step.
    """

    stops_ahead = 3

    def __init__(self, model: RWKV7, states: States) -> None:
        super().__init__(model, states)
        self.last: dict[int, int] = {}
        self.stops: dict[int, frozenset[int]] = {}
        self.fed_last = 0  # tokens that the host did not know yet
        self.behind: dict[int, int] = {}
        self.put_off: dict[
            int, tuple[Tensor, Tensor]
        ] = {}  # of a slot that is behind: its state as it stands in memory, and as it is

    def begin(self, slot: int, params: Sampling, seed: int, stream: int, stop_ids: Collection[int]) -> None:
        super().begin(slot, params, seed, stream, stop_ids)
        self.last.pop(slot, None)
        self.stops[slot] = frozenset(stop_ids)
        self.put_off.pop(slot, None)
        self.behind[slot] = 0

    def settle(self, slots: Collection[int]) -> None:
        for slot in slots:
            self._bring_up(slot)
            self.behind[slot] = 0

    def _bring_up(self, slot: int) -> None:
        if slot in self.put_off:
            stands, state = self.put_off.pop(slot)
            assert self.states.wkv[slot].equal(stands), (
                "what was put off of another state would be done to this one"
            )
            self.states.wkv[slot] = state

    def run(
        self,
        tokens: list[int],
        counts: Sequence[int],
        slots: Sequence[int],
        draws: Sequence[int],
        tops: Mapping[int, int],
    ) -> Draws:
        fed: list[list[int]] = []
        for count, slot in zip(counts, slots, strict=True):
            piece, tokens = tokens[:count], tokens[count:]
            if piece == [LAST]:
                assert len(self.stops[slot]) <= self.stops_ahead
                self.fed_last += 1
                piece = [] if self.last[slot] in self.stops[slot] else [self.last[slot]]
            assert LAST not in piece
            fed.append(piece)
        alive = [row for row, piece in enumerate(fed) if piece]
        draws_alive = [row for row in draws if fed[row]]
        tops_alive = {
            draws_alive.index(draws[place]): top for place, top in tops.items() if fed[draws[place]]
        }
        ids, found = dict.fromkeys(draws, NONSENSE), dict.fromkeys(draws, (0.0, [(NONSENSE, 0.0)]))
        if alive:
            single = [slots[row] for row in alive if len(fed[row]) == 1]
            stand = {
                slot: self.put_off[slot][0] if slot in self.put_off else self.states.wkv[slot].clone()
                for slot in single
            }
            self.settle([slots[row] for row in alive if len(fed[row]) > 1])
            for slot in single:
                self._bring_up(slot)
            pieces = [token for piece in fed for token in piece]
            known = super().run(
                pieces,
                [len(fed[row]) for row in alive],
                [slots[row] for row in alive],
                [alive.index(row) for row in draws_alive],
                tops_alive,
            )
            ids |= zip(draws_alive, known.wait(), strict=True)
            found |= zip((draws_alive[place] for place in tops_alive), known.logprobs(), strict=True)
            for slot, state in stand.items():
                self.behind[slot] = (self.behind[slot] + 1) % PERIOD
                if self.behind[slot]:
                    self.put_off[slot] = state, self.states.wkv[slot].clone()
                    self.states.wkv[slot] = state
        self.last |= {slots[row]: ids[row] for row in draws_alive}
        return Known([ids[row] for row in draws], [found[draws[place]] for place in tops])
