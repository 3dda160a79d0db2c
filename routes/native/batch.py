"""The native routes whose rows do not depend on each other: raw prompts, questions, fill-in-the-middle.

Also the reply that they share with the routes of sessions.
"""

from dataclasses import replace as replace_style
from typing import Annotated, Any

from msgspec.structs import replace
from pydantic import Field

from routes.chat.answer import AnswerPart, AnswerReader
from routes.chat.fields import ChatStyleFields
from routes.chat.messages import parse_messages
from routes.chat.profiles import with_profile
from routes.chat.shapes import ChatMessages, shaped_as
from routes.http.errors import ApiError, Json
from routes.http.generate import Prepared
from routes.http.replies import Reply, merge_in_order
from routes.http.schemas import Prompts
from routes.native.schemas import Real, RowFields, SamplingFields, Texts
from rwkv_batch.chat import templates
from rwkv_batch.chat.checkpoints import END_OF_TEXT, chat_template
from rwkv_batch.chat.templates import ASSISTANT, Style
from rwkv_batch.config import FrontendConfig
from rwkv_batch.wire.client import Job
from rwkv_batch.wire.protocol import GenerateRequest, RowDelta, Sampling


class BatchFields(SamplingFields):
    """The body of /v1."""

    contents: Texts = Field(default_factory=list)


class V2Fields(BatchFields):
    """The body of /v2."""

    pad_zero: bool = True  # whether every prompt is the beginning of a document

    def sampling(self) -> Sampling:
        return replace(super().sampling(), method="nucleus")


class V3Fields(ChatStyleFields, BatchFields):
    """The body of /v3."""

    messages: Annotated[list[Any], shaped_as(ChatMessages)] = Field(default_factory=list)

    def chat_request(self, prompts: Prompts, style: Style) -> GenerateRequest:
        """What asks for chats: strings of `stop_tokens` count behind the thought only."""
        request = self.request(prompts, prefix_ids=style.lead)
        if late_stops := style.late_stops(request.stop_strings) if request.stop_strings else None:
            request = replace(request, stop_strings=[], late_stops=late_stops)
        if style.form is not ASSISTANT and "stop_tokens" not in self.model_fields_set:
            # the default is that of the assistant's form
            request = replace(request, stop_ids=[END_OF_TEXT], stop_strings=list(style.form.stops))
        return request


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
                    **self.row_error(row),
                }
                for row in merge_in_order(deltas)
            ]
        }

    def events(self, deltas: list[RowDelta]) -> list[Json]:
        texts = [{"index": d.row, "delta": {"content": d.text}} for d in deltas if d.text]
        ends = [
            {"index": d.row, "delta": {}, "finish_reason": d.finish_reason, **self.row_error(d)}
            for d in deltas
            if d.finish_reason
        ]
        chunks = [texts, *([end] for end in ends)]
        return [{"object": "chat.completion.chunk", "choices": choices} for choices in chunks if choices]


class V3Reply(NativeReply):
    """The text of a thought that was asked for stands as it is, and begins with the ">" of its tag.

    A thought that comes unasked is `reasoning_content`.
    """

    def __init__(self, model: str, style: Style, rows: int) -> None:
        super().__init__(model, id_="rwkv7-batch-v3")
        # the line feed behind an empty thought, which the prompt does not have, is the answer's
        self._readers = [AnswerReader(None if style.thinks else style.thought) for _ in range(rows)]

    def whole(self, job: Job, deltas: list[RowDelta]) -> Json:
        whole = super().whole(job, deltas)
        for choice in whole["choices"]:
            reader, message = self._readers[choice["index"]], choice["message"]
            piece = reader.feed(message["content"]) + reader.finish()
            message |= {"content": piece.content} | _reasoning(piece)
        return whole

    def events(self, deltas: list[RowDelta]) -> list[Json]:
        pieces = []
        for delta in deltas:
            reader = self._readers[delta.row]
            piece = reader.feed(delta.text)
            pieces.append(piece + reader.finish() if delta.finish_reason else piece)
        thoughts = [
            {"index": delta.row, "delta": _reasoning(piece)}
            for delta, piece in zip(deltas, pieces, strict=True)
            if piece.reasoning
        ]
        answers = [replace(d, text=piece.content) for d, piece in zip(deltas, pieces, strict=True)]
        events = [{"object": "chat.completion.chunk", "choices": thoughts}] if thoughts else []
        return events + super().events(answers)


def _reasoning(piece: AnswerPart) -> Json:
    return {"reasoning_content": piece.reasoning} if piece.reasoning else {}


def v1(body: Json, model_id: str) -> Prepared:
    """POST /v1/chat/completions with `contents`: raw prompts. Raises ApiError."""
    _refuse_both(body)
    fields = BatchFields.from_json(body)
    prompts = _raw_prompts(fields.contents, "send a conversation as `messages`, or raw prompts as `contents`")
    return Prepared(fields.request(prompts), fields.stream, NativeReply(fields.model))


def v2(body: Json, model_id: str) -> Prepared:
    """POST /v2/chat/completions: raw prompts, drawn by top-k, then nucleus sampling on what is left.

    Raises ApiError.
    """
    fields = V2Fields.from_json(body)
    prefix_ids = [END_OF_TEXT] if fields.pad_zero else []
    request = fields.request(_raw_prompts(fields.contents), prefix_ids=prefix_ids)
    return Prepared(request, fields.stream, NativeReply(fields.model))


def v3(body: Json, model_id: str, settings: FrontendConfig) -> Prepared:
    """POST /v3/chat/completions: single questions in `contents`, or a conversation in `messages`.

    Raises ApiError.
    """
    _refuse_both(body)
    fields = V3Fields.from_json(with_profile(body, settings.sampling_profile))
    style = fields.style(chat_template(model_id, settings), fields.reasoning_effort)
    # no line feed at the end, unlike in OpenAI chat: the answer begins with it
    style = replace_style(style, thought=(style.thought or "").rstrip("\n"))
    prompts: Prompts = [templates.question(text, style) for text in fields.contents]
    if not prompts:
        messages = parse_messages(fields.messages)
        if all(message.empty for message in messages):
            raise ApiError(400, "Empty prompts list: `contents` or `messages` must hold a text.")
        style = style.continuing(messages)
        prompts = [templates.chat(messages, style=style)]
    request = fields.chat_request(prompts, style)
    return Prepared(request, fields.stream, V3Reply(fields.model, style, len(prompts)))


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


def _raw_prompts(
    contents: list[str], way_out: str = "`contents` needs at least one text, as a list"
) -> Prompts:
    """`contents` for the engine. Raises ApiError 400 when there are none."""
    if not contents:
        raise ApiError(400, f"Empty prompts list: {way_out}.")
    return [text or [END_OF_TEXT] for text in contents]  # the model needs a token to start from
