"""Samplers of llama.cpp and others that no route has."""

from typing import Annotated

from pydantic import BaseModel

from routes.http.schemas import Number, neutral

CUTS = "this sampler is not available; use top_k, top_p and min_p"
REPEATS = "this penalty is not available; presence, frequency and repetition penalties are"


class UnavailableSamplers(BaseModel):
    """Clients that know them send all at all times: the neutral values are taken, others refused."""

    typical_p: Annotated[Number | None, neutral(CUTS, 1)] = None
    tfs_z: Annotated[Number | None, neutral(CUTS, 1)] = None
    mirostat: Annotated[Number | None, neutral(CUTS, 0)] = None
    dynatemp_range: Annotated[Number | None, neutral(CUTS, 0)] = None
    xtc_probability: Annotated[Number | None, neutral(CUTS, 0)] = None
    top_n_sigma: Annotated[Number | None, neutral(CUTS, -1, 0)] = None
    dry_multiplier: Annotated[Number | None, neutral(REPEATS, 0)] = None
