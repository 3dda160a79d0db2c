"""Stop strings in a stream of text: nothing that may turn out to be one of them is shown before that is
known.
"""

from collections.abc import Sequence


class StopStrings:
    """Ends a text where the first of some strings begins, however the text is split into pieces.

    First is the one that begins first. A string that has come in full while an earlier one is still under way
    therefore waits until that one has come too or has failed.
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
        """The text that can be shown now, and whether a stop string has ended it. After that, do not feed any
        more.
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
        """No more text comes: what was held back, up to a stop string if it has one (`stopped` says so)."""
        held, self._held = self._held, ""
        found = _first_match(held, self._stops)
        if found is None:
            return held
        self.stopped = True
        return held[:found]


def _first_match(text: str, stops: Sequence[str]) -> int | None:
    """Where the first whole stop string begins."""
    return min((at for stop in stops if (at := text.find(stop)) >= 0), default=None)


def _first_begin(text: str, stops: Sequence[str]) -> int:
    """Where the longest suffix begins that is a beginning of a stop string, but not all of one; len(text) if
    there is none.
    """
    begin = len(text)
    for stop in stops:
        for at in range(max(0, len(text) - len(stop) + 1), begin):
            if stop.startswith(text[at:]):
                begin = at
                break
    return begin
