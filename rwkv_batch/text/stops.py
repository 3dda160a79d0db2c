"""Stop strings in a stream of text.

No text leaves while it may still turn out to be a part of a stop string.
"""

from collections.abc import Sequence
from typing import Literal


class StopStrings:
    """Ends a text at the first stop string, however the text is split into pieces.

    The first one is the one that begins first. A stop string that is complete while an earlier one is still
    possible waits until that one is complete too, or can no longer match. Of those that begin at one place,
    the shortest counts.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises ValueError when one of `stops` is empty."""
        if not all(stops):
            raise ValueError(
                "A stop string is empty, which would stop before the first character; leave it out."
            )
        self._stops = tuple(stops)
        self._held = ""
        self.found = ""  # the stop string that has ended the text

    @property
    def stopped(self) -> bool:
        return bool(self.found)

    def feed(self, text: str) -> tuple[str, bool]:
        """The text that can leave now, and whether a stop string has ended it.

        Feed nothing more after it has ended.
        """
        text = self._held + text
        begin, match = self._begin(text), self._match(text)
        if match and match[0] <= begin:
            self._held, (end, self.found) = "", match
            return text[:end], True
        self._held = text[begin:]
        return text[:begin], False

    def finish(self) -> str:
        """The text held back, when no more comes.

        It ends before a stop string that it contains, which is `found` then.
        """
        held, self._held = self._held, ""
        match = self._match(held)
        if not match:
            return held
        end, self.found = match
        return held[:end]

    def _begin(self, text: str) -> int:
        """Where in `text` a stop string may have begun that is not complete; its length if there is none."""
        return _first_begin(text, self._stops)

    def _match(self, text: str) -> tuple[int, str] | None:
        """Where the first stop string begins in `text`, and the string."""
        return _first_match(text, self._stops)


class AnswerStops(StopStrings):
    """Stop strings of which some count in the answer only, and not in a thought in front of it.

    The text may begin with `rest`, the end of a tag that was begun before it. Then there is a thought if
    `inside` says so, or if `opens` comes next, behind any white space; it ends with `closes`. The answer
    begins behind the line feeds that follow a tag. Nothing leaves until it is known whether there is a
    thought.
    """

    def __init__(
        self, stops: Sequence[str], late: Sequence[str], opens: str, closes: str, rest: str, inside: bool
    ) -> None:
        """Raises ValueError when one of the stop strings is empty."""
        super().__init__((*stops, *late))
        self._stops, self._late = tuple(stops), tuple(late)
        self._opens, self._closes, self._rest, self._inside = opens, closes, rest, inside
        self._place: Literal["head", "thought", "behind", "answer"] = "head"
        self._head = ""  # in the head all text, in the thought what may be the beginning of `closes`
        self._read = 0  # characters fed
        self._left = 0  # characters that have left
        self._answer: int | None = None  # where the answer begins

    def feed(self, text: str) -> tuple[str, bool]:
        self._find_answer(text)
        shown, stopped = super().feed(text)
        self._left += len(shown)
        return shown, stopped

    def finish(self) -> str:
        if self._place == "head":
            self._answer = self._head_length()
        return super().finish()

    def _begin(self, text: str) -> int:
        if self._place == "head":
            return 0
        begin, skipped = super()._begin(text), self._before_answer(text)
        return min(begin, skipped + _first_begin(text[skipped:], self._late))

    def _match(self, text: str) -> tuple[int, str] | None:
        skipped = self._before_answer(text)
        late = _first_match(text[skipped:], self._late)
        matches = (super()._match(text), late and (skipped + late[0], late[1]))
        return min((match for match in matches if match), default=None)

    def _before_answer(self, text: str) -> int:
        """How much of `text`, none of which has left, stands in front of the answer."""
        return len(text) if self._answer is None else max(0, self._answer - self._left)

    def _find_answer(self, text: str) -> None:
        start, self._read = self._read, self._read + len(text)
        if self._place == "head":
            self._head += text
            start = len(self._rest) if self._head.startswith(self._rest) else 0
            body = self._head[start:].lstrip()
            if self._inside or body.startswith(self._opens):
                text, self._head, self._place = self._head[start:], "", "thought"
            elif self._opens.startswith(body):
                return
            else:
                self._answer, self._place = self._head_length(), "answer"
        if self._place == "thought":
            looked_at = self._head + text
            at = looked_at.find(self._closes)
            if at < 0:
                self._head = looked_at[1 - len(self._closes) :]
                return
            end = at + len(self._closes) - len(self._head)
            text, start, self._place = text[end:], start + end, "behind"
        if self._place == "behind" and (solid := text.lstrip("\n")):
            self._answer, self._place = start + len(text) - len(solid), "answer"

    def _head_length(self) -> int:
        """Length of the end of a tag with which the text begins, and of the line feeds behind it."""
        behind = self._head.removeprefix(self._rest).lstrip("\n") if self._rest else self._head
        return len(self._head) - len(behind)


def _first_match(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """Start of the first complete stop string, and the string; None if there is none."""
    return min(((at, stop) for stop in stops if (at := text.find(stop)) >= 0), default=None)


def _first_begin(text: str, stops: Sequence[str]) -> int:
    """Start of the longest suffix that is a proper prefix of a stop string; len(text) if there is none."""
    begin = len(text)
    for stop in stops:
        for at in range(max(0, len(text) - len(stop) + 1), begin):
            if stop.startswith(text[at:]):
                begin = at
                break
    return begin
