"""The sampler on the host: every row with its own method, parameters, penalties and random numbers.

First, for every method: where a logit is NaN or infinity, or all that could be drawn are -infinity, the row
draws reference.BROKEN instead of a token. Ids without text cannot be drawn; the repetition penalty divides,
logit_bias is added, penalties are subtracted (penalties.py); ids that the row's mask leaves out cannot be
drawn either. Temperatures are kept within 0.001 to 1000. Then, unless the method is "noise", min_p and top_a
leave out what is unlikely beside the likeliest token, both measured on the softmax of logits / temperature.
The method draws among what is left:

- "rapid": p is the softmax of logits / temperature. top_k and top_p cut together, both measured on that same
  p: what stays are the tokens likelier than a threshold, which is the largest one at which either top_k
  tokens or a mass of top_p are in. Of the tokens exactly at the threshold, just the share stays that fills
  whichever limit binds. So the kept mass is exactly top_p, and ties at rank top_k share what is left of it.
- "nucleus": top_k first, ties at its rank all stay; p is the softmax of what stays. Then a token stays if the
  tokens likelier than it hold less than top_p, so the one that crosses top_p stays in full.
- "gumbel": the softmax of logits / temperature; top_k, top_p and the alphas do not count. It is the
  distribution of the largest logit after Gumbel noise, drawn with one random number.
- "noise": the largest of logits / temperature + u, where u is uniform in [0, noise) for each token; nothing
  else counts.

A temperature <= 0 takes the likeliest token instead, the lowest id of several, except that "noise" then has a
temperature of 1. So do top_p == 0 and top_k == 1 where these count, and noise <= 0.

reference.py has the methods themselves, a row at a time: a row of logits fits in the cache of a core, and a
slow row delays no other path.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rwkv_batch.ops.random import random_key, uniforms
from rwkv_batch.sampling import reference
from rwkv_batch.sampling.masks import RowMasks
from rwkv_batch.sampling.params import RowSampling, drawable
from rwkv_batch.sampling.penalties import Penalties
from rwkv_batch.wire.protocol import Sampling


class Sampler:
    """Draws tokens for rows that live in slots. Not thread-safe."""

    def __init__(self, slots: int, vocab: int, device: torch.device | str) -> None:
        """`vocab` is the width of the logits, `device` where they are."""
        self.width = vocab
        self.vocab = drawable(vocab)
        self.device = torch.device(device)
        self._rows: list[_HostRow | None] = [None] * slots
        self._keys = np.zeros(slots, np.uint64)
        self._positions = np.zeros(slots, np.uint64)
        self._weights = np.empty(self.vocab, np.float32)

    def begin(
        self,
        slot: int,
        sampling: Sampling,
        seed: int,
        stream: int,
        drawn: Sequence[int] = (),
        prompt: Sequence[int] = (),
    ) -> None:
        """Begin a row in `slot`. `stream` distinguishes rows with the same seed.

        `drawn`: what the row has drawn already; it goes on as if it had drawn that here. `prompt` counts for
        the repetition penalty. Raises ValueError as `params.check` does.
        """
        of_row = RowSampling.from_sampling(sampling, self.width)
        penalties = None if of_row.penalties is None else Penalties(of_row.penalties, drawn)
        seen = None
        if of_row.repetition != 1:
            seen = np.zeros(self.vocab, bool)
            seen[[token for token in (*prompt, *drawn) if token < self.vocab]] = True
        self._rows[slot] = _HostRow(of_row, penalties, seen)
        self._keys[slot] = random_key(seed, stream)
        self._positions[slot] = len(drawn)

    def sample(self, logits: torch.Tensor, slots: Sequence[int], masks: RowMasks | None = None) -> list[int]:
        """One token for each of `slots`, from logits `[len(slots), vocab]` fp32, which may be changed.

        BROKEN for a row whose logits are not finite, for which nothing is recorded.
        `masks`: what some of these rows may draw, by their places. A slot comes at most once. Each token is
        recorded for its row's penalties. Raises ValueError for a slot in which no row has begun.
        """
        rows = [self._row(slot) for slot in slots]
        logits = logits.detach()[:, : self.vocab]
        index = np.asarray(slots, np.intp)
        keys, positions = self._keys[index], self._positions[index]
        self._positions[index] += np.uint64(1)
        masked = masks.ids(self.vocab) if masks and masks.places else {}
        if self.device.type != "cpu" and not masked and all(row.likeliest_wins for row in rows):
            likeliest = logits.argmax(1, keepdim=True)
            finite = logits.gather(1, likeliest).isfinite()
            return likeliest.where(finite, reference.BROKEN).squeeze(1).tolist()
        draws = zip(rows, logits.cpu().numpy(), uniforms(keys, positions), keys, positions, strict=True)
        with np.errstate(
            over="ignore", under="ignore", invalid="ignore"
        ):  # weights of unlikely tokens vanish, and may
            return [
                row.draw(values, float(uniform), key, position, self._weights, masked.get(place))
                for place, (row, values, uniform, key, position) in enumerate(draws)
            ]

    def _row(self, slot: int) -> "_HostRow":
        row = self._rows[slot]
        if row is None:
            raise ValueError(f"No row has begun in slot {slot}; call begin first.")
        return row


@dataclass
class _HostRow:
    sampling: RowSampling
    penalties: Penalties | None
    seen: np.ndarray | None = None  # [vocab] bool: ids of the prompt and the answer, where they count

    @property
    def likeliest_wins(self) -> bool:
        """Whether the row takes the largest of its logits as they are."""
        changed = self.sampling.bias is not None or self.penalties is not None or self.seen is not None
        return self.sampling.greedy and not changed

    def draw(
        self,
        logits: np.ndarray,
        uniform: float,
        key: np.uint64,
        position: np.uint64,
        scratch: np.ndarray,
        allowed: np.ndarray | None = None,
    ) -> int:
        """Draw and record one token from logits `[vocab]`; these and `scratch` `[vocab]` are changed.

        allowed: the ids that a mask leaves, ascending.
        """
        sampling = self.sampling
        hides_broken = allowed is not None or not sampling.likelihood.off
        if hides_broken and reference.is_broken(float(logits.max())):
            return reference.BROKEN
        if self.seen is not None:
            reference.divide_repeated(logits, np.flatnonzero(self.seen), sampling.repetition)
        if sampling.bias is not None:
            reference.add(logits, *sampling.bias)
        if self.penalties is not None:
            ids, amounts = self.penalties.amounts()
            reference.add(logits, ids, -amounts)
        token = self._choose(logits, uniform, key, position, scratch, allowed)
        if token == reference.BROKEN:
            return token
        if self.penalties is not None:
            self.penalties.record(token)
        if self.seen is not None:
            self.seen[token] = True
        return token

    def _choose(
        self,
        logits: np.ndarray,
        uniform: float,
        key: np.uint64,
        position: np.uint64,
        scratch: np.ndarray,
        allowed: np.ndarray | None,
    ) -> int:
        sampling = self.sampling
        if sampling.method == "noise" and not sampling.greedy:  # its random numbers go by id
            if allowed is not None:
                others = np.ones(len(logits), bool)
                others[allowed] = False
                logits[others] = -np.inf
            return reference.draw_noisy(logits, sampling.temperature, sampling.noise, key, position)
        left = allowed
        if not sampling.likelihood.off:
            left = reference.remaining(logits, allowed, sampling.temperature, sampling.likelihood)
        values = logits if left is None else logits[left]
        if sampling.greedy:
            place = reference.likeliest(values)
        else:
            draw = reference.draw_nucleus if sampling.method == "nucleus" else reference.draw
            top_k = min(sampling.top_k, len(values))
            place = draw(values, sampling.temperature, top_k, sampling.top_p, uniform, scratch[: len(values)])
        return place if left is None or place == reference.BROKEN else int(left[place])
