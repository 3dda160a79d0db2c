"""Drawing the next token: every row with its own method, parameters, penalties and random numbers.

First, whatever the method: NaN becomes 0, an infinity the largest finite number; ids without text cannot be
drawn; logit_bias is added, penalties are subtracted (penalties.py). Temperatures are kept within 0.001 to
1000. Then the method draws:

- "rapid": p is the softmax of logits / temperature. top_k and top_p cut together, both measured on that same
  p: what stays are the tokens likelier than a threshold, which is the largest one at which either top_k
  tokens or a mass of top_p are in. Of the tokens exactly at the threshold, just the share stays that fills
  whichever limit binds. So the kept mass is exactly top_p, and ties at rank top_k share what is left of it.
- "nucleus": top_k first, ties at its rank all stay; p is the softmax of what stays. Then a token stays if the
  tokens likelier than it hold less than top_p, so the one that crosses top_p stays in full. FlashInfer draws
  from the same distribution, for rows without a seed of their own.
- "gumbel": the softmax of logits / temperature; top_k, top_p and the alphas do not count. It is the
  distribution of the largest logit after Gumbel noise, drawn with one random number.
- "noise": the largest of logits / temperature + u, where u is uniform in [0, noise) for each token; nothing
  else counts.

A temperature <= 0 takes the likeliest token instead, the lowest id of several, except that "noise" then has a
temperature of 1. So do top_p == 0 and top_k == 1 where these count, and noise <= 0.

The arithmetic runs on the host, a row at a time: a row of logits fits in the cache of a core, and a slow row
delays no other path.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rwkv_batch.sampling import flashinfer, reference
from rwkv_batch.sampling import params as parameters
from rwkv_batch.sampling.params import Parameters
from rwkv_batch.sampling.penalties import Penalties
from rwkv_batch.sampling.random import random_key, uniforms
from rwkv_batch.sampling.reference import LARGEST, draw
from rwkv_batch.text.tokenizer import VOCABULARY
from rwkv_batch.wire.protocol import Sampling


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
        self._draw_on_device = flashinfer.load(self.device)

    def check(self, params: Sampling) -> None:
        """Raises what params.check does."""
        parameters.check(params, self.width)

    def set_row(self, slot: int, params: Sampling, seed: int, stream: int) -> None:
        """A new row begins in `slot`, with nothing drawn yet. `stream` tells rows with the same seed apart.
        Raises what `check` does.
        """
        self.check(params)
        how = Parameters.of(params, self.vocab)
        self._rows[slot] = _Row(how, None if how.penalties is None else Penalties(how.penalties))
        self._keys[slot] = random_key(seed, stream)
        self._positions[slot] = 0

    def sample(self, logits: torch.Tensor, slots: Sequence[int]) -> list[int]:
        """One token for each of `slots`, from logits [len(slots), vocab] fp32, which may be changed. A slot
        comes at most once.

        Records each token for its row's penalties. Raises ValueError for a slot in which no row has begun.
        """
        rows = [self._row(slot) for slot in slots]
        logits = logits.detach()[:, : self.vocab]
        index = np.asarray(slots, np.intp)
        keys, positions = self._keys[index], self._positions[index]
        self._positions[index] += np.uint64(1)
        if self.device.type != "cpu" and all(
            row.how.greedy and row.how.bias is None and row.penalties is None for row in rows
        ):
            return logits.nan_to_num(0.0, LARGEST, -LARGEST).argmax(1).tolist()
        tokens = self._sample_on_device(logits, rows)
        rest = [i for i in range(len(rows)) if i not in tokens]
        if rest:
            host = (logits[rest] if tokens else logits).cpu().numpy()
            uniform = uniforms(keys, positions)
            with np.errstate(over="ignore", under="ignore"):  # weights of unlikely tokens vanish, and may
                for values, i in zip(host, rest, strict=True):
                    tokens[i] = rows[i].draw(values, float(uniform[i]), keys[i], positions[i], self._weights)
        for i, row in enumerate(rows):
            if row.penalties is not None:
                row.penalties.record(tokens[i])
        return [tokens[i] for i in range(len(rows))]

    def _sample_on_device(self, logits: torch.Tensor, rows: "list[_Row]") -> dict[int, int]:
        """Place among `rows` -> token, for those that need not come to the host."""
        places = [
            i
            for i, row in enumerate(rows)
            if row.how.method == "nucleus" and not row.how.seeded and not row.how.greedy
        ]
        if self._draw_on_device is None or not places:
            return {}
        chosen = [rows[i] for i in places]
        changes = [
            (place, ids, amounts) for place, row in enumerate(chosen) for ids, amounts in row.changes()
        ]
        tokens = flashinfer.sample(
            self._draw_on_device,
            logits[places],
            changes,
            [row.how.temperature for row in chosen],
            [row.how.top_k for row in chosen],
            [row.how.top_p for row in chosen],
        )
        return dict(zip(places, tokens, strict=True))

    def _row(self, slot: int) -> "_Row":
        row = self._rows[slot]
        if row is None:
            raise ValueError(f"No row has begun in slot {slot}; call set_row first.")
        return row


@dataclass
class _Row:
    how: Parameters
    penalties: Penalties | None

    def changes(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """What the logits change by before the method draws, in order: ids, each at most once, and amounts to
        add.
        """
        changes = [] if self.how.bias is None else [self.how.bias]
        if self.penalties is not None:
            ids, amounts = self.penalties.amounts()
            changes.append((ids, -amounts))
        return changes

    def draw(
        self, logits: np.ndarray, uniform: float, key: np.uint64, position: np.uint64, scratch: np.ndarray
    ) -> int:
        """One token from logits [vocab], which may be changed; `scratch` [vocab] fp32 is overwritten."""
        for ids, amounts in self.changes():
            logits[ids] = reference.sanitise(logits[ids]) + amounts
        how = self.how
        if how.greedy:
            return reference.likeliest(logits)
        if how.method == "noise":
            return reference.draw_noisy(logits, how.temperature, how.noise, key, position)
        if how.method == "nucleus":
            return reference.draw_nucleus(logits, how.temperature, how.top_k, how.top_p, uniform, scratch)
        return draw(logits, how.temperature, how.top_k, how.top_p, uniform, scratch)
