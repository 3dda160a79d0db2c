"""POST /infill: the text between a prefix and a suffix, as editors ask llama.cpp's server for it."""

from typing import Any

from msgspec.structs import replace

from routes.http.errors import Json, openai_shape
from routes.http.generate import Prepared
from routes.http.replies import Reply
from routes.llama_cpp.schemas import InfillBody
from routes.openai.chat import DEFAULT_MAX_TOKENS
from rwkv_batch.chat.templates import fill_in_the_middle
from rwkv_batch.wire.client import Job
from rwkv_batch.wire.deltas import merge
from rwkv_batch.wire.protocol import RowDelta


def prepare(body: Json, model_id: str) -> Prepared:
    """POST /infill: the text between a prefix and a suffix. Raises ApiError 400 for what cannot be served."""
    fields = InfillBody.from_json(body)
    if not fields.cache_prompt:
        fields = fields.model_copy(update={"use_prefix_cache": False})
    if fields.repeat_penalty is not None:
        fields = fields.model_copy(update={"repetition_penalty": fields.repeat_penalty})
    given = (n for n in (fields.n_predict, fields.max_tokens, DEFAULT_MAX_TOKENS) if n is not None)
    prompt = fill_in_the_middle(fields.prefix, fields.input_suffix)
    request = fields.request([prompt], next(given), grammar=fields.grammar())
    request = replace(request, flush_tokens=request.flush_tokens or 1)  # the first delta is timed
    return Prepared(request, fields.stream, InfillReply(model_id, fields.n_indent, fields.response_fields))


class IndentedText:
    """Ends a text in front of a line that is indented less; not of its first line, or a blank one."""

    def __init__(self, least: int) -> None:
        """`least`: spaces and tabs that a line begins with."""
        self.ended = False
        self._least = least
        self._indent: int | None = None  # of the line that begins; None: inside a line
        self._held = ""

    def feed(self, text: str) -> str:
        """What of it belongs to the text for sure."""
        if not self._least:
            return text
        shown = ""
        for character in text:
            if self.ended:
                break
            if character == "\n":
                self._indent, self._held = 0, self._held + character
            elif self._indent is None:
                shown += character
            elif character in " \t":
                self._indent, self._held = self._indent + 1, self._held + character
            elif self._indent < self._least:
                self.ended = True
            else:
                shown, self._indent, self._held = shown + self._held + character, None, ""
        return shown

    def finish(self) -> str:
        """What was held back, at the end."""
        return "" if self.ended else self._held


class InfillReply(Reply):
    """One row. `wanted`: the fields of the reply, None for all."""

    shape = staticmethod(openai_shape)
    done = b""

    def __init__(self, model_id: str, n_indent: int, wanted: list[str] | None) -> None:
        self._model, self._wanted = model_id, wanted
        self._text = IndentedText(n_indent)
        self._tokens, self._last = 0, RowDelta(0, "", 0)
        self._has_new_line = False

    def whole(self, job: Job, deltas: list[RowDelta]) -> Json:
        return self._end(job, "".join(map(self._take, deltas)))

    def events(self, deltas: list[RowDelta]) -> list[Json]:
        text = "".join(self._take(delta) for delta in merge(deltas))
        return [{"content": text, "stop": False}] if text else []

    def last(self, job: Job) -> list[Json]:
        return [self._end(job, "")]

    def _take(self, delta: RowDelta) -> str:
        self._tokens, self._last = self._tokens + delta.tokens, delta
        text = self._text.feed(delta.text) + (self._text.finish() if delta.finish_reason else "")
        self._has_new_line |= "\n" in text
        return text

    def _end(self, job: Job, text: str) -> Json:
        row, prompt = self._last, sum(job.acceptance.prompt_tokens)
        began, ended = job.began or job.submitted, job.ended or job.submitted
        limited = row.finish_reason != "stop" or self._text.ended
        reply: Json = {
            "content": text,
            "stop": True,
            "model": self._model,
            "stop_type": "limit" if limited else "word" if row.stop else "eos",
            "stopping_word": "" if limited else row.stop,
            "has_new_line": self._has_new_line,
            "truncated": False,
            "tokens_predicted": self._tokens,
            "tokens_evaluated": prompt,
            "tokens_cached": sum(job.acceptance.cached_tokens),
            "timings": {
                **_timing("prompt", prompt, began - job.submitted),
                **_timing("predicted", self._tokens, ended - began),
            },
        }
        if self._wanted is None:
            return reply
        found = {path: _inside(reply, path) for path in self._wanted}
        return {path: value for path, value in found.items() if value is not None}


def _timing(name: str, tokens: int, seconds: float) -> Json:
    milliseconds = seconds * 1000
    return {
        f"{name}_n": tokens,
        f"{name}_ms": milliseconds,
        f"{name}_per_token_ms": milliseconds / tokens if tokens else 0.0,
        f"{name}_per_second": tokens / seconds if seconds else 0.0,
    }


def _inside(value: Any, path: str) -> Any:
    """What stands at a path such as "timings/prompt_n"; None if nothing does."""
    for name in path.split("/"):
        value = value.get(name) if isinstance(value, dict) else None
    return value
