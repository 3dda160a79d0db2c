"""The reply of a response: the text of its row becomes output items, and events that report each change.

The items are thoughts (`reasoning`), the answer (`message`) and calls (`function_call`), in this order. Calls
are added when the row has finished, so that the items do not depend on how the text came in pieces.
"""

import time
from collections.abc import Sequence
from uuid import uuid4

from routes.chat.answer import AnswerPart, AnswerReader, RowAnswer
from routes.chat.calls import ToolCall
from routes.http.errors import ApiError, Json, openai_shape
from routes.http.replies import Reply, TypedEvents
from routes.openai.reply import logprob_entries
from routes.responses.items import item_id
from rwkv_batch.wire.client import Job
from rwkv_batch.wire.protocol import RowDelta, TokenLogprob

# status -> code of a response that failed; others: server_error
FAILURES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}


NOT_STORED = "the server stores no texts (--no-token-log), so send the whole conversation as `input`"


def previous_not_found(response_id: str, stores: bool = True) -> ApiError:
    """The error for a `previous_response_id` that is not stored. stores: whether the server stores any."""
    why = "it was deleted, or not stored" if stores else NOT_STORED
    return ApiError(
        404,
        f"There is no response {response_id[:60]} that could be continued: {why}.",
        param="previous_response_id",
        code="previous_response_not_found",
    )


def item_not_found(identity: str, field: str, stores: bool = True) -> ApiError:
    """The error for a reference to an item that is not stored. `field`: its place in the request."""
    why = "only items of responses that were made with `store` true are; send the item itself"
    if not stores:
        why = f"{NOT_STORED}, also with `store` true"
    return ApiError(
        404,
        f"There is no item {identity[:60]} that is stored: {why}.",
        param=field,
        code="item_not_found",
    )


class InputTokens(Reply):
    """How many tokens the input has, without those of the response that it continues."""

    shape = staticmethod(openai_shape)

    def whole(self, job: Job, deltas: list[RowDelta]) -> Json:
        return {"object": "response.input_tokens", "input_tokens": sum(job.acceptance.prompt_tokens)}

    def events(self, deltas: list[RowDelta]) -> list[Json]:
        return []  # it is not streamed


class ResponseReply(TypedEvents):
    """`response` is the response object at this moment; it is final when `last` has been called.

    `spaces`: the names of functions as the model has them, and their namespaces and names as clients do.
    """

    shape = staticmethod(openai_shape)

    def __init__(self, response: Json, reader: AnswerReader, spaces: dict[str, tuple[str, str]]) -> None:
        self.response = response
        self._spaces = spaces
        self._row = RowAnswer(reader)
        self._item: _TextItem | None = None  # the one being written
        self._number = 0  # of the next event
        self._drawn: list[TokenLogprob] = []  # of text that has not been shown yet
        self._shown: list[TokenLogprob] = []  # of text of the answer that the next event shows

    def whole(self, job: Job, deltas: list[RowDelta]) -> Json:
        """The final response."""
        self.events(deltas)
        self.last(job)
        return self.response

    def first(self, job: Job) -> list[Json]:
        return [
            self._event("response.created", response=self.response),
            self._event("response.in_progress", response=self.response),
        ]

    def events(self, deltas: list[RowDelta]) -> list[Json]:
        piece = sum(map(self._take, deltas), AnswerPart())
        events = self._write("reasoning", piece.reasoning) if piece.reasoning else []
        if piece.content:
            shown, self._shown = self._shown, []
            events += self._write("message", piece.content, shown)
        return events + self._finish() if self._row.finish_reason else events

    def last(self, job: Job) -> list[Json]:
        """The event that completes the response."""
        status = self._status()
        prompt, cached = sum(job.acceptance.prompt_tokens), sum(job.acceptance.cached_tokens)
        self.response = self.response | {
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "usage": {
                "input_tokens": prompt,
                "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
                "output_tokens": self._row.tokens,
                "output_tokens_details": {"reasoning_tokens": self._row.thought_tokens},
                "total_tokens": prompt + self._row.tokens,
            },
        }
        if status == "completed":
            self.response["completed_at"] = int(time.time())
        return [self._event(f"response.{status}", response=self.response)]

    def error(self, message: str, status: int, param: str | None = None) -> Json:
        if status == 404:  # nothing else of a response can be missing
            return self.shape(previous_not_found(self.response["previous_response_id"]))
        return super().error(message, status, param)

    def failure(self, message: str, status: int) -> Json:
        error = {"code": FAILURES.get(status, "server_error"), "message": message}
        self.response = self.response | {"status": "failed", "error": error}
        return self._event("response.failed", response=self.response)

    def _status(self) -> str:
        """A complete call completes the response, also if the text behind it was cut."""
        return "incomplete" if self._row.finish_reason == "length" and not self._row.calls else "completed"

    def _take(self, delta: RowDelta) -> AnswerPart:
        """What can be shown after `delta`, whose logprobs are kept for the text of the answer."""
        piece = self._row.take(delta)
        self._drawn += delta.logprobs
        if self._row.thinking:
            self._drawn = []
        elif self._drawn and piece.content:
            shown, self._drawn = _tokens_of(piece.content, self._drawn)
            self._shown += shown
        return piece

    def _write(self, kind: str, text: str, drawn: Sequence[TokenLogprob] = ()) -> list[Json]:
        """`text` goes to the item being written if that is of this kind, otherwise to a new one."""
        events = []
        if self._item is None or self._item.kind != kind:
            events += self._close("completed")
            self._item = _TextItem(kind, self._id("msg_" if kind == "message" else "rs_"))
            events += self._item_events(self._item.begin())
        return events + self._item_events(self._item.write(text, logprob_entries(drawn)))

    def _finish(self) -> list[Json]:
        """Close the item being written, or an empty message if there was no output; add the calls."""
        calls = self._row.calls
        events = self._write("message", "") if self._item is None and not calls else []
        events += self._close(self._status())
        return events + [event for call in calls for event in self._add_call(call)]

    def _close(self, status: str) -> list[Json]:
        if self._item is None:
            return []
        events = self._item_events(self._item.end(status))
        self._add(events[-1]["item"])
        self._item = None
        return events

    def _id(self, prefix: str) -> str:
        """That of the next item of the output."""
        return item_id(prefix, self.response["id"], str(len(self.response["output"])))

    def _add_call(self, call: ToolCall) -> list[Json]:
        namespace, name = self._spaces.get(call.name, ("", call.name))
        item = {
            "id": self._id("fc_"),
            "type": "function_call",
            "status": "in_progress",
            "call_id": "call_" + uuid4().hex,
            "name": name,
            "arguments": "",
            **({"namespace": namespace} if namespace else {}),
        }
        done = item | {"status": "completed", "arguments": call.arguments}
        place = {"item_id": item["id"]}
        arguments = {"name": name, "arguments": call.arguments}
        events = self._item_events(
            [
                {"type": "response.output_item.added", "item": item},
                {"type": "response.function_call_arguments.delta", **place, "delta": call.arguments},
                {"type": "response.function_call_arguments.done", **place, **arguments},
                {"type": "response.output_item.done", "item": done},
            ]
        )
        self._add(done)
        return events

    def _add(self, item: Json) -> None:
        self.response = self.response | {"output": [*self.response["output"], item]}

    def _item_events(self, events: list[Json]) -> list[Json]:
        """`events` about the next item of the output, numbered."""
        index = len(self.response["output"])
        return [self._event(event.pop("type"), output_index=index, **event) for event in events]

    def _event(self, kind: str, **fields: object) -> Json:
        number, self._number = self._number, self._number + 1
        return {"type": kind, "sequence_number": number, **fields}


