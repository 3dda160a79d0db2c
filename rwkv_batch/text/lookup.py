"""What may come next in a row's text, looked up where its last tokens stood before.

Texts repeat themselves and what they were asked about: a program that is edited, a list, a translation with
terms. Where the last two tokens of a row stood before, in its prompt, its answer or a text that its request
expects, the tokens behind that place are likely to come next.
"""

from collections.abc import Sequence
from itertools import pairwise

MOST_LOOKED_UP = 32768  # tokens of a prompt, the last ones, and of an expected text, the first ones
BORDER = -1  # between texts: no draft goes over it

# How a place was found. Behind a token that was right there is the next kind.
GUESSED = 0  # the token there was wrong, and the row may go on behind it
FOUND = 1  # by the last two tokens
EXPECTED = 3  # the beginning of an expected text
LONGEST = 6  # so many tokens or more were right in a row
# How often the next token of a place of each kind is right, before a row has shown it.
FIRST_RATES = (0.25, 0.25, 0.5, 0.75, 0.8, 0.85, 0.9)
FIRST_WEIGHT = 2.0  # tokens that these count as
FORGETTING = 0.95  # what a token counts when one more has come


class Lookup:
    """The tokens of one row, and the place behind which its next ones may stand.

    It learns how often such a place is right from all that the row draws, whether there was a draft or not.
    """

    __slots__ = ("_at", "_counted", "_kind", "_places", "_right", "_taken", "_tokens")

    def __init__(self, prompt: Sequence[int], expected: Sequence[int] = ()) -> None:
        """expected: a text that may come back as the answer; empty: there is none."""
        self._tokens: list[int] = [
            *expected[:MOST_LOOKED_UP],
            BORDER,
            *prompt[-MOST_LOOKED_UP:],
        ]
        self._taken = 0  # drawn tokens that are among these
        # By the two tokens in front of it: the last place where these stand. It is not the end.
        pairs, places = pairwise(self._tokens), range(2, len(self._tokens))
        self._places: dict[tuple[int, ...], int] = dict(zip(pairs, places, strict=False))
        self._at, self._kind = (0, EXPECTED) if expected else (-1, FOUND)
        self._right = [rate * FIRST_WEIGHT for rate in FIRST_RATES]
        self._counted = [FIRST_WEIGHT] * len(FIRST_RATES)
        if self._at < 0:
            self._find()

    def follow(self, drawn: Sequence[int]) -> None:
        """The row has drawn these, of which the first ones were known."""
        tokens, places = self._tokens, self._places
        for token in drawn[self._taken :] if self._taken else drawn:
            at, kind = self._at, self._kind
            if at >= 0:
                right = tokens[at] == token
                self._counted[kind] = self._counted[kind] * FORGETTING + 1
                self._right[kind] = self._right[kind] * FORGETTING + right
                if right:
                    self._at, self._kind = at + 1, min(kind + 1 if kind else FOUND + 1, LONGEST)
                else:
                    self._at, self._kind = (at + 1, GUESSED) if kind > FOUND else (-1, FOUND)
            places[tuple(tokens[-2:])] = len(tokens)
            tokens.append(token)
            if self._at < 0 or self._kind == GUESSED or tokens[self._at] == BORDER:
                self._find()
        self._taken = len(drawn)

    def draft(self, most: int, least_chance: float) -> tuple[list[int], float]:
        """The tokens behind the place, `most` at most, and how many of them are right on average.

        Each is right, with those before it, with a chance above `least_chance`. What stands at the end of the
        text is taken to repeat itself.
        """
        at, kind, chance, expected = self._at, self._kind, 1.0, 0.0
        draft = list[int]()
        if at < 0:
            return draft, expected
        tokens, period = self._tokens, len(self._tokens) - at
        for count in range(most):
            token = tokens[at + count % period]
            chance *= self._right[kind] / self._counted[kind]
            if chance <= least_chance or token == BORDER:
                break
            draft.append(token)
            expected += chance
            kind = min(kind + 1 if kind else FOUND + 1, LONGEST)
        return draft, expected

    def _find(self) -> None:
        """Look for the last tokens; a place that is guessed stays where they stand nowhere."""
        found = self._places.get(tuple(self._tokens[-2:]), -1)
        if found >= 0 and self._tokens[found] != BORDER:
            self._at, self._kind = found, FOUND
        elif self._at >= len(self._tokens) or self._tokens[self._at] == BORDER:
            self._at, self._kind = -1, FOUND
