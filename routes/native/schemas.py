"""The fields that native requests share, and their defaults.

Coercion is lax, as clients of these routes expect: "5" is a number and 1 is true. Unknown fields are ignored.
"""

import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Annotated, Self

from pydantic import BeforeValidator, Field

from routes.http.errors import ApiError, Json
from routes.http.priority import PriorityFields
from routes.http.schemas import (
    INT_LIMIT,
    LAST_ID,
    MAX_PROMPTS,
    MAX_SESSION_ID,
    OWN_ID,
    PLAIN_ID,
    Prompts,
    RequestBody,
    not_bool,
)
from rwkv_batch.wire.protocol import GenerateRequest, Sampling, SessionTurn

MAX_STOPS = 64
DEFAULT_STOPS: list[int | str] = [0, 261, 24281]  # end of text, a blank line, "User"


def _stop(value: object) -> int | str:
    if isinstance(value, str):
        if not value:
            raise ValueError("must not be an empty string")
        return value
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LAST_ID:
        return value
    raise ValueError(f"must be a token id from 0 to {LAST_ID} or a string")


_not_bool = not_bool("must be a number, not true or false")
Whole = Annotated[int, _not_bool, Field(ge=-INT_LIMIT, le=INT_LIMIT)]
Real = Annotated[float, _not_bool, Field(allow_inf_nan=False)]
Stop = Annotated[
    int | str,
    BeforeValidator(
        _stop,
        json_schema_input_type=Annotated[int, Field(ge=0, le=LAST_ID)] | Annotated[str, Field(min_length=1)],
    ),
]
Texts = Annotated[list[str], Field(max_length=MAX_PROMPTS)]
# The id of any stored state, and one under which clients store.
StoredId = Annotated[str, Field(min_length=1, max_length=MAX_SESSION_ID), *PLAIN_ID]
SessionId = Annotated[str, Field(min_length=1, max_length=MAX_SESSION_ID), *OWN_ID]


class RowFields(PriorityFields, RequestBody, ABC):
    """What all native routes that generate have in common."""

    model: str = "rwkv7"  # which one is asked (`model_field.py`); echoed
    max_tokens: Annotated[Whole, Field(ge=0)] = 8192
    stop_tokens: Annotated[list[Stop], Field(max_length=MAX_STOPS)] = DEFAULT_STOPS
    temperature: Annotated[Real, Field(ge=-1000, le=1000)] = 1.0  # <= 0: greedy
    stream: bool = False
    chunk_size: Whole = 4  # tokens of a row per event of a stream; < 1: 1
    use_prefix_cache: bool = True  # whether states of earlier prompts' beginnings may be used

    @abstractmethod
    def sampling(self) -> Sampling:
        """How tokens are drawn."""

    def request(
        self, prompts: Prompts, turn: SessionTurn | None = None, prefix_ids: Sequence[int] = ()
    ) -> GenerateRequest:
        request = GenerateRequest(
            id=uuid.uuid4().hex,
            prompts=prompts,
            max_tokens=self.max_tokens,
            sampling=self.sampling(),
            stop_ids=[s for s in self.stop_tokens if isinstance(s, int)],
            stop_strings=[s for s in self.stop_tokens if isinstance(s, str)],
            flush_tokens=max(1, self.chunk_size) if self.stream else 0,
            prefix_cache=self.use_prefix_cache,
            turn=turn,
            prefix_ids=list(prefix_ids),
        )
        return self.ranked(request)


class SamplingFields(RowFields):
    """The fields of the samplers that cut at top_k and top_p and penalize repetition."""

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


class SessionFields(RequestBody):
    """What requests about one stored session have in common."""

    session_id: StoredId

    @classmethod
    def from_json(cls, fields: Json) -> Self:
        demand_session_id(fields)
        return super().from_json(fields)


def demand_session_id(fields: Json) -> None:
    """Raises ApiError 400 if there is no `session_id`."""
    if fields.get("session_id") in (None, ""):
        raise ApiError(400, "Missing session_id parameter", param="session_id")
