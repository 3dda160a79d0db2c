"""A second, smaller model, which guesses what rows draw next."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rwkv_batch.bundled import unpack
from rwkv_batch.config import EngineConfig
from rwkv_batch.model.files import CheckpointError
from rwkv_batch.model.torch_model import TorchModel
from rwkv_batch.ops.device import DeviceError, find_devices
from rwkv_batch.runner import backends
from rwkv_batch.runner.loading import LoadedModel, load_weights
from rwkv_batch.runner.speculation.torch_verifier import torch_model_of
from rwkv_batch.runner.torch_runner import TorchRunner
from rwkv_batch.state.slots import slot_bytes


def load_draft(loaded: LoadedModel, config: EngineConfig) -> "DraftModel | None":
    """The model that guesses for this one, whose slots count with its states from now on; None: none does.

    Raises CheckpointError, DeviceError.
    """
    if not config.draft_model:
        return None
    if loaded.runner.device.type != "cpu" or not isinstance(loaded.runner, TorchRunner):
        raise DeviceError("--draft-model is for CPUs only; leave it out, or use --device cpu.")
    path, weights = Path(config.draft_model), loaded.weights
    own = EngineConfig(
        model_path=config.draft_model, device=config.device, backend=config.backend, threads=config.threads
    )
    draft = load_weights(None, own, None)
    if draft.vocab != weights.vocab:
        raise CheckpointError(
            f"--draft-model {path} has {draft.vocab:,} tokens and {weights.name} has {weights.vocab:,}; name "
            "a model with the same vocabulary, or leave it out."
        )
    ids: Tensor | None = None
    if unpack.is_packed(path):  # what has no row of its own there is never guessed: that takes less time
        ids = unpack.known(path)
        tensors = {**draft.tensors, "head.weight": draft.tensors["head.weight"][ids]}
        draft = replace(draft, tensors=tensors, parameters=sum(t.numel() for t in tensors.values()))
    runner = backends.create_runner(draft, find_devices(config.device), own)
    model = torch_model_of(runner)
    assert model and isinstance(runner, TorchRunner)
    made = DraftModel(runner, model, ids)
    loaded.runner.beside_slot = made.slot_bytes
    return made


class Guess(NamedTuple):
    """What a row may draw next, by its draft model."""

    token: int
    chance: float  # that the draft model gives it


class DraftModel:
    """Guesses for rows in slots, several rows in one pass. For the engine's thread.

    A slot has a state behind tokens that are known, and a copy of it that goes on behind guesses. So what is
    refused has to be taken back nowhere, and the tokens that come in its place are read together.
    """

    def __init__(self, runner: TorchRunner, model: TorchModel, ids: Tensor | None = None) -> None:
        """model: that of the runner. ids: `[rows of the head]`, of which each is the row; None: in order."""
        self.checkpoint, self._runner, self._model = model.checkpoint, runner, model
        self._ids = None if ids is None else ids.to(model.device)

    @property
    def slot_bytes(self) -> int:
        """What both states of a slot take."""
        shape = self.checkpoint
        return 2 * slot_bytes(shape.layers, shape.width, self._runner.dtype, torch.float32)

    @property
    def weight_bytes(self) -> int:
        return self.checkpoint.bytes_held(self._runner.dtype.itemsize)

    def allocate(self, slots: int) -> None:
        """Make the states of so many slots. Raises RuntimeError when memory runs out here."""
        self._slots = slots
        self._states = self._model.new_states(2 * slots)

    def begin(self, slot: int) -> None:
        """Another row has the slot, of which no token is known yet."""
        self._states.clear([slot])

    def read(self, tokens: Mapping[int, Sequence[int]]) -> None:
        """These are known in these slots."""
        self._feed(tokens, {}, draws=False)

    def first(
        self, tokens: Mapping[int, Sequence[int]], masks: Mapping[int, np.ndarray] | None = None
    ) -> dict[int, Guess]:
        """These, at least one, are known in these slots; what comes next in each.

        masks: of some slots, `[words]` as in RowMasks; a token that is left out is none to guess.
        """
        return self._feed(tokens, masks or {})

    def further(
        self,
        guessed: Mapping[int, int],
        masks: Mapping[int, np.ndarray] | None = None,
        begin: bool = False,
    ) -> dict[int, Guess]:
        """These tokens were guessed last in these slots; what comes next in each.

        begin: they are the first guesses.
        """
        if begin:
            self._states.copy({self._slots + slot: slot for slot in guessed})
        copies = {self._slots + slot: [token] for slot, token in guessed.items()}
        found = self._feed(copies, {self._slots + slot: mask for slot, mask in (masks or {}).items()})
        return {slot - self._slots: guess for slot, guess in found.items()}

    @torch.inference_mode()
    def _feed(
        self, tokens: Mapping[int, Sequence[int]], masks: Mapping[int, np.ndarray], draws: bool = True
    ) -> dict[int, Guess]:
        self._runner.take_threads()
        slots, pieces = list(tokens), list(tokens.values())
        known = torch.tensor([token for piece in pieces for token in piece])
        wanted = None if draws else ()
        logits = self._model.forward(known, [len(piece) for piece in pieces], slots, self._states, wanted)
        if not draws:
            return {}
        for place, slot in enumerate(slots):
            if (mask := masks.get(slot)) is not None:
                logits[place].masked_fill_(~self._allowed(mask, logits.shape[1]), -torch.inf)
        best, rows = logits.max(1)
        chances = (best - logits.logsumexp(1)).exp().nan_to_num(0.0)
        found = rows if self._ids is None else self._ids[rows]
        return dict(zip(slots, map(Guess, found.tolist(), chances.tolist()), strict=True))

    def _allowed(self, mask: np.ndarray, rows: int) -> Tensor:
        """Of each row of the head, whether its token may come."""
        count = rows if self._ids is None else self.checkpoint.vocab
        bits = np.unpackbits(mask.view(np.uint8), count=count, bitorder="little")
        allowed = torch.from_numpy(bits.view(np.bool_)).to(self._model.device)
        return allowed if self._ids is None else allowed[self._ids]
