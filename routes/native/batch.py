"""POST /v1/chat/completions with `contents`: a batch of raw prompts, and the reply shapes that FIM shares."""

from pydantic import Field

from routes.http.errors import ApiError, native_error
from routes.http.replies import RowResult
from routes.native.schemas import SamplingFields, Texts, validate
from rwkv_batch.wire.client import Job
from rwkv_batch.wire.protocol import GenerateRequest, RowDelta

END_OF_TEXT = 0


class BatchFields(SamplingFields):
    """The body."""

    contents: Texts = Field(default_factory=list)


class NativeReply:
    """The native shapes: no usage, one choice a row; in a stream, one chunk for all rows that
    have new text.
    """

    def __init__(self, model: str, object_: str = "chat.completion", id_: str = "rwkv7-batch") -> None:
        self._head = {"id": id_, "object": object_, "model": model}

    def whole(self, job: Job, rows: list[RowResult]) -> dict:
        return self._head | {
            "choices": [
                {
                    "index": i,
                    "message": {"role": "assistant", "content": row.text},
                    "finish_reason": row.finish_reason,
                }
                for i, row in enumerate(rows)
            ]
        }

    def first(self, job: Job) -> list[dict]:
        return []

    def events(self, deltas: list[RowDelta]) -> list[dict]:
        texts = [{"index": d.row, "delta": {"content": d.text}} for d in deltas if d.text]
        ends = [
            {"index": d.row, "delta": {}, "finish_reason": d.finish_reason} for d in deltas if d.finish_reason
        ]
        return [_chunk(choices) for choices in (texts, *([end] for end in ends)) if choices]

    def last(self, job: Job) -> list[dict]:
        return []

    def error(self, message: str, status: int) -> dict:
        return native_error(message)


def prepare(body: dict, model_id: str) -> tuple[GenerateRequest, bool, NativeReply]:
    """What to run and how to answer. Raises ApiError."""
    refuse_both(body)
    fields = validate(BatchFields, body)
    return fields.request(raw_prompts(fields.contents)), fields.stream, NativeReply(fields.model)


def refuse_both(body: dict) -> None:
    """Raises ApiError 400 when it is not clear what is to be answered."""
    if body.get("contents") and body.get("messages"):
        raise ApiError(400, "Send either `contents` (raw prompts) or `messages` (a conversation), not both.")


def raw_prompts(contents: list[str]) -> list[str | list[int]]:
    """`contents` for the engine. Raises ApiError 400 when there are none."""
    if not contents:
        raise ApiError(400, "Empty prompts list")
    return [text or [END_OF_TEXT] for text in contents]  # the model needs a token to start from


def _chunk(choices: list[dict]) -> dict:
    return {"object": "chat.completion.chunk", "choices": choices}
