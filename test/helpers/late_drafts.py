"""What verifies drafts and guesses on a CPU, over a runner of ahead.py, as on a GPU."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ahead import LateRunner

from rwkv_batch.model.torch_model import TorchModel
from rwkv_batch.runner.protocol import LAST, Batch, Runner
from rwkv_batch.runner.speculation.draft_model import Guess, Masks
from rwkv_batch.runner.speculation.protocol import KnownVerified, MasksBehind, VerifyUnder
from rwkv_batch.runner.speculation.torch_draft_model import TorchDraftModel
from rwkv_batch.runner.speculation.torch_verifier import TorchVerifier
from rwkv_batch.sampling.masks import RowMasks

MOST_ROWS = 2


@dataclass(frozen=True)
class LateVerifier(TorchVerifier):
    """Verifies where all that rows have drawn is known, of a few rows, as the one for CUDA does."""

    @property
    def most_rows(self) -> int:
        return MOST_ROWS

    def takes(self, batch: Batch) -> bool:
        return LAST not in batch.tokens and len(batch.tokens) == len(batch.slots) <= MOST_ROWS

    def feed(self, batch: Batch, drafts: Mapping[int, int]) -> VerifyUnder:
        runner = self.runner
        assert isinstance(runner, LateRunner) and LAST not in batch.tokens
        runner.states.flush(batch.slots)
        verify = super().feed(batch, drafts)

        def draw(masks: RowMasks | None, after: MasksBehind) -> KnownVerified:
            found = verify(masks, after)
            assert isinstance(found, KnownVerified)
            for place, row in enumerate(batch.draws):
                drawn = [found.ids[place], *(token for token, _ in found.behind.get(place, ()))]
                runner.last[batch.slots[row]] = drawn[-1]
            return found

        return draw


def verifier_of(runner: Runner) -> LateVerifier:
    assert isinstance(runner, LateRunner) and isinstance(runner.model, TorchModel)
    return LateVerifier(runner, runner.model)


class ChainedDraftModel(TorchDraftModel):
    """Makes several passes before the host knows the first guess, for few rows, as the one for CUDA does."""

    most_chained = 5
    places = 2 * MOST_ROWS

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.passes: list[int] = []  # of each call
        self._held = OrderedDict[int, None]()

    def holds(self, slot: int) -> bool:
        if slot in self._held:
            self._held.move_to_end(slot)
        return slot in self._held

    def begin(self, slot: int) -> None:
        if not self.holds(slot) and len(self._held) == self.places:
            self._held.popitem(last=False)
        self._held[slot] = None
        super().begin(slot)

    def first(
        self, tokens: Mapping[int, Sequence[int]], masks: Masks | None = None, passes: int = 1
    ) -> dict[int, list[Guess]]:
        assert passes <= self.most_chained and (passes == 1 or not masks)
        assert len(tokens) <= MOST_ROWS and self._held.keys() >= tokens.keys()
        self.passes.append(passes)
        found = super().first(tokens, masks)
        for number in range(1, passes):
            last = {slot: guesses[-1].token for slot, guesses in found.items()}
            for slot, guesses in self.further(last, begin=number == 1).items():
                found[slot] += guesses
        return found
