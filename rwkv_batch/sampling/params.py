"""The sampling parameters of a request, checked and brought into the ranges of the methods."""

import math
from dataclasses import dataclass

import numpy as np

from rwkv_batch.sampling.penalties import PenaltyRule, rule_from_sampling
from rwkv_batch.text.tokenizer import VOCABULARY
from rwkv_batch.wire.protocol import Sampling

FLOATS = (
    "temperature",
    "top_p",
    "alpha_presence",
    "alpha_frequency",
    "alpha_decay",
    "presence_penalty",
    "frequency_penalty",
    "noise",
    "min_p",
    "top_a",
    "repetition_penalty",
)


def check(sampling: Sampling, width: int) -> None:
    """Raise ValueError if a parameter is not finite, or logit_bias names an id outside logits `[width]`."""
    numbers = {name: getattr(sampling, name) for name in FLOATS} | {
        f"logit_bias of token {t}": v for t, v in sampling.logit_bias.items()
    }
    for name, number in numbers.items():
        if not math.isfinite(number):
            raise ValueError(f"{name} is {number}; give a finite number.")
    if sampling.repetition_penalty <= 0:
        raise ValueError(f"repetition_penalty is {sampling.repetition_penalty}; give a number above 0.")
    for token in sampling.logit_bias:
        if not 0 <= token < width:
            raise ValueError(f"logit_bias names token {token}; this model's tokens are 0 to {width - 1}.")


@dataclass(frozen=True)
class LikelihoodLimits:
    """What leaves tokens out by their probability beside the likeliest one's; 0 switches a limit off."""

    min_p: float = 0.0  # tokens stay with at least this share of it
    top_a: float = 0.0  # with at least this share of its square

    @property
    def off(self) -> bool:
        """Whether all tokens stay."""
        return self.min_p <= 0 and self.top_a <= 0


def drawable(width: int) -> int:
    """How many ids can be drawn from logits `[width]`: the first ones, which have a text."""
    return min(width, VOCABULARY)


@dataclass(frozen=True)
class RowSampling:
    """What a row draws by; the rows of one request share it."""

    method: str
    greedy: bool
    seeded: bool
    temperature: float  # 0.001 to 1000
    top_k: int  # 1 to the drawable ids, which switches it off
    top_p: float  # 0 to 1; 1 switches it off
    noise: float
    bias: tuple[np.ndarray, np.ndarray] | None  # ids, amounts
    penalties: PenaltyRule | None
    likelihood: LikelihoodLimits = LikelihoodLimits()
    repetition: float = 1.0  # 1 switches it off

    @classmethod
    def from_sampling(cls, sampling: Sampling, width: int) -> "RowSampling":
        """For logits of `width` ids. Raises ValueError as `check` does."""
        check(sampling, width)
        vocab = drawable(width)
        bias = {token: amount for token, amount in sampling.logit_bias.items() if token < vocab}
        limited = sampling.method in ("rapid", "nucleus")
        noisy, temperature = sampling.method == "noise", sampling.temperature
        temperature = 1.0 if noisy and temperature <= 0 else temperature
        one_stays = limited and (sampling.top_p == 0 or sampling.top_k == 1)
        quiet = noisy and sampling.noise <= 0
        likelihood = LikelihoodLimits(min(sampling.min_p, 1.0), min(sampling.top_a, 1.0))
        return cls(
            method=sampling.method,
            greedy=temperature <= 0 or one_stays or quiet,
            seeded=sampling.seed is not None,
            temperature=min(max(temperature, 0.001), 1000.0),
            top_k=sampling.top_k if limited and 0 < sampling.top_k < vocab else vocab,
            top_p=sampling.top_p if limited and 0 <= sampling.top_p <= 1 else 1.0,
            noise=sampling.noise,
            bias=(np.array(list(bias), np.int64), np.array(list(bias.values()))) if bias else None,
            penalties=rule_from_sampling(sampling),
            likelihood=LikelihoodLimits() if noisy else likelihood,
            repetition=sampling.repetition_penalty,
        )
