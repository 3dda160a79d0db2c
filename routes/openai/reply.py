"""What the replies of chat completions and completions have in common: ids, usage, errors."""

import time
from uuid import uuid4

from routes.http.errors import Json, openai_shape
from routes.http.replies import Reply, RowResult
from rwkv_batch.wire.client import Job
from rwkv_batch.wire.protocol import RowDelta

LEAST_LOGPROB = -9999.0  # OpenAI's number for "very unlikely"; JSON has no infinity


class OpenAIReply(Reply):
    """The frame of a reply: one id and time for all its events."""

    shape = staticmethod(openai_shape)

    def __init__(self, prefix: str, kind: str, stream_kind: str, model_id: str, include_usage: bool) -> None:
        self._whole = {
            "id": prefix + uuid4().hex,
            "object": kind,
            "created": int(time.time()),
            "model": model_id,
        }
        self._event = {**self._whole, "object": stream_kind}
        self._include_usage = include_usage
        self._completion_tokens = 0

    def body(self, job: Job, rows: list[RowResult], choices: list[Json]) -> Json:
        return {**self._whole, "choices": choices, "usage": _usage(job, sum(r.tokens for r in rows))}

    def event(self, choice: Json) -> Json:
        event = {**self._event, "choices": [choice]}
        return {**event, "usage": None} if self._include_usage else event

    def count(self, deltas: list[RowDelta]) -> None:
        self._completion_tokens += sum(d.tokens for d in deltas)

    def last(self, job: Job) -> list[Json]:
        """The usage, if the client asked for it."""
        if not self._include_usage:
            return []
        return [{**self._event, "choices": [], "usage": _usage(job, self._completion_tokens)}]


def _usage(job: Job, completion: int) -> Json:
    prompt = sum(job.prompt_tokens)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(job.cached_tokens)},
    }
