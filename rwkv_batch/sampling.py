"""Drawing the next token: every row with its own parameters, penalties and random numbers.

One draw from a row's logits:

1. NaN becomes 0, an infinity the largest finite number; ids without text cannot be drawn.
2. logit_bias is added, penalties are subtracted, then all is divided by the temperature; p is the softmax of that.
3. top_k and top_p cut together, both measured on that same p: what stays are the tokens likelier than a threshold, which is the
   largest one at which either top_k tokens or a mass of top_p are in. Of the tokens exactly at the threshold, just the share stays
   that fills whichever limit binds. So the kept mass is exactly top_p, and ties at rank top_k share what is left of it.
4. The token is drawn from the kept weights.

temperature <= 0, top_p == 0 and top_k == 1 take the likeliest token instead (the lowest id of several), after step 2.

The arithmetic runs on the host, a row at a time: a row of logits fits in the cache of a core, and a slow row delays no other path.
"""
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rwkv_batch.protocol import Sampling
from rwkv_batch.tokenizer import VOCABULARY

FLOATS = ("temperature", "top_p", "alpha_presence", "alpha_frequency", "alpha_decay", "presence_penalty", "frequency_penalty")
LARGEST = float(np.finfo(np.float32).max)
LIKELY = 1024  # top_p first looks at this many of the likeliest tokens; they nearly always hold its mass
BLOCK = 256    # weights are summed in blocks, then one block is searched: two short sums instead of a long one


class Sampler:
    """Draws tokens for rows that live in slots. Not thread-safe."""

    def __init__(self, slots: int, vocab: int, device: torch.device | str) -> None:
        """`vocab` is the width of the logits, `device` where they are."""
        self.width = vocab
        self.vocab = min(vocab, VOCABULARY)
        self.device = torch.device(device)
        self._rows: list[_Row | None] = [None] * slots
        self._keys = np.zeros(slots, np.uint64)
        self._positions = np.zeros(slots, np.uint64)
        self._weights = np.empty(self.vocab, np.float32)

    def check(self, params: Sampling) -> None:
        """Raises ValueError when a parameter is not a finite number, or logit_bias names an id that the logits do not have."""
        numbers = {name: getattr(params, name) for name in FLOATS} | {f"logit_bias of token {t}": v for t, v in params.logit_bias.items()}
        for name, number in numbers.items():
            if not math.isfinite(number):
                raise ValueError(f"{name} is {number}; give a finite number.")
        for token in params.logit_bias:
            if not 0 <= token < self.width:
                raise ValueError(f"logit_bias names token {token}; this model's tokens are 0 to {self.width - 1}.")

    def set_row(self, slot: int, params: Sampling, seed: int, stream: int) -> None:
        """A new row begins in `slot`, with nothing drawn yet. `stream` tells rows with the same seed apart. Raises what `check` does."""
        self.check(params)
        self._rows[slot] = _Row.of(params, self.vocab)
        self._keys[slot] = random_key(seed, stream)
        self._positions[slot] = 0

    def sample(self, logits: torch.Tensor, slots: Sequence[int]) -> list[int]:
        """One token for each of `slots`, from logits [len(slots), vocab] fp32, which may be changed. A slot comes at most once.

        Records each token for its row's penalties. Raises ValueError for a slot in which no row has begun.
        """
        rows = [self._row(slot) for slot in slots]
        logits = logits.detach()[:, : self.vocab]
        index = np.asarray(slots, np.intp)
        uniform = uniforms(self._keys[index], self._positions[index])
        self._positions[index] += np.uint64(1)
        if self.device.type != "cpu" and all(row.greedy and row.bias is None and row.penalties is None for row in rows):
            return logits.nan_to_num(0.0, LARGEST, -LARGEST).argmax(1).tolist()
        with np.errstate(over="ignore", under="ignore"):  # weights of unlikely tokens vanish, and may
            drawn = zip(rows, logits.cpu().numpy(), uniform.tolist(), strict=True)
            return [row.draw(values, u, self._weights) for row, values, u in drawn]

    def _row(self, slot: int) -> "_Row":
        row = self._rows[slot]
        if row is None:
            raise ValueError(f"No row has begun in slot {slot}; call set_row first.")
        return row


