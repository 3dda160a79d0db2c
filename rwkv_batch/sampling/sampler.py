"""The sampler on the host: every row with its own method, parameters, penalties and random numbers.

First, for every method: NaN becomes 0, an infinity the largest finite number; ids without text cannot be
drawn; logit_bias is added, penalties are subtracted (penalties.py). Temperatures are kept within 0.001 to
1000. Then the method draws:

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
from rwkv_batch.sampling.params import RowParameters, drawable
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

    def begin(self, slot: int, params: Sampling, seed: int, stream: int, drawn: Sequence[int] = ()) -> None:
        """Begin a row in `slot`. `stream` distinguishes rows with the same seed.

        `drawn`: what the row has drawn already; it goes on as if it had drawn that here. Raises ValueError as
        `params.check` does.
        """
        how = RowParameters.from_sampling(params, self.width)
        penalties = None if how.penalties is None else Penalties(how.penalties, drawn)
        self._rows[slot] = _HostRow(how, penalties)
        self._keys[slot] = random_key(seed, stream)
        self._positions[slot] = len(drawn)

    def sample(self, logits: torch.Tensor, slots: Sequence[int]) -> list[int]:
        """One token for each of `slots`, from logits `[len(slots), vocab]` fp32, which may be changed.

        A slot comes at most once. Each token is recorded for its row's penalties. Raises ValueError for a
        slot in which no row has begun.
        """
        rows = [self._row(slot) for slot in slots]
        logits = logits.detach()[:, : self.vocab]
        index = np.asarray(slots, np.intp)
        keys, positions = self._keys[index], self._positions[index]
        self._positions[index] += np.uint64(1)
        if self.device.type != "cpu" and all(row.likeliest_wins for row in rows):
            return logits.nan_to_num(0.0, reference.LARGEST, -reference.LARGEST).argmax(1).tolist()
        draws = zip(rows, logits.cpu().numpy(), uniforms(keys, positions), keys, positions, strict=True)
        with np.errstate(over="ignore", under="ignore"):  # weights of unlikely tokens vanish, and may
            return [
                row.draw(values, float(uniform), key, position, self._weights)
                for row, values, uniform, key, position in draws
            ]

    def _row(self, slot: int) -> "_HostRow":
        row = self._rows[slot]
        if row is None:
            raise ValueError(f"No row has begun in slot {slot}; call begin first.")
        return row


@dataclass
class _HostRow:
    how: RowParameters
    penalties: Penalties | None

    @property
    def likeliest_wins(self) -> bool:
        """Whether the row takes the largest of its logits as they are."""
        return self.how.greedy and self.how.bias is None and self.penalties is None

    def draw(
        self, logits: np.ndarray, uniform: float, key: np.uint64, position: np.uint64, scratch: np.ndarray
    ) -> int:
        """Draw and record one token from logits `[vocab]`; these and `scratch` `[vocab]` are changed."""
        how = self.how
        if how.bias is not None:
            _add(logits, *how.bias)
        if self.penalties is not None:
            ids, amounts = self.penalties.amounts()
            _add(logits, ids, -amounts)
        if how.greedy:
            token = reference.likeliest(logits)
        elif how.method == "noise":
            token = reference.draw_noisy(logits, how.temperature, how.noise, key, position)
        else:
            draw = reference.draw_nucleus if how.method == "nucleus" else reference.draw
            token = draw(logits, how.temperature, how.top_k, how.top_p, uniform, scratch)
        if self.penalties is not None:
            self.penalties.record(token)
        return token


def _add(logits: np.ndarray, ids: np.ndarray, amounts: np.ndarray) -> None:
    """Add to the logits of `ids`, each of which comes at most once."""
    logits[ids] = reference.sanitise(logits[ids]) + amounts