def _tokens_of(text: str, drawn: list[TokenLogprob]) -> tuple[list[TokenLogprob], list[TokenLogprob]]:
    """The tokens in which the last occurrence of `text` stands, and those behind it.

    Those before it are of a thought, a call or white space. All where it has parts that no token has.
    """
    begin = b"".join(each.token for each in drawn).rfind(text.encode())
    if begin < 0:
        return drawn, []
    end, at, first, last = begin + len(text.encode()), 0, len(drawn), len(drawn)
    for i, each in enumerate(drawn):
        if at >= end:
            last = i
            break
        at += len(each.token)
        if at > begin:
            first = min(first, i)
    return drawn[first:last], drawn[last:]


class _TextItem:
    """An item that is text: thoughts or a message. It has one part."""

    def __init__(self, kind: str, identity: str) -> None:
        self.kind = kind
        self._text, self._logprobs = "", list[Json]()
        self._id = identity
        self._place = {"item_id": self._id, "content_index": 0}
        self._name = "response.output_text" if kind == "message" else "response.reasoning_text"

    def begin(self) -> list[Json]:
        return [
            {"type": "response.output_item.added", "item": self._item("in_progress", [])},
            {"type": "response.content_part.added", **self._place, "part": self._part()},
        ]

    def write(self, text: str, logprobs: list[Json]) -> list[Json]:
        self._text += text
        self._logprobs += logprobs
        kind = {"type": f"{self._name}.delta", **self._place, **self._with(logprobs)}
        return [{**kind, "delta": text}] if text else []

    def end(self, status: str) -> list[Json]:
        kind = {"type": f"{self._name}.done", **self._place, **self._with(self._logprobs)}
        return [
            {**kind, "text": self._text},
            {"type": "response.content_part.done", **self._place, "part": self._part()},
            {"type": "response.output_item.done", "item": self._item(status, [self._part()])},
        ]

    def _with(self, logprobs: list[Json]) -> Json:
        """OpenAI's types demand the field in a message."""
        return {"logprobs": logprobs} if self.kind == "message" else {}

    def _item(self, status: str, content: list[Json]) -> Json:
        form: Json = {"role": "assistant"} if self.kind == "message" else {"summary": []}
        return {"id": self._id, "type": self.kind, "status": status, **form, "content": content}

    def _part(self) -> Json:
        if self.kind == "message":
            return {
                "type": "output_text",
                "text": self._text,
                "annotations": [],
                **self._with(self._logprobs[:]),
            }
        return {"type": "reasoning_text", "text": self._text}
