"""A response while it is made: the text of its row becomes items, and each step the events that tell of it.

The items are thoughts (`reasoning`), the answer (`message`) and a call (`function_call`), in this order. A
call waits for the end of the row, so that they do not depend on how the text came in pieces.
"""

import time
from uuid import uuid4

from routes.chat.answer import END_OF_THOUGHT, AnswerReader
from routes.chat.tools import ToolCall
from routes.http.errors import openai_error
from routes.http.replies import RowResult
from rwkv_batch.wire.client import Job
from rwkv_batch.wire.protocol import RowDelta

FAILURES = {
    400: "invalid_prompt",
    429: "rate_limit_exceeded",
}  # status -> code of a response that failed; others: server_error


class ResponseReply:
    """`response` is the response object as it stands; it is final when `last` has been called."""

    def __init__(self, response: dict, reader: AnswerReader, think: bool) -> None:
        self.response = response
        self._reader = reader
        self._thinking = think
        self._raw = ""  # the end of the thoughts, as they came
        self._item: _TextItem | None = None  # the one being written
        self._call: ToolCall | None = None
        self._number = 0  # of the next event
        self._tokens = self._reasoning_tokens = 0
        self._finish_reason = "stop"

    def whole(self, job: Job, rows: list[RowResult]) -> dict:
        """The final response. `events` has taken what `rows` could tell."""
        self.last(job)
        return self.response

    def first(self, job: Job) -> list[dict]:
        return [
            self._event("response.created", response=self.response),
            self._event("response.in_progress", response=self.response),
        ]

    def events(self, deltas: list[RowDelta]) -> list[dict]:
        told: list[dict] = []
        reasoning = content = ""
        ended = False
        for delta in deltas:
            self._count(delta)
            piece = self._reader.feed(delta.text)
            if delta.finish_reason:
                self._finish_reason, ended = delta.finish_reason, True
                piece += self._reader.finish()
            reasoning, content, self._call = (
                reasoning + piece.reasoning,
                content + piece.content,
                self._call or piece.call,
            )
        if reasoning:
            told += self._write("reasoning", reasoning)
        if content:
            told += self._write("message", content)
        return told + self._end() if ended else told

    def last(self, job: Job) -> list[dict]:
        """The one event that the response is over; the response is final."""
        status = self._status()
        prompt, cached = sum(job.prompt_tokens), sum(job.cached_tokens)
        self.response = self.response | {
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "usage": {
                "input_tokens": prompt,
                "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
                "output_tokens": self._tokens,
                "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens},
                "total_tokens": prompt + self._tokens,
            },
        }
        if status == "completed":
            self.response["completed_at"] = int(time.time())
        return [self._event(f"response.{status}", response=self.response)]

    def error(self, message: str, status: int) -> dict:
        return openai_error(message, status)

    def failed(self, message: str, status: int) -> list[dict]:
        """The one event that the response has failed."""
        error = {"code": FAILURES.get(status, "server_error"), "message": message}
        self.response = self.response | {"status": "failed", "error": error}
        return [self._event("response.failed", response=self.response)]

    def _count(self, delta: RowDelta) -> None:
        self._tokens += delta.tokens
        if self._thinking:
            self._reasoning_tokens += delta.tokens
            self._raw += delta.text
            self._thinking = END_OF_THOUGHT not in self._raw
            self._raw = self._raw[-len(END_OF_THOUGHT) :]

    def _status(self) -> str:
        """A call that is complete is all that was wanted, also when the text behind it was cut."""
        return "incomplete" if self._finish_reason == "length" and not self._call else "completed"

    def _write(self, kind: str, text: str) -> list[dict]:
        """`text` goes to the item being written if that is of this kind, otherwise to a new one."""
        told = []
        if self._item is None or self._item.kind != kind:
            told += self._close("completed")
            self._item = _TextItem(kind)
            told += self._tell(self._item.begin())
        return told + self._tell(self._item.write(text))

    def _end(self) -> list[dict]:
        """The row has ended: close what is open, say that there was nothing if there was nothing, and tell
        the call.
        """
        told = self._write("message", "") if self._item is None and self._call is None else []
        told += self._close(self._status())
        return told + self._tell_call(self._call) if self._call else told

    def _close(self, status: str) -> list[dict]:
        if self._item is None:
            return []
        told = self._tell(self._item.end(status))
        self._add(told[-1]["item"])
        self._item = None
        return told

    def _tell_call(self, call: ToolCall) -> list[dict]:
        item = {
            "id": "fc_" + uuid4().hex,
            "type": "function_call",
            "status": "in_progress",
            "call_id": "call_" + uuid4().hex,
            "name": call.name,
            "arguments": "",
        }
        done = item | {"status": "completed", "arguments": call.arguments}
        told = self._tell(
            [
                {"type": "response.output_item.added", "item": item},
                {
                    "type": "response.function_call_arguments.delta",
                    "item_id": item["id"],
                    "delta": call.arguments,
                },
                {
                    "type": "response.function_call_arguments.done",
                    "item_id": item["id"],
                    "name": call.name,
                    "arguments": call.arguments,
                },
                {"type": "response.output_item.done", "item": done},
            ]
        )
        self._add(done)
        return told

    def _add(self, item: dict) -> None:
        self.response = self.response | {"output": [*self.response["output"], item]}

    def _tell(self, events: list[dict]) -> list[dict]:
        """Events about the next item of the output."""
        index = len(self.response["output"])
        return [self._event(event.pop("type"), output_index=index, **event) for event in events]

    def _event(self, kind: str, **fields: object) -> dict:
        number, self._number = self._number, self._number + 1
        return {"type": kind, "sequence_number": number, **fields}


class _TextItem:
    """An item that is text: thoughts or a message. It has one part."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._text = ""
        self._id = ("msg_" if kind == "message" else "rs_") + uuid4().hex
        self._place = {"item_id": self._id, "content_index": 0}
        self._name = "response.output_text" if kind == "message" else "response.reasoning_text"
        self._logprobs: dict = (
            {"logprobs": []} if kind == "message" else {}
        )  # OpenAI's types demand the field

    def begin(self) -> list[dict]:
        return [
            {"type": "response.output_item.added", "item": self._item("in_progress", [])},
            {"type": "response.content_part.added", **self._place, "part": self._part()},
        ]

    def write(self, text: str) -> list[dict]:
        self._text += text
        return (
            [{"type": f"{self._name}.delta", **self._place, **self._logprobs, "delta": text}] if text else []
        )

    def end(self, status: str) -> list[dict]:
        return [
            {"type": f"{self._name}.done", **self._place, **self._logprobs, "text": self._text},
            {"type": "response.content_part.done", **self._place, "part": self._part()},
            {"type": "response.output_item.done", "item": self._item(status, [self._part()])},
        ]

    def _item(self, status: str, content: list[dict]) -> dict:
        form: dict = {"role": "assistant"} if self.kind == "message" else {"summary": []}
        return {"id": self._id, "type": self.kind, "status": status, **form, "content": content}

    def _part(self) -> dict:
        if self.kind == "message":
            return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": []}
        return {"type": "reasoning_text", "text": self._text}
