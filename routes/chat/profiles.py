"""Named ways to draw the tokens of chats: what the authors of the G1 series recommend for each use."""

from routes.http.errors import Json
from rwkv_batch.config import SamplingProfileName


def _profile(temperature: float, top_p: float, top_k: int, presence: float, frequency: float) -> Json:
    return {
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "alpha_presence": presence,
        "alpha_frequency": frequency,
    }


# field of a request -> what it is unless the request has it; "default": what the routes themselves say
PROFILES: dict[SamplingProfileName, Json] = {
    "default": {},
    "open_think": {**_profile(0.96, 0.76, 32, 1.0, 0.1), "alpha_decay": 0.988},
    "fake_think": _profile(1.0, 0.28, 32, 0.0, 0.0),
    "tools": _profile(0.96, 0.76, 32, 0.0, 0.0),
}
ALPHAS = ("alpha_presence", "alpha_frequency")
OPENAI_PENALTIES = ("presence_penalty", "frequency_penalty")


def with_profile(fields: Json, name: SamplingProfileName) -> Json:
    """The fields of a request, each of which wins over that of the profile.

    One of OpenAI's penalties takes the place of both alphas.
    """
    profile = PROFILES[name]
    if any(penalty in fields for penalty in OPENAI_PENALTIES):
        profile = {field: value for field, value in profile.items() if field not in ALPHAS}
    return {**profile, **fields}
