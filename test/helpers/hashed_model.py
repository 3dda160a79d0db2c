"""A model whose state is a hash of all tokens, and whose draws follow from it; and its runner.

So each text says what its row has seen: one token too many, too few or another one, a state of another
session, a draw with another seed, and the text is another one.
"""

import hashlib
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import torch

from rwkv_batch.model.checkpoint import Checkpoint
from rwkv_batch.ops.low_rank import LowRankAdapter
from rwkv_batch.runner.limits import RunnerLimits
from rwkv_batch.runner.protocol import LAST, Batch, Draws, DrawUnder, KnownDraws, NewRow
from rwkv_batch.sampling.masks import RowMasks
from rwkv_batch.state.slots import DeviceStates

BEGINNING = bytes(16)
LETTERS = [*range(98, 102)] * 7  # ids of "a" to "d"
STOP_IDS = [61, 62, 63]  # of "<", "=" and ">", where a request has them as such
IDS = [*LETTERS, *STOP_IDS, 33]
FINITE = int.from_bytes(b"\xff\xbf" * 8, "little")  # as numbers of 16 bits these bits are finite
NONSENSE = 1  # drawn for rows that had finished


def after(state: bytes, tokens: Iterable[int]) -> bytes:
    """The state after these tokens."""
    for token in tokens:
        digest = hashlib.blake2b(state + token.to_bytes(4, "little"), digest_size=16).digest()
        state = (int.from_bytes(digest, "little") & FINITE).to_bytes(16, "little")
    return state


class Seed(NamedTuple):
    """What a row draws with, beside its state."""

    seed: int
    stream: int


def draw(state: bytes, seed: Seed, number: int) -> int:
    """The token that a row draws as its `number`th, from 0."""
    text = f"{seed.seed} {seed.stream} {number}".encode()
    return IDS[hashlib.blake2b(state + text, digest_size=1).digest()[0] % len(IDS)]


class HashRunner:
    """A runner of that model. `late`: draws are known after the next step only, as on a GPU."""

    dtype = torch.float16
    device = torch.device("cpu")
    devices = (device,)
    limits = RunnerLimits(rows=4, prefill_tokens=32, memory=1 << 30, idle_divisor=2)

    def __init__(self, checkpoint: Checkpoint, late: bool, most_steps: int) -> None:
        self.checkpoint = checkpoint
        self.run_ahead_stop_ids = len(STOP_IDS) if late else 0
        self.most_steps = most_steps if late else 1

    def bytes_needed(self, rows: int, idle_slots: int, prefill_tokens: int) -> int:
        return rows + idle_slots

    def allocate(self, rows: int, idle_slots: int, prefill_tokens: int, late: bool = False) -> None:
        slots = rows + idle_slots
        self.states = DeviceStates(slots, 1, 64, torch.float16, torch.float16)
        self._hashes = self.states.memory.numpy()[:, :16]
        self._seeds = [Seed(0, 0)] * slots
        self._numbers, self._last = [0] * slots, [NONSENSE] * slots
        self._stops = [frozenset[int]()] * slots

    def improve(self, idle: bool) -> bool:
        return False

    def begin(self, slot: int, row: NewRow) -> None:
        self._seeds[slot], self._numbers[slot] = Seed(row.seed, row.stream), len(row.drawn)
        self._stops[slot] = frozenset(row.stop_ids)

    def load_adapter(self, slot: int, adapter: LowRankAdapter) -> None:
        raise AssertionError("no request of a simulated history has an adapter")

    def run(self, batch: Batch) -> Draws:
        return KnownDraws([token for _ in range(batch.steps) for token in self._step(batch)])

    def feed(self, batch: Batch) -> DrawUnder:
        drawn = self._step(batch)

        def known(masks: RowMasks) -> Draws:
            return KnownDraws(drawn)

        return known

    def _step(self, batch: Batch) -> list[int]:
        assert len({*batch.slots}) == len(batch.slots), "two rows have one slot"
        alive, place = dict[int, int](), 0
        for row, (slot, count) in enumerate(zip(batch.slots, batch.counts, strict=True)):
            piece = batch.tokens[place : place + count]
            place += count
            if piece == [LAST]:
                assert self.run_ahead_stop_ids
                piece = [] if self._last[slot] in self._stops[slot] else [self._last[slot]]
            assert LAST not in piece
            if piece:
                self._hashes[slot] = list(after(self._hashes[slot].tobytes(), piece))
                alive[row] = slot
        return [self._draw(alive[row]) if row in alive else NONSENSE for row in batch.draws]

    def _draw(self, slot: int) -> int:
        token = draw(self._hashes[slot].tobytes(), self._seeds[slot], self._numbers[slot])
        self._last[slot] = token
        self._numbers[slot] += 1
        return token


def text_after(
    state: bytes,
    seed: Seed,
    most: int,
    stop_ids: Collection[int],
    stops: Sequence[str],
) -> tuple[str, str]:
    """The text that follows, and why it ends: the rule of all servers, written plainly."""
    text = ""
    for number in range(most):
        token = draw(state, seed, number)
        if token in stop_ids:
            return text, "stop"
        text += chr(token - 1)
        ends = [text.find(stop) for stop in stops if stop in text]
        if ends:
            return text[: min(ends)], "stop"
        state = after(state, [token])
    return text, "length"


def ids_of(text: str) -> list[int]:
    """Of a text of such draws: every letter is one token."""
    return [ord(letter) + 1 for letter in text]
