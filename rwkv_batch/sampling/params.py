"""What a request says of how its rows draw: checked, and brought into the ranges in which the methods hold as
sampling.py has them.
"""

import math
from dataclasses import dataclass

import numpy as np

from rwkv_batch.sampling import penalties
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
)


def check(params: Sampling, width: int) -> None:
    """Raises ValueError when a parameter is not a finite number, or logit_bias names an id that logits
    `[width]` do not have.
    """
    numbers = {name: getattr(params, name) for name in FLOATS} | {
        f"logit_bias of token {t}": v for t, v in params.logit_bias.items()
    }
    for name, number in numbers.items():
        if not math.isfinite(number):
            raise ValueError(f"{name} is {number}; give a finite number.")
    for token in params.logit_bias:
        if not 0 <= token < width:
            raise ValueError(f"logit_bias names token {token}; this model's tokens are 0 to {width - 1}.")


@dataclass(frozen=True)
class Parameters:
    """The same for all rows of a request."""

    method: str
    greedy: bool
    seeded: bool
    temperature: float  # 0.001 to 1000
    top_k: int  # 1 to vocab; vocab: off
    top_p: float  # 0 to 1; 1: off
    noise: float
    bias: tuple[np.ndarray, np.ndarray] | None  # ids, values
    penalties: penalties.Rule | None

    @classmethod
    def of(cls, params: Sampling, vocab: int) -> "Parameters":
        """`vocab`: how many ids can be drawn."""
        bias = {
            token: value for token, value in params.logit_bias.items() if token < vocab
        }  # the others cannot be drawn anyway
        limited = params.method in ("rapid", "nucleus")
        temperature = 1.0 if params.method == "noise" and params.temperature <= 0 else params.temperature
        one_stays = limited and (params.top_p == 0 or params.top_k == 1)
        quiet = params.method == "noise" and params.noise <= 0
        return cls(
            method=params.method,
            greedy=temperature <= 0 or one_stays or quiet,
            seeded=params.seed is not None,
            temperature=min(max(temperature, 0.001), 1000.0),
            top_k=params.top_k if limited and 0 < params.top_k < vocab else vocab,
            top_p=params.top_p if limited and 0 <= params.top_p <= 1 else 1.0,
            noise=params.noise,
            bias=(np.array(list(bias), np.int64), np.array(list(bias.values()))) if bias else None,
            penalties=penalties.of(params),
        )
