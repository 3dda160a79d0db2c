"""The fields of llama.cpp that say how tokens are drawn, where they differ from OpenAI's."""

from typing import Annotated

from pydantic import AfterValidator, Field

from routes.http.schemas import INT_LIMIT, Int, Number
from routes.openai.samplers import UnavailableSamplers


def _endless(tokens: int) -> int:
    return INT_LIMIT if tokens < 0 else tokens


def _any_seed(seed: int) -> int | None:
    return None if seed < 0 else seed


# How many tokens a text may have; below 0: until it ends.
Predict = Annotated[Int, Field(ge=-2, le=INT_LIMIT), AfterValidator(_endless)]
# Below 0: any.
Seed = Annotated[Int, Field(ge=-(2**63), le=2**63 - 1), AfterValidator(_any_seed)]


class LlamaSamplers(UnavailableSamplers):
    """Samplers by llama.cpp's names."""

    repeat_penalty: Annotated[Number, Field(gt=0, le=2)] | None = None  # OpenAIBody.repetition_penalty
