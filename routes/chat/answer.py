"""Splits what the model writes into thoughts, answer and tool calls, however the text comes in pieces."""

from collections.abc import Container
from dataclasses import dataclass

from routes.chat.calls import ToolCall, ToolCallParser, partial_suffix
from rwkv_batch.chat.templates import END_OF_THOUGHT, NEARLY_CLOSED, THINK, THOUGHT
from rwkv_batch.wire.protocol import RowDelta


@dataclass
class AnswerPart:
    """New text of an answer."""

    reasoning: str = ""
    content: str = ""

    def __add__(self, other: "AnswerPart") -> "AnswerPart":
        return AnswerPart(self.reasoning + other.reasoning, self.content + other.content)


class ThinkSplitter:
    """Separates the thoughts from the answer.

    `opening`: what the prompt says of a thought. If it leaves the thought open, the answer begins inside of
    it. Otherwise a thought that the model opens unasked, at the beginning of its answer, is told apart too.

    Thoughts lose their tags and the line feeds next to these; the answer loses the line feeds behind a tag
    that the model has written. An answer that never closes the tag is all thoughts.
    """

    def __init__(self, opening: str) -> None:
        self.thinking = opening != "" and NEARLY_CLOSED not in opening
        self._may_think = not self.thinking  # a thought may begin here, unasked
        self._tag_open = opening.endswith((THINK, NEARLY_CLOSED))  # ">" may come first
        self._plain = opening == ""  # the answer follows its head behind a space
        # nothing of the current part has been shown, and its line feeds are dropped
        self._fresh = self.thinking or self._tag_open
        self._held = opening.removeprefix(THOUGHT) if self.thinking and not self._tag_open else ""

    def feed(self, text: str) -> tuple[str, str]:
        """(thoughts, answer) that can be shown now."""
        self._held += text
        if self._tag_open and self._held:
            self._held, self._tag_open = self._held.removeprefix(">"), False
        if self._may_think and not self._begin_thought():
            return "", ""
        if not self.thinking:
            text, self._held = self._held, ""
            return "", self._begin(text)
        thoughts, closed, answer = self._held.partition(END_OF_THOUGHT)
        if closed:
            thoughts = self._begin(thoughts.rstrip("\n"))
            self._held = ""
            self.thinking, self._fresh = False, True
            return thoughts, self._begin(answer)
        sure = len(self._held) - partial_suffix(self._held, END_OF_THOUGHT)
        sure = len(self._held[:sure].rstrip("\n"))
        thoughts, self._held = self._begin(self._held[:sure]), self._held[sure:]
        return thoughts, ""

    def finish(self) -> tuple[str, str]:
        """What was held back, at the end of the answer."""
        text, self._held = self._held, ""
        if self.thinking:
            return self._begin(text), ""
        return "", self._begin(self._spaced(text))

    def _begin_thought(self) -> bool:
        """Whether it is known if the answer begins with a thought. If so, it has begun."""
        begin = self._held.lstrip()
        if begin.startswith(THOUGHT):
            self.thinking = self._fresh = True
            self._held = begin.removeprefix(THOUGHT)
        elif THOUGHT.startswith(begin):
            return False
        else:
            self._held = self._spaced(self._held)
        self._may_think = False
        return True

    def _spaced(self, text: str) -> str:
        return text.removeprefix(" ") if self._plain and self._may_think else text

    def _begin(self, text: str) -> str:
        if self._fresh:
            text = text.lstrip("\n")
            self._fresh = not text
        return text


class CallReader:
    """Separates tool calls from the text around them.

    White space is dropped at the beginning of the answer, and at its end if there is a call. It is held back
    until that is known.
    """

    def __init__(self, parser: ToolCallParser) -> None:
        self.parser = parser
        self._shown = False
        self._space = ""

    def feed(self, text: str) -> str:
        return self._text(self.parser.feed(text))

    def finish(self) -> str:
        text = self._text(self.parser.finish())
        return text if self.parser.calls else text + self._space

    def _text(self, text: str) -> str:
        if not self._shown:
            text = text.lstrip()
            self._shown = text != ""
        solid = text.rstrip()
        if not solid:
            self._space += text
            return ""
        before, self._space = self._space, text[len(solid) :]
        return before + solid


class AnswerReader:
    """One row's answer.

    `thought`: what the prompt says of a thought, "" for nothing; None: the answer goes on with a text, and
    has no thought. `calls`: whether calls are looked for, `names`: of which tools (None: any), `most`: how
    many count (None: all). `opening` is text of the answer that the prompt already holds; it is not shown
    where the model has written nothing behind it.
    """

    def __init__(
        self,
        thought: str | None = None,
        calls: bool = False,
        names: Container[str] | None = None,
        most: int | None = None,
        opening: str = "",
    ) -> None:
        split = thought is not None and not opening  # behind the beginning of a call there is no thought
        self._think = ThinkSplitter(thought or "") if split else None
        self._calls = CallReader(ToolCallParser(names, most)) if calls else None
        self._opening = opening if calls else ""

    @property
    def thinking(self) -> bool:
        """Whether the answer is inside a thought."""
        return self._think is not None and self._think.thinking

    @property
    def calls(self) -> list[ToolCall]:
        """The calls that are complete."""
        return self._calls.parser.calls if self._calls else []

    def feed(self, text: str) -> AnswerPart:
        """What can be shown after `text`."""
        if text and self._opening:
            text, self._opening = self._opening + text, ""
        reasoning, text = self._think.feed(text) if self._think else ("", text)
        return AnswerPart(reasoning, self._calls.feed(text) if self._calls else text)

    def finish(self) -> AnswerPart:
        """What was held back, at the end of the row."""
        reasoning, text = self._think.finish() if self._think else ("", "")
        if self._calls:
            text = self._calls.feed(text) + self._calls.finish()
        return AnswerPart(reasoning, text)


class RowAnswer:
    """The answer of a row whose deltas are taken one by one, and what they say besides."""

    def __init__(self, reader: AnswerReader) -> None:
        self._reader = reader
        self.tokens = self.thought_tokens = 0  # drawn; of these, in deltas that hold some of the thought
        self.finish_reason: str | None = None  # None: it goes on
        self.stop = ""  # the stop string that has ended it

    @property
    def thinking(self) -> bool:
        """Whether the answer is inside a thought."""
        return self._reader.thinking

    @property
    def calls(self) -> list[ToolCall]:
        """The calls that are complete."""
        return self._reader.calls

    def take(self, delta: RowDelta) -> AnswerPart:
        """What can be shown after the row's next delta."""
        self.tokens += delta.tokens
        thinking = self._reader.thinking
        piece = self._reader.feed(delta.text)
        if thinking or self._reader.thinking:  # in its last delta, or in the first that is known to be one
            self.thought_tokens += delta.tokens
        if delta.finish_reason:
            self.finish_reason, self.stop = delta.finish_reason, delta.stop
            piece += self._reader.finish()
        return piece
