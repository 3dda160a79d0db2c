"""The native routes whose rows do not depend on each other: raw prompts, questions, fill-in-the-middle.

Also the reply that they share with the routes of sessions.
"""

from typing import Annotated, Any

import msgspec
from pydantic import Field

from routes.chat import templates
from routes.chat.messages import parse_messages
from routes.http.errors import ApiError, Json
from routes.http.generate import Prepared
from routes.http.replies import Reply, merge_in_order
from routes.http.schemas import END_OF_TEXT, Prompts
from routes.native.schemas import Real, RowFields, SamplingFields, Texts
from rwkv_batch.wire.client import Job
from rwkv_batch.wire.protocol import RowDelta, Sampling


class BatchFields(SamplingFields):
    """The body of /v1."""

    contents: Texts = Field(default_factory=list)


class V2Fields(BatchFields):
    """The body of /v2."""

    pad_zero: bool = True  # whether every prompt is the beginning of a document

    def sampling(self) -> Sampling:
        return msgspec.structs.replace(super().sampling(), method="nucleus")


class V3Fields(BatchFields):
    """The body of /v3."""

    messages: list[Any] = Field(default_factory=list)
    # whether the model thinks first; its text then begins with the ">" of the prompt's "<think"
    enable_think: bool = False


class BigBatchFields(RowFields):
    """The body of /big_batch."""

    contents: Texts = Field(default_factory=list)
    stream: bool = True
    # if sent: a random number up to this is added to each logit and the highest wins
    noise: Annotated[Real, Field(ge=0, le=1000)] | None = None

    def sampling(self) -> Sampling:
        if self.noise is None:
            return Sampling(self.temperature, method="gumbel")
        return Sampling(self.temperature, noise=self.noise, method="noise")


class FimFields(SamplingFields):
    """The body of /FIM."""

    prefix: Texts = Field(default_factory=list)
    suffix: Texts = Field(default_factory=list)


class NativeReply(Reply):
    """One choice a row, no usage; in a stream, one chunk for all rows that have new text."""

    def __init__(self, model: str, object_: str = "chat.completion", id_: str = "rwkv7-batch") -> None:
        self._head = {"id": id_, "object": object_, "model": model}

    def whole(self, job: Job, deltas: list[RowDelta]) -> Json:
        return self._head | {
            "choices": [
                {
                    "index": row.row,
                    "message": {"role": "assistant", "content": row.text},
                    "finish_reason": row.finish_reason,
                }
                for row in merge_in_order(deltas)
            ]
        }

    def events(self, deltas: list[RowDelta]) -> list[Json]:
        texts = [{"index": d.row, "delta": {"content": d.text}} for d in deltas if d.text]
        ends = [
            {"index": d.row, "delta": {}, "finish_reason": d.finish_reason} for d in deltas if d.finish_reason
        ]
        chunks = [texts, *([end] for end in ends)]
        return [{"object": "chat.completion.chunk", "choices": choices} for choices in chunks if choices]


def v1(body: Json, model_id: str) -> Prepared:
    """POST /v1/chat/completions with `contents`: raw prompts. Raises ApiError."""
    _refuse_both(body)
    fields = BatchFields.from_json(body)
    return Prepared(fields.request(_raw_prompts(fields.contents)), fields.stream, NativeReply(fields.model))


def v2(body: Json, model_id: str) -> Prepared:
    """POST /v2/chat/completions: raw prompts, drawn by top-k, then nucleus sampling on what is left.

    Raises ApiError.
    """
    fields = V2Fields.from_json(body)
    prefix_ids = [END_OF_TEXT] if fields.pad_zero else []
    request = fields.request(_raw_prompts(fields.contents), prefix_ids=prefix_ids)
    return Prepared(request, fields.stream, NativeReply(fields.model))


def v3(body: Json, model_id: str) -> Prepared:
    """POST /v3/chat/completions: single questions in `contents`, or a conversation in `messages`.

    Raises ApiError.
    """
    _refuse_both(body)
    fields = V3Fields.from_json(body)
    opening = templates.THINK if fields.enable_think else templates.NO_THINK.rstrip("\n")
    prompts: Prompts = [f"User: {text}\n\nAssistant: {opening}" for text in fields.contents]
    if not prompts:
        messages = parse_messages(fields.messages)
        if all(message.empty for message in messages):
            raise ApiError(400, "Empty prompts list: `contents` or `messages` must hold a text.")
        # no line feed at the end, unlike in OpenAI chat: the answer begins with it
        prompts = [templates.chat(messages, think=fields.enable_think).rstrip("\n")]
    return Prepared(fields.request(prompts), fields.stream, NativeReply(fields.model, id_="rwkv7-batch-v3"))


def big_batch(body: Json, model_id: str) -> Prepared:
    """POST /big_batch/completions: many raw prompts, drawn by temperature alone, streamed by default.

    Raises ApiError.
    """
    fields = BigBatchFields.from_json(body)
    return Prepared(fields.request(_raw_prompts(fields.contents)), fields.stream, NativeReply(fields.model))


def fim(body: Json, model_id: str) -> Prepared:
    """POST /FIM/v1/batch-FIM: the text between a prefix and a suffix, for any number of pairs.

    Raises ApiError.
    """
    fields = FimFields.from_json(body)
    before, after = len(fields.prefix), len(fields.suffix)
    if before != after:
        raise ApiError(400, f"`prefix` has {before} texts and `suffix` has {after}; they form pairs.")
    if not before:
        raise ApiError(400, "Empty prompts list: `prefix` and `suffix` need at least one text each.")
    pairs = zip(fields.prefix, fields.suffix, strict=True)
    request = fields.request([templates.fill_in_the_middle(*pair) for pair in pairs])
    return Prepared(request, fields.stream, NativeReply(fields.model, "FIM.completion"))


def _refuse_both(body: Json) -> None:
    """Raises ApiError 400 when there are both `contents` and `messages`."""
    if body.get("contents") and body.get("messages"):
        raise ApiError(400, "Send either `contents` (raw prompts) or `messages` (a conversation), not both.")


def _raw_prompts(contents: list[str]) -> Prompts:
    """`contents` for the engine. Raises ApiError 400 when there are none."""
    if not contents:
        raise ApiError(400, "Empty prompts list")
    return [text or [END_OF_TEXT] for text in contents]  # the model needs a token to start from
