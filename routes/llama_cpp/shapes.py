"""The shape of the reply of /infill. It documents."""

from typing import Literal

from typing_extensions import TypedDict


class InfillTimings(TypedDict):
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class InfillText(TypedDict, total=False):
    """All of it, unless `response_fields` names some: each stands under its path, as "timings/prompt_n"."""

    content: str
    stop: bool
    model: str
    stop_type: Literal["limit", "word", "eos"]
    stopping_word: str
    has_new_line: bool
    truncated: bool
    tokens_predicted: int
    tokens_evaluated: int
    tokens_cached: int
    timings: InfillTimings
