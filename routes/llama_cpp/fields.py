"""The fields of llama.cpp that say how tokens are drawn, where they differ from OpenAI's."""

from typing import Annotated

from pydantic import AfterValidator, BaseModel, Field

from routes.http.schemas import INT_LIMIT, neutral
from routes.openai.schemas import Int, Number

PENALTIES = "this sampler is not available; use presence_penalty, frequency_penalty or alpha_presence"
CUTS = "this sampler is not available; use top_k and top_p"


def _endless(tokens: int) -> int:
    return INT_LIMIT if tokens < 0 else tokens


def _any_seed(seed: int) -> int | None:
    return None if seed < 0 else seed


# How many tokens a text may have; below 0: until it ends.
Predict = Annotated[Int, Field(ge=-2, le=INT_LIMIT), AfterValidator(_endless)]
# Below 0: any.
Seed = Annotated[Int, Field(ge=-(2**63), le=2**63 - 1), AfterValidator(_any_seed)]


class LlamaSamplers(BaseModel):
    """Samplers that are not available. Their neutral values are taken, as clients send them by default."""

    repeat_penalty: Annotated[Number | None, neutral(1, PENALTIES)] = None
    min_p: Annotated[Number | None, neutral(0, CUTS)] = None
    typical_p: Annotated[Number | None, neutral(1, CUTS)] = None
    tfs_z: Annotated[Number | None, neutral(1, CUTS)] = None
    mirostat: Annotated[Number | None, neutral(0, CUTS)] = None
