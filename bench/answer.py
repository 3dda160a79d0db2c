"""Reads one answer as it arrives, streamed or not.

It keeps what the report needs: which row got text, when, and how much.
"""

from array import array
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import Struct


class Content(Struct):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: Any = None


class Choice(Struct):
    index: int = 0
    text: str | None = None
    delta: Content | None = None
    message: Content | None = None
    finish_reason: str | None = None


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int = 0


class ReplyBody(Struct):
    """A whole reply or one streamed event, of any of the APIs; what is not measured is skipped."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


_read_reply = msgspec.json.Decoder(ReplyBody).decode


@dataclass
class Record:
    """The answer to one request. Times are seconds of `time.monotonic`.

    The arrays hold one item per text event of a row.
    """

    index: int
    start: float
    late: float  # seconds after the moment it was due
    end: float = 0.0
    failure: str = ""  # empty: it succeeded
    streamed: bool = False
    times: array = field(default_factory=lambda: array("d"))  # when the text was read
    rows: array = field(default_factory=lambda: array("l"))  # whose text it is
    texts: dict[int, list[str]] = field(default_factory=dict)  # of each row, one item an event
    finish: dict[int, str] = field(default_factory=dict)
    usage: tuple[int, int] | None = None  # prompt and completion tokens, if the server says so


class Answer:
    """Takes the body of one reply in pieces and fills a record."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.done = False  # [DONE] has come
        self._tail = b""  # a line that has not ended yet
        self._event: list[bytes] = []

    def feed_events(self, data: bytes, now: float) -> int:
        """Body bytes of an event stream. Returns how many text events they completed."""
        self.record.streamed = True
        before = len(self.record.times)
        lines = (self._tail + data).split(b"\n")
        self._tail = lines.pop()
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._event.append(line[5:])
            elif not line and self._event:
                self._take(b"\n".join(self._event).strip(), now)
                self._event.clear()
        return len(self.record.times) - before

    def take_whole(self, body: bytes, now: float) -> None:
        """The body of a reply that is not streamed."""
        self._read(body, now, "the reply")
        if not self.record.failure and not self.record.texts and not self.record.finish:
            self.record.failure = "the reply holds no choices"

    def _take(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self.done = True
        else:
            self._read(data, now, "an event")

    def _read(self, data: bytes, now: float, what: str) -> None:
        try:
            reply = _read_reply(data)
        except (msgspec.DecodeError, UnicodeDecodeError):
            self.record.failure = (
                self.record.failure or f"{what} is not the JSON of an OpenAI-compatible reply"
            )
            return
        record = self.record
        if reply.error:
            record.failure = record.failure or f"error in {what}: {error_text(data)}"
        for choice in reply.choices:
            part = choice.delta or choice.message
            text = choice.text or ""
            if part:
                text = (part.reasoning_content or "") + (part.content or "")
                if part.tool_calls:
                    text += msgspec.json.encode(part.tool_calls).decode()
            if text:
                record.times.append(now)
                record.rows.append(choice.index)
                record.texts.setdefault(choice.index, []).append(text)
            if choice.finish_reason:
                record.finish[choice.index] = choice.finish_reason
        if reply.usage:
            record.usage = (reply.usage.prompt_tokens, reply.usage.completion_tokens)


def error_text(body: bytes) -> str:
    """The sentence in an error body of any of the usual shapes, on one line."""
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        found = body.decode("utf-8", "replace")
    for key in ("error", "message", "detail"):
        if isinstance(found, dict) and key in found:
            found = found[key]
    return " ".join(str(found).split())[:200]