class Penalties:
    """What the tokens drawn so far take off the logits; kept for drawn ids only."""

    def __init__(self, params: Sampling) -> None:
        self._params = params
        self._places: dict[int, int] = {}      # id -> its place in the arrays below
        self._ids = np.zeros(64, np.int64)
        self._decaying = np.zeros(64)          # native: decays at each token
        self._counts = np.zeros(64)            # OpenAI: times drawn

    def apply(self, logits: np.ndarray) -> None:
        """Changes logits [vocab] in place."""
        size, params = len(self._places), self._params
        amounts = self._decaying[:size] + params.presence_penalty + params.frequency_penalty * self._counts[:size]
        _add(logits, self._ids[:size], -amounts)

    def record(self, token: int) -> None:
        """`token` has been drawn. A first time is told by the id, not by its penalty, so alpha_presence may be 0."""
        size, params = len(self._places), self._params
        place = self._places.setdefault(token, size)
        if size == len(self._ids):
            self._ids = np.resize(self._ids, 2 * size)
            self._decaying = np.resize(self._decaying, 2 * size)
            self._counts = np.resize(self._counts, 2 * size)
        self._decaying[:size] *= params.alpha_decay
        if place == size:
            self._ids[place], self._decaying[place], self._counts[place] = token, params.alpha_presence, 1
        else:
            self._decaying[place] += params.alpha_frequency
            self._counts[place] += 1


@dataclass
class _Row:
    """The parameters of a row, brought into the ranges in which step 2 and 3 hold as written."""

    greedy: bool
    temperature: float                              # 0.001 to 1000
    top_k: int                                      # 2 to vocab; vocab: off
    top_p: float                                    # 0 to 1; 1: off
    bias: tuple[np.ndarray, np.ndarray] | None      # ids, values
    penalties: Penalties | None

    @classmethod
    def of(cls, params: Sampling, vocab: int) -> "_Row":
        bias = {token: value for token, value in params.logit_bias.items() if token < vocab}  # the others cannot be drawn anyway
        penalised = params.alpha_presence or params.alpha_frequency or params.presence_penalty or params.frequency_penalty
        return cls(
            greedy=params.temperature <= 0 or params.top_p == 0 or params.top_k == 1,
            temperature=min(max(params.temperature, 0.001), 1000.0),
            top_k=params.top_k if 0 < params.top_k < vocab else vocab,
            top_p=params.top_p if 0 <= params.top_p <= 1 else 1.0,
            bias=(np.array(list(bias), np.int64), np.array(list(bias.values()))) if bias else None,
            penalties=Penalties(params) if penalised else None,
        )

    def draw(self, logits: np.ndarray, uniform: float, scratch: np.ndarray) -> int:
        """One token from logits [vocab], which may be changed; `scratch` [vocab] fp32 is overwritten."""
        if self.bias is not None:
            _add(logits, *self.bias)
        if self.penalties is not None:
            self.penalties.apply(logits)
        if self.greedy:
            token = int(logits.argmax())
            if not math.isfinite(logits[token]):
                token = int(_sanitise(logits).argmax())
        else:
            token = draw(logits, self.temperature, self.top_k, self.top_p, uniform, scratch)
        if self.penalties is not None:
            self.penalties.record(token)
        return token


def draw(logits: np.ndarray, temperature: float, top_k: int, top_p: float, uniform: float, scratch: np.ndarray) -> int:
    """Steps 3 and 4 for logits [vocab] fp32, with top_k in 1..vocab and 0 < top_p <= 1 and `uniform` in [0, 1)."""
    vocab = len(logits)
    top = float(logits.max())
    if not math.isfinite(top):
        top = float(_sanitise(logits).max())
    mass = math.inf  # that top_p leaves, on the scale where the likeliest token weighs 1
    if top_p < 1 or top_k == vocab:
        weights = np.subtract(logits, np.float32(top), out=scratch)
        weights *= np.float32(1 / temperature)
        np.exp(weights, out=weights)
        if top_p == 1:
            return _pick(weights, uniform)
        mass = top_p * float(weights.sum(dtype=np.float64))

    # The threshold is looked for among the likeliest tokens only, as many as it takes.
    for size in (top_k if top_p == 1 else min(LIKELY, top_k), top_k):
        likeliest = logits if size == vocab else np.partition(logits, vocab - size)[vocab - size :]
        likeliest = np.sort(likeliest)[::-1]
        masses = _weights(likeliest, top, temperature).cumsum()
        last = int(masses.searchsorted(mass))  # the first token with which the mass is in
        if last < size or size == top_k:
            break
    threshold = likeliest[min(last, size - 1)]

    kept = np.flatnonzero(logits >= threshold)
    values = logits[kept]
    weights = _weights(values, top, temperature)
    tied = values == threshold
    above = len(kept) - int(tied.sum())
    if above > 0:  # otherwise all that is left weighs the same
        share = float(top_k - above)
        if weights[tied][0] > 0:
            share = min(share, (mass - masses[above - 1]) / weights[tied][0])
        weights[tied] *= min(max(share / (len(kept) - above), 0.0), 1.0)
    return int(kept[_pick(weights, uniform)])


