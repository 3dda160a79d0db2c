"""The fields of the native routes, and how a wrong one is told.

Coercion is lax, as clients of these routes expect: "5" is a number and 1 is true. Unknown fields are ignored.
"""

import unicodedata
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Annotated, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, ValidationError

from routes.http.errors import ApiError
from rwkv_batch.wire.protocol import GenerateRequest, Sampling, SessionTurn

MAX_PROMPTS = 4096  # per request
MAX_STOPS = 64
MAX_ID = 256  # characters of a session's id
LAST_ID = 65535
RESPONSE = (
    "response"  # states of the Responses API are stored under "response:{id}"; no other route writes there
)
INT_LIMIT = 2**31 - 1


def _no_bool(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("must be a number, not true or false")
    return value


def _stop(value: object) -> int | str:
    if isinstance(value, str):
        if not value:
            raise ValueError("must not be an empty string")
        return value
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LAST_ID:
        return value
    raise ValueError(f"must be a token id from 0 to {LAST_ID} or a string")


def plain_id(text: str) -> str:
    """Ids of sessions go into replies and file names."""
    if any(unicodedata.category(c) == "Cc" for c in text):
        raise ValueError("must hold no control characters")
    return text


def own_id(text: str) -> str:
    """Ids under which clients store."""
    if text.startswith(f"{RESPONSE}:"):
        raise ValueError(f"must not begin with {RESPONSE}:, which is where /v1/responses keeps its states")
    return text


Whole = Annotated[int, BeforeValidator(_no_bool), Field(ge=-INT_LIMIT, le=INT_LIMIT)]
Real = Annotated[float, BeforeValidator(_no_bool), Field(allow_inf_nan=False)]
Stop = Annotated[int | str, BeforeValidator(_stop)]
Texts = Annotated[list[str], Field(max_length=MAX_PROMPTS)]
StoredId = Annotated[str, Field(min_length=1, max_length=MAX_ID), AfterValidator(plain_id)]
SessionId = Annotated[StoredId, AfterValidator(own_id)]


class RowFields(BaseModel, ABC):
    """What all native routes that generate have in common."""

    model: str = "rwkv7"  # echoed; one model is served
    max_tokens: Annotated[Whole, Field(ge=0)] = 8192
    stop_tokens: Annotated[list[Stop], Field(max_length=MAX_STOPS)] = [0, 261, 24281]
    temperature: Annotated[Real, Field(ge=-1000, le=1000)] = 1.0  # <= 0: greedy
    stream: bool = False
    chunk_size: Whole = 4  # tokens of a row per event of a stream; < 1: 1
    use_prefix_cache: bool = True  # whether states of earlier prompts' beginnings may be used

    @abstractmethod
    def sampling(self) -> Sampling:
        """How tokens are drawn."""

    def request(
        self, prompts: list[str | list[int]], turn: SessionTurn | None = None, lead: Sequence[int] = ()
    ) -> GenerateRequest:
        return GenerateRequest(
            id=uuid.uuid4().hex,
            prompts=prompts,
            max_tokens=self.max_tokens,
            sampling=self.sampling(),
            stop_ids=[s for s in self.stop_tokens if isinstance(s, int)],
            stop_strings=[s for s in self.stop_tokens if isinstance(s, str)],
            flush_tokens=max(1, self.chunk_size) if self.stream else 0,
            prefix_cache=self.use_prefix_cache,
            turn=turn,
            prefix_ids=list(lead),
        )


class SamplingFields(RowFields):
    """The fields of the samplers that cut at top_k and top_p and punish repetition."""

    top_k: Whole = 50  # <= 0: off
    top_p: Annotated[Real, Field(ge=-1000, le=1000)] = 0.6  # 0: greedy; outside [0, 1]: off
    alpha_presence: Annotated[Real, Field(ge=-1000, le=1000)] = 2.0
    alpha_frequency: Annotated[Real, Field(ge=-1000, le=1000)] = 0.2
    alpha_decay: Annotated[Real, Field(ge=0, le=1)] = 0.996

    def sampling(self) -> Sampling:
        return Sampling(
            self.temperature,
            self.top_k,
            self.top_p,
            self.alpha_presence,
            self.alpha_frequency,
            self.alpha_decay,
        )


Fields = TypeVar("Fields", bound=BaseModel)


def validate(schema: type[Fields], body: dict) -> Fields:
    """`body` as `schema`. Raises ApiError 400 with a sentence about the first wrong field."""
    try:
        return schema.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
    raise ApiError(400, f"`{place}`: {_plain(first['type'], first['msg'])}.", param=place)


def _plain(kind: str, message: str) -> str:
    if kind == "missing":
        return "this field is required"
    message = message.removeprefix("Value error, ").replace("Input should", "must")
    return message[:1].lower() + message[1:]
