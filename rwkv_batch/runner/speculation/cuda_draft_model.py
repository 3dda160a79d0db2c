"""A draft model over the kernels for GPUs, whose passes are queued one behind the other.

A pass of one token a row is a CUDA graph with the choice of the likeliest token, which is the token that the
next pass is fed. So the host queues as many passes as are wanted, and waits once for all their guesses.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rwkv_batch.model.checkpoint import Checkpoint
from rwkv_batch.model.cuda.cuda_model import CudaModel
from rwkv_batch.model.cuda.steps.graphs import DECODE_LAYER_NODES, NODE_BYTES, GraphLadder, decode_sizes
from rwkv_batch.model.cuda.steps.verify import MOST_ROWS
from rwkv_batch.ops.cuda.inputs.packing import NO_SLOT
from rwkv_batch.ops.cuda.inputs.staging import Download, upload
from rwkv_batch.runner.speculation.draft_model import Guess, Masks, allowed_rows

PLACES = 2 * MOST_ROWS  # rows that have states: those of a step, and as many that had guesses lately
GRAPH_TOKENS = 64 + MOST_ROWS  # of rows that read, in a step that has a graph
MOST_TOKENS = 256 + MOST_ROWS  # of a step
LOGITS_COPIES = 3  # fp32 rows of logits that a pass holds at once beside its own in fp16
WKV = torch.float16  # of states: what is rounded may cost a guess, and no text


class CudaDraftModel:
    """The draft model of a runner on a GPU, with states for the rows that had guesses last; see DraftModel.

    Only steps of few rows have drafts, so there are few states, however many slots the runner has. All calls
    belong on the stream of that runner.
    """

    def __init__(self, model: CudaModel[Any, Any], most: int, ids: Tensor | None = None) -> None:
        """most: passes that are queued together, at most. ids: as of TorchDraftModel."""
        self.most_chained, self._model, self._device = max(most, 1), model, model.device
        self._ids = None if ids is None else ids.to(model.device)
        # Rows of the head that are no padding.
        self._head = model.checkpoint.vocab if ids is None else len(ids)
        self._places = OrderedDict[int, int]()  # of slots whose rows have states, those asked for last behind

    @property
    def checkpoint(self) -> Checkpoint:
        return self._model.checkpoint

    @property
    def weight_bytes(self) -> int:
        return self.checkpoint.bytes_held(self._model.dtype.itemsize)

    @property
    def bytes_needed(self) -> int:
        """The most that is held beside the weights, whatever the number of slots."""
        logits = MOST_ROWS * len(self._model.weights.head) * (2 * 2 + LOGITS_COPIES * 4)
        graphs = len(decode_sizes(MOST_ROWS)) * self.checkpoint.layers * DECODE_LAYER_NODES * NODE_BYTES
        return self.state_bytes(PLACES) + self._model.step_bytes(MOST_ROWS, MOST_TOKENS) + logits + graphs

    def state_bytes(self, slots: int) -> int:
        return 2 * PLACES * self._model.slot_bytes(WKV)

    @torch.inference_mode()
    def allocate(self, slots: int) -> None:
        with torch.cuda.device(self._device):
            # Behind the places as many, of the copies that go on behind guesses.
            self._states = self._model.new_states(2 * PLACES, WKV)
            head = len(self._model.weights.head)
            logits = torch.empty(MOST_ROWS, head, dtype=self._model.dtype, device=self._device)
            padding = torch.tensor([[0], [NO_SLOT]], dtype=torch.int32, device=self._device)
            self._passes: GraphLadder[Tensor, Tensor] = GraphLadder(
                "guess",
                decode_sizes(MOST_ROWS),
                lambda size: padding.repeat(1, size),
                partial(self._pass, logits),
                {},
            )
            self._model.capture(self._states, MOST_ROWS, most_tokens=GRAPH_TOKENS, more=[self._passes])

    def holds(self, slot: int) -> bool:
        if slot in self._places:
            self._places.move_to_end(slot)
        return slot in self._places

    @torch.inference_mode()
    def begin(self, slot: int) -> None:
        if not self.holds(slot):
            lost = len(self._places) == PLACES
            self._places[slot] = self._places.popitem(last=False)[1] if lost else len(self._places)
        with torch.cuda.device(self._device):
            self._states.clear([self._places[slot]])

    @torch.inference_mode()
    def read(self, tokens: Mapping[int, Sequence[int]]) -> None:
        with torch.cuda.device(self._device):
            self._run({self._places[slot]: piece for slot, piece in tokens.items()}, ())

    @torch.inference_mode()
    def first(
        self, tokens: Mapping[int, Sequence[int]], masks: Masks | None = None, passes: int = 1
    ) -> dict[int, list[Guess]]:
        with torch.cuda.device(self._device):
            places = [self._places[slot] for slot in tokens]
            logits = self._run(dict(zip(places, tokens.values(), strict=True)))
            made = [self._likeliest(self._masked(logits, list(tokens), masks))]
            if passes > 1:
                self._states.copy({PLACES + place: place for place in places})
                made += self._chained(made[0], [PLACES + place for place in places], passes - 1)
            return _guesses(list(tokens), torch.stack(made))

    @torch.inference_mode()
    def further(
        self, guessed: Mapping[int, int], masks: Masks | None = None, begin: bool = False
    ) -> dict[int, list[Guess]]:
        with torch.cuda.device(self._device):
            places = {slot: self._places[slot] for slot in guessed}
            if begin:
                self._states.copy({PLACES + place: place for place in places.values()})
            logits = self._run({PLACES + places[slot]: [token] for slot, token in guessed.items()})
            found = self._likeliest(self._masked(logits, list(guessed), masks))
            return _guesses(list(guessed), found[None])

    def _run(self, tokens: Mapping[int, Sequence[int]], logits_of: Sequence[int] | None = None) -> Tensor:
        """Queue these tokens of places. Logits `[rows, vocab]` fp16, which the next run overwrites."""
        together, lengths = [token for piece in tokens.values() for token in piece], map(len, tokens.values())
        return self._model.run(together, list(lengths), list(tokens), self._states, logits_of)[0]

    def _masked(self, logits: Tensor, slots: list[int], masks: Masks | None) -> Tensor:
        """Logits without what masks leave out."""
        for place, slot in enumerate(slots):
            if masks and (mask := masks.get(slot)) is not None:
                allowed = allowed_rows(mask, self._head, self.checkpoint.vocab, self._ids).to(self._device)
                logits[place, : self._head].masked_fill_(~allowed, -torch.inf)
        return logits

    def _likeliest(self, logits: Tensor) -> Tensor:
        """What comes next behind each, and with what chance: `[2, rows]` fp32, which holds any id."""
        chances, rows = torch.softmax(logits[:, : self._head], 1, dtype=torch.float32).max(1)
        return torch.stack((rows if self._ids is None else self._ids[rows], chances))

    def _chained(self, first: Tensor, places: list[int], passes: int) -> list[Tensor]:
        """Queue so many passes behind the first guesses `[2, rows]`; what each guesses, as `_likeliest`."""
        inputs, queue = self._passes.take(len(places))
        padding = [NO_SLOT] * (inputs.shape[1] - len(places))
        inputs[1].copy_(upload([*places, *padding], self._device, torch.int32), non_blocking=True)
        inputs[0, : len(places)].copy_(first[0], non_blocking=True)
        return [queue()[:, : len(places)].clone() for _ in range(passes)]

    def _pass(self, logits: Tensor, inputs: Tensor, arena: dict[str, Tensor]) -> Tensor:
        """Launch a pass over tokens and places `[2, size]`; its guesses are the tokens of the next one."""
        of_pass = logits[: inputs.shape[1]]
        self._model.decode(inputs[0], inputs[1], self._states, of_pass, arena)
        found = self._likeliest(of_pass)
        inputs[0].copy_(found[0])
        return found


def _guesses(slots: list[int], made: Tensor) -> dict[int, list[Guess]]:
    """By slot, in order. made: `[passes, 2, rows]`, on the device."""
    found = np.nan_to_num(Download(made).wait().numpy())
    return {
        slot: [Guess(int(token), float(chance)) for token, chance in found[:, :, row]]
        for row, slot in enumerate(slots)
    }
