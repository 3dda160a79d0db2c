"""The replies of /api/chat and /api/generate: JSON objects, one a line when they are streamed."""

import json
from abc import abstractmethod

from routes.chat.answer import AnswerPart, RowAnswer
from routes.chat.calls import ToolCall
from routes.http.errors import Json, ollama_shape
from routes.http.replies import JsonLines, timestamp
from routes.openai.reply import logprob_entries
from rwkv_batch.wire.client import Job
from rwkv_batch.wire.protocol import RowDelta


class OllamaReply(JsonLines):
    """One row; `logprobs`: whether they were asked for."""

    shape = staticmethod(ollama_shape)

    def __init__(self, model_id: str, row: RowAnswer, logprobs: bool) -> None:
        self._model, self._row, self._logprobs = model_id, row, logprobs
        self._sent = 0  # calls

    @abstractmethod
    def part(self, piece: AnswerPart, calls: list[ToolCall]) -> Json:
        """New text and calls."""

    def whole(self, job: Job, deltas: list[RowDelta]) -> Json:
        if not job.request.prompts:  # nothing was to be generated: the model is there
            return self._object(AnswerPart(), []) | {"done": True, "done_reason": "load"}
        return (self._new(deltas) or self._object(AnswerPart(), [])) | self._end(job)

    def events(self, deltas: list[RowDelta]) -> list[Json]:
        new = self._new(deltas)
        return [new | {"done": False}] if new else []

    def last(self, job: Job) -> list[Json]:
        return [self._object(AnswerPart(), []) | self._end(job)]

    def _new(self, deltas: list[RowDelta]) -> Json:
        """What the deltas bring; empty if that is nothing."""
        piece = sum(map(self._row.take, deltas), AnswerPart())
        calls, self._sent = self._row.calls[self._sent :], len(self._row.calls)
        tokens = [token for delta in deltas for token in delta.logprobs] if self._logprobs else []
        if not (piece.reasoning or piece.content or calls or tokens):
            return {}
        new = self._object(piece, calls)
        return new | {"logprobs": logprob_entries(tokens)} if tokens else new

    def _object(self, piece: AnswerPart, calls: list[ToolCall]) -> Json:
        return {"model": self._model, "created_at": timestamp(), **self.part(piece, calls)}

    def _end(self, job: Job) -> Json:
        began, ended = job.began or job.submitted, job.ended or job.submitted
        return {
            "done": True,
            "done_reason": self._row.finish_reason,
            "total_duration": _nanoseconds(ended - job.submitted),
            "load_duration": 0,
            "prompt_eval_count": sum(job.acceptance.prompt_tokens),
            "prompt_eval_duration": _nanoseconds(began - job.submitted),
            "eval_count": self._row.tokens,
            "eval_duration": _nanoseconds(ended - began),
        }


class ChatAnswer(OllamaReply):
    """The reply of /api/chat."""

    def part(self, piece: AnswerPart, calls: list[ToolCall]) -> Json:
        message: Json = {"role": "assistant", "content": piece.content}
        if piece.reasoning:
            message["thinking"] = piece.reasoning
        if calls:
            message["tool_calls"] = [
                {"function": {"name": call.name, "arguments": json.loads(call.arguments)}} for call in calls
            ]
        return {"message": message}


class TextAnswer(OllamaReply):
    """The reply of /api/generate."""

    def part(self, piece: AnswerPart, calls: list[ToolCall]) -> Json:
        thought = {"thinking": piece.reasoning} if piece.reasoning else {}
        return {"response": piece.content} | thought


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
