"""The reply of a message: the text of its row becomes content blocks, and events that report each change.

The blocks are a thought, the answer and calls, in this order. Calls come when the row has finished, so that
the blocks do not depend on how the text came in pieces.
"""

import hashlib
import json
from uuid import uuid4

from routes.chat.answer import AnswerPart, RowAnswer
from routes.chat.calls import ToolCall
from routes.http.errors import Json, anthropic_shape
from routes.http.replies import Reply, TypedEvents
from rwkv_batch.wire.client import Job
from rwkv_batch.wire.protocol import RowDelta

# why a row has finished -> why a message stops
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "paused": "pause_turn"}
# type of a block -> type of the deltas that write its text
DELTAS = {"thinking": "thinking_delta", "text": "text_delta"}


class MessageReply(TypedEvents):
    """`stop_sequences` are those of the request; without `thoughts` the text of thoughts is left out."""

    shape = staticmethod(anthropic_shape)

    def __init__(self, model_id: str, row: RowAnswer, stop_sequences: list[str], thoughts: bool) -> None:
        self._row, self._stop_sequences, self._thoughts = row, stop_sequences, thoughts
        self._message: Json = {
            "id": "msg_" + uuid4().hex,
            "type": "message",
            "role": "assistant",
            "model": model_id,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }
        self._content: list[Json] = []
        self._open: Json | None = None  # the block being written
        self._digest = hashlib.sha256()  # of its text

    def whole(self, job: Job, deltas: list[RowDelta]) -> Json:
        self.events(deltas)
        return self._message | self._stop() | {"content": self._content, "usage": self._usage(job)}

    def first(self, job: Job) -> list[Json]:
        return [
            {"type": "message_start", "message": self._message | {"usage": self._usage(job)}},
            {"type": "ping"},
        ]

    def events(self, deltas: list[RowDelta]) -> list[Json]:
        piece = sum(map(self._row.take, deltas), AnswerPart())
        events = self._write("thinking", piece.reasoning) if piece.reasoning else []
        if piece.content:
            events += self._write("text", piece.content)
        if self._row.finish_reason:
            events += self._close()
            events += [event for call in self._row.calls for event in self._call(call)]
        return events

    def last(self, job: Job) -> list[Json]:
        return [
            {"type": "message_delta", "delta": self._stop(), "usage": self._usage(job)},
            {"type": "message_stop"},
        ]

    def _stop(self) -> Json:
        if self._row.calls:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if self._row.stop in self._stop_sequences:
            return {"stop_reason": "stop_sequence", "stop_sequence": self._row.stop}
        return {"stop_reason": STOP_REASONS[self._row.finish_reason or "stop"], "stop_sequence": None}

    def _usage(self, job: Job) -> Json:
        """`input_tokens` are those that had to be computed."""
        cached = sum(job.acceptance.cached_tokens)
        return {
            "input_tokens": sum(job.acceptance.prompt_tokens) - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self._row.tokens,
            "service_tier": "standard",
        }

    def _write(self, kind: str, text: str) -> list[Json]:
        """`text` goes to the block being written if that is of this kind, otherwise to a new one."""
        events = []
        if self._open is None or self._open["type"] != kind:
            events += self._close()
            self._open = {"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {})
            self._digest = hashlib.sha256()
            events.append(self._start(self._open))
        self._digest.update(text.encode())
        if kind == "thinking" and not self._thoughts:
            return events
        self._open = self._open | {kind: self._open[kind] + text}
        return [*events, self._delta({"type": DELTAS[kind], kind: text})]

    def _close(self) -> list[Json]:
        """Ends the block being written. A thought is signed, as clients send back those that are."""
        if self._open is None:
            return []
        events = []
        if self._open["type"] == "thinking":
            self._open = self._open | {"signature": self._digest.hexdigest()}
            events.append(self._delta({"type": "signature_delta", "signature": self._open["signature"]}))
        block, self._open = self._open, None
        return [*events, self._end(block)]

    def _call(self, call: ToolCall) -> list[Json]:
        block = {"type": "tool_use", "id": "toolu_" + uuid4().hex, "name": call.name, "input": {}}
        return [
            self._start(block),
            self._delta({"type": "input_json_delta", "partial_json": call.arguments}),
            self._end(block | {"input": json.loads(call.arguments)}),
        ]

    def _start(self, block: Json) -> Json:
        return {"type": "content_block_start", "index": len(self._content), "content_block": block}

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": len(self._content), "delta": delta}

    def _end(self, block: Json) -> Json:
        self._content.append(block)
        return {"type": "content_block_stop", "index": len(self._content) - 1}


class TokenCount(Reply):
    """How many tokens the prompt has."""

    shape = staticmethod(anthropic_shape)

    def whole(self, job: Job, deltas: list[RowDelta]) -> Json:
        return {"input_tokens": sum(job.acceptance.prompt_tokens)}

    def events(self, deltas: list[RowDelta]) -> list[Json]:
        return []  # it is not streamed
