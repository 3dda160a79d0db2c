"""Stop strings in a stream of text.

No text leaves while it may still turn out to be a part of a stop string.
"""

from collections.abc import Sequence


class StopStrings:
    """Ends a text at the first stop string, however the text is split into pieces.

    The first one is the one that begins first. A stop string that is complete while an earlier one is still
    possible waits until that one is complete too, or can no longer match.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises ValueError when one of `stops` is empty."""
        if not all(stops):
            raise ValueError(
                "A stop string is empty, which would stop before the first character; leave it out."
            )
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def feed(self, text: str) -> tuple[str, bool]:
        """The text that can leave now, and whether a stop string has ended it.

        Feed nothing more after it has ended.
        """
        text = self._held + text
        begin = _first_begin(text, self._stops)
        found = _first_match(text, self._stops)
        if found is not None and found <= begin:
            self._held, self.stopped = "", True
            return text[:found], True
        self._held = text[begin:]
        return text[:begin], False

    def finish(self) -> str:
        """The text held back, when no more comes.

        It ends before a stop string that it contains; `stopped` is True then.
        """
        held, self._held = self._held, ""
        found = _first_match(held, self._stops)
        if found is None:
            return held
        self.stopped = True
        return held[:found]


def _first_match(text: str, stops: Sequence[str]) -> int | None:
    """Start of the first complete stop string; None if there is none."""
    return min((at for stop in stops if (at := text.find(stop)) >= 0), default=None)


def _first_begin(text: str, stops: Sequence[str]) -> int:
    """Start of the longest suffix that is a proper prefix of a stop string; len(text) if there is none."""
    begin = len(text)
    for stop in stops:
        for at in range(max(0, len(text) - len(stop) + 1), begin):
            if stop.startswith(text[at:]):
                begin = at
                break
    return begin
