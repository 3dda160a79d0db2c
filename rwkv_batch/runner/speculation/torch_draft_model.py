"""A draft model over torch's operations and the kernels for CPUs."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rwkv_batch.model.torch_model import TorchModel
from rwkv_batch.runner.speculation.draft_model import Guess, Masks, allowed_rows
from rwkv_batch.runner.torch_runner import TorchRunner
from rwkv_batch.state.slots import slot_bytes


class TorchDraftModel:
    """The draft model of a runner on a CPU, with states for every slot; see DraftModel."""

    most_chained = 1

    def __init__(self, runner: TorchRunner, model: TorchModel, ids: Tensor | None = None) -> None:
        """model: that of the runner. ids: `[rows of the head]`, of which each is the row; None: in order."""
        self.checkpoint, self._runner, self._model = model.checkpoint, runner, model
        self._ids = None if ids is None else ids.to(model.device)

    @property
    def weight_bytes(self) -> int:
        return self.checkpoint.bytes_held(self._runner.dtype.itemsize)

    def state_bytes(self, slots: int) -> int:
        shape = self.checkpoint
        return 2 * slots * slot_bytes(shape.layers, shape.width, self._runner.dtype, torch.float32)

    def allocate(self, slots: int) -> None:
        self._slots = slots
        self._states = self._model.new_states(2 * slots)

    def holds(self, slot: int) -> bool:
        return True

    def begin(self, slot: int) -> None:
        self._states.clear([slot])

    def read(self, tokens: Mapping[int, Sequence[int]]) -> None:
        self._feed(tokens, {}, draws=False)

    def first(
        self, tokens: Mapping[int, Sequence[int]], masks: Masks | None = None, passes: int = 1
    ) -> dict[int, list[Guess]]:
        return self._feed(tokens, masks or {})

    def further(
        self, guessed: Mapping[int, int], masks: Masks | None = None, begin: bool = False
    ) -> dict[int, list[Guess]]:
        if begin:
            self._states.copy({self._slots + slot: slot for slot in guessed})
        copies = {self._slots + slot: [token] for slot, token in guessed.items()}
        found = self._feed(copies, {self._slots + slot: mask for slot, mask in (masks or {}).items()})
        return {slot - self._slots: guesses for slot, guesses in found.items()}

    @torch.inference_mode()
    def _feed(
        self, tokens: Mapping[int, Sequence[int]], masks: Masks, draws: bool = True
    ) -> dict[int, list[Guess]]:
        self._runner.take_threads()
        slots, pieces = list(tokens), list(tokens.values())
        known = torch.tensor([token for piece in pieces for token in piece])
        wanted = None if draws else ()
        logits = self._model.forward(known, [len(piece) for piece in pieces], slots, self._states, wanted)
        if not draws:
            return {}
        for place, slot in enumerate(slots):
            if (mask := masks.get(slot)) is not None:
                allowed = allowed_rows(mask, logits.shape[1], self.checkpoint.vocab, self._ids)
                logits[place].masked_fill_(~allowed, -torch.inf)
        best, rows = logits.max(1)
        chances = (best - logits.logsumexp(1)).exp().nan_to_num(0.0)
        found = rows if self._ids is None else self._ids[rows]
        guesses = map(Guess, found.tolist(), chances.tolist())
        return {slot: [guess] for slot, guess in zip(slots, guesses, strict=True)}
