"""What the replies of chat completions and completions have in common: ids, usage, errors."""

import time
from abc import abstractmethod
from collections.abc import Sequence

from routes.http.errors import Json, openai_shape
from routes.http.ids import new_id
from routes.http.replies import Reply, merge_in_order
from rwkv_batch.wire.client import Job
from rwkv_batch.wire.protocol import RowDelta, TokenLogprob

LEAST_LOGPROB = -9999.0  # OpenAI's number for "very unlikely"; JSON has no infinity


class OpenAIReply(Reply):
    """The frame of a reply: one id and time for all its events."""

    shape = staticmethod(openai_shape)

    def __init__(self, prefix: str, kind: str, stream_kind: str, model_id: str, include_usage: bool) -> None:
        self._whole = {
            "id": prefix + new_id(),
            "object": kind,
            "created": int(time.time()),
            "model": model_id,
        }
        self._event = {**self._whole, "object": stream_kind}
        self._include_usage = include_usage
        self._tokens = _Tokens()

    def made_by(self, fingerprint: str) -> None:
        self._whole["system_fingerprint"] = self._event["system_fingerprint"] = fingerprint

    @abstractmethod
    def whole_choice(self, row: RowDelta) -> Json:
        """The choice of a row, whose whole output is `row`."""

    @abstractmethod
    def new_choices(self, delta: RowDelta) -> list[Json]:
        """The choices of the events that report `delta`."""

    def whole(self, job: Job, deltas: list[RowDelta]) -> Json:
        choices = [self.whole_choice(row) for row in merge_in_order(deltas)]
        self._tokens.add(deltas)
        return {**self._whole, "choices": choices, "usage": self._tokens.usage(job)}

    def event(self, choice: Json) -> Json:
        event = {**self._event, "choices": [choice]}
        return {**event, "usage": None} if self._include_usage else event

    def events(self, deltas: list[RowDelta]) -> list[Json]:
        self._tokens.add(deltas)
        return [self.event(choice) for delta in deltas for choice in self.new_choices(delta)]

    def last(self, job: Job) -> list[Json]:
        """The usage, if the client asked for it."""
        if not self._include_usage:
            return []
        return [{**self._event, "choices": [], "usage": self._tokens.usage(job)}]


class _Tokens:
    """Counts what has been generated for a request."""

    def __init__(self) -> None:
        self._completion = self._accepted = self._rejected = 0

    def add(self, deltas: Sequence[RowDelta]) -> None:
        for delta in deltas:
            self._completion += delta.tokens
            self._accepted += delta.accepted
            self._rejected += delta.rejected

    def usage(self, job: Job) -> Json:
        prompt = sum(job.acceptance.prompt_tokens)
        usage: Json = {
            "prompt_tokens": prompt,
            "completion_tokens": self._completion,
            "total_tokens": prompt + self._completion,
            "prompt_tokens_details": {"cached_tokens": sum(job.acceptance.cached_tokens)},
        }
        if self._accepted or self._rejected:
            usage["completion_tokens_details"] = {
                "accepted_prediction_tokens": self._accepted,
                "rejected_prediction_tokens": self._rejected,
            }
        return usage


def logprob_entries(tokens: Sequence[TokenLogprob]) -> list[Json]:
    """Drawn tokens with their log probabilities and those of the likeliest."""
    return [
        _token(each.token, each.logprob) | {"top_logprobs": [_token(*top) for top in each.top]}
        for each in tokens
    ]


def _token(token: bytes, logprob: float) -> Json:
    return {
        "token": token.decode(errors="replace"),
        "bytes": list(token),
        "logprob": max(logprob, LEAST_LOGPROB),
    }
