"""Splits what the model writes into thoughts, answer and tool call, however the text comes in pieces."""

from dataclasses import dataclass

from routes.chat.tools import ToolCall, ToolCallParser, partial_suffix

END_OF_THOUGHT = "</think>"


@dataclass
class Piece:
    """New text of an answer."""

    reasoning: str = ""
    content: str = ""

    def __add__(self, other: "Piece") -> "Piece":
        return Piece(self.reasoning + other.reasoning, self.content + other.content)


class ThinkSplitter:
    """Separates the thoughts from the answer to a prompt that ends in `<think`.

    Thoughts lose the rest of their opening tag, their closing tag and the line feeds next to these; the
    answer loses the line feeds it begins with. An answer that never closes the tag is all thoughts.
    """

    def __init__(self) -> None:
        self.thinking = True
        self._fresh = True  # nothing of the current part has been shown
        self._held = ""
        self._opened = False  # the ">" of the opening tag is behind us

    def feed(self, text: str) -> tuple[str, str]:
        """(thoughts, answer) that can be shown now."""
        if not self.thinking:
            return "", self._begin(text)
        self._held += text
        if not self._opened and self._held:
            self._held, self._opened = self._held.removeprefix(">"), True
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

    def finish(self) -> str:
        """The thoughts that were held back, at the end of the answer."""
        thoughts, self._held = self._begin(self._held), ""
        return thoughts

    def _begin(self, text: str) -> str:
        if self._fresh:
            text = text.lstrip("\n")
            self._fresh = not text
        return text


class CallReader:
    """Separates a tool call from the text around it.

    White space is dropped at the beginning of the answer, and at its end if there is a call. It is held back
    until that is known.
    """

    def __init__(self, opening: str) -> None:
        self.parser = ToolCallParser()
        self.parser.feed(opening)
        self._shown = False
        self._space = ""

    def feed(self, text: str) -> str:
        return self._text(self.parser.feed(text))

    def finish(self) -> str:
        text = self._text(self.parser.finish())
        return text if self.parser.call else text + self._space

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
    """One row's answer. `opening` is text of the answer that the prompt already holds."""

    def __init__(self, think: bool = False, calls: bool = False, opening: str = "") -> None:
        self._think = ThinkSplitter() if think else None
        self._calls = CallReader(opening) if calls else None

    @property
    def thinking(self) -> bool:
        """Whether the end of the thoughts has not come yet."""
        return self._think is not None and self._think.thinking

    @property
    def call(self) -> ToolCall | None:
        """The call, once it is complete."""
        return self._calls.parser.call if self._calls else None

    def feed(self, text: str) -> Piece:
        """What can be shown after `text`."""
        reasoning, text = self._think.feed(text) if self._think else ("", text)
        return Piece(reasoning, self._calls.feed(text) if self._calls else text)

    def finish(self) -> Piece:
        """What was held back, at the end of the row."""
        return Piece(self._think.finish() if self._think else "", self._calls.finish() if self._calls else "")
