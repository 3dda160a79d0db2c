"""POST /v1/chat/completions with `contents`: raw prompts. Also the reply that most routes share."""

from pydantic import Field

from routes.http.errors import ApiError, Json
from routes.http.generate import Prepared
from routes.http.replies import Reply, RowResult
from routes.http.schemas import END_OF_TEXT, Prompts
from routes.native.schemas import SamplingFields, Texts
from rwkv_batch.wire.client import Job
from rwkv_batch.wire.protocol import RowDelta


class BatchFields(SamplingFields):
    """The body."""

    contents: Texts = Field(default_factory=list)


class NativeReply(Reply):
    """One choice a row, no usage; in a stream, one chunk for all rows that have new text."""

    def __init__(self, model: str, object_: str = "chat.completion", id_: str = "rwkv7-batch") -> None:
        self._head = {"id": id_, "object": object_, "model": model}

    def whole(self, job: Job, rows: list[RowResult]) -> Json:
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

    def events(self, deltas: list[RowDelta]) -> list[Json]:
        texts = [{"index": d.row, "delta": {"content": d.text}} for d in deltas if d.text]
        ends = [
            {"index": d.row, "delta": {}, "finish_reason": d.finish_reason} for d in deltas if d.finish_reason
        ]
        chunks = [texts, *([end] for end in ends)]
        return [{"object": "chat.completion.chunk", "choices": choices} for choices in chunks if choices]


def prepare(body: Json, model_id: str) -> Prepared:
    """Raises ApiError."""
    refuse_both(body)
    fields = BatchFields.from_json(body)
    return Prepared(fields.request(raw_prompts(fields.contents)), fields.stream, NativeReply(fields.model))


def refuse_both(body: Json) -> None:
    """Raises ApiError 400 when there are both `contents` and `messages`."""
    if body.get("contents") and body.get("messages"):
        raise ApiError(400, "Send either `contents` (raw prompts) or `messages` (a conversation), not both.")


def raw_prompts(contents: list[str]) -> Prompts:
    """`contents` for the engine. Raises ApiError 400 when there are none."""
    if not contents:
        raise ApiError(400, "Empty prompts list")
    return [text or [END_OF_TEXT] for text in contents]  # the model needs a token to start from
