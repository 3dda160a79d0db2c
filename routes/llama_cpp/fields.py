"""The fields of llama.cpp that say how tokens are drawn, where they differ from OpenAI's."""

from typing import Annotated

from pydantic import AfterValidator, BaseModel, Field

from routes.http.schemas import INT_LIMIT, neutral
from routes.openai.schemas import Int, Number

CUTS = "this sampler is not available; use top_k, top_p and min_p"
REPEATS = "this penalty is not available; use repeat_penalty"


def _endless(tokens: int) -> int:
    return INT_LIMIT if tokens < 0 else tokens


def _any_seed(seed: int) -> int | None:
    return None if seed < 0 else seed


# How many tokens a text may have; below 0: until it ends.
Predict = Annotated[Int, Field(ge=-2, le=INT_LIMIT), AfterValidator(_endless)]
# Below 0: any.
Seed = Annotated[Int, Field(ge=-(2**63), le=2**63 - 1), AfterValidator(_any_seed)]


class LlamaSamplers(BaseModel):
    """Samplers by llama.cpp's names. Of those that are not available the neutral values are taken."""

    repeat_penalty: Annotated[Number, Field(gt=0, le=2)] | None = None  # OpenAIBody.repetition_penalty
    typical_p: Annotated[Number | None, neutral(CUTS, 1)] = None
    tfs_z: Annotated[Number | None, neutral(CUTS, 1)] = None
    mirostat: Annotated[Number | None, neutral(CUTS, 0)] = None
    dynatemp_range: Annotated[Number | None, neutral(CUTS, 0)] = None
    xtc_probability: Annotated[Number | None, neutral(CUTS, 0)] = None
    top_n_sigma: Annotated[Number | None, neutral(CUTS, -1, 0)] = None
    dry_multiplier: Annotated[Number | None, neutral(REPEATS, 0)] = None