def _weights(values: np.ndarray, top: float, temperature: float) -> np.ndarray:
    """Unnormalised probabilities in fp64; a value of `top` weighs 1."""
    return np.exp((values.astype(np.float64) - top) / temperature)


def _pick(weights: np.ndarray, uniform: float) -> int:
    """The index at which the running sum of `weights` passes `uniform` of the whole; never one of weight 0. Sums are fp64."""
    blocks = np.add.reduceat(weights, np.arange(0, len(weights), BLOCK), dtype=np.float64).cumsum()
    point = uniform * blocks[-1]
    block = int(blocks.searchsorted(point, side="right"))
    if block > 0:
        point -= blocks[block - 1]
    sums = weights[block * BLOCK : (block + 1) * BLOCK].cumsum(dtype=np.float64)
    inside = int(sums.searchsorted(point, side="right"))
    last = int(sums.searchsorted(sums[-1]))  # rounding may carry `point` past the block's end
    return block * BLOCK + min(inside, last)


def _add(logits: np.ndarray, ids: np.ndarray, amounts: np.ndarray) -> None:
    logits[ids] = _sanitise(logits[ids]) + amounts


def _sanitise(logits: np.ndarray) -> np.ndarray:
    """In place."""
    return np.nan_to_num(logits, copy=False, nan=0.0, posinf=LARGEST, neginf=-LARGEST)


def random_key(seed: int, stream: int) -> np.uint64:
    """The key of a row's random numbers; `seed` and `stream` count modulo 2**64."""
    words = np.array([seed % 2**64, stream % 2**64], np.uint64)
    return _mix(_mix(words[:1]) + _step(words[1:]))[0]


def uniforms(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """The random number of each key (uint64) at each position (uint64): in [0, 1), 53 bits.

    It depends on nothing else, so what a seeded row draws does not depend on what runs beside it.
    """
    return (_mix(keys + _step(positions)) >> np.uint64(11)) * 2.0**-53


def _step(counts: np.ndarray) -> np.ndarray:
    """The increment of SplitMix64 after each of `counts` numbers."""
    return (counts + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)


def _mix(words: np.ndarray) -> np.ndarray:
    """The output function of SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators")."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def logprobs(logits: torch.Tensor, ids: Sequence[int], top: Sequence[int]) -> list[tuple[float, list[tuple[int, float]]]]:
    """For each row of logits [len(ids), vocab]: the logprob of its id, and (id, logprob) of its `top` likeliest ids, likeliest first.

    These are of the model's own distribution, over all of its vocabulary; ids without text are left out of the likeliest. Call it
    before `Sampler.sample`, which changes logits, or on a copy. The logits are left as they are.
    """
    logits = logits.detach().nan_to_num(0.0, LARGEST, -LARGEST)
    totals = logits.logsumexp(1).cpu().numpy()
    result = []
    for values, total, token, count in zip(logits.cpu().numpy(), totals, ids, top, strict=True):
        likeliest = _likeliest(values[:VOCABULARY], count)
        result.append((float(values[token] - total), [(int(i), float(values[i] - total)) for i in likeliest]))
    return result


def _likeliest(values: np.ndarray, count: int) -> np.ndarray:
    """The ids of the `count` largest values, largest first; of equal ones the lowest id first."""
    count = min(count, len(values))
    if count == 0:
        return np.empty(0, np.intp)
    kept = np.flatnonzero(values >= np.partition(values, len(values) - count)[len(values) - count])
    return kept[np.lexsort((kept, -values[kept]))][:count]
