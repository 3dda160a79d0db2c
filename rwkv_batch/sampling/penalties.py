"""What the tokens that a row has drawn take off its logits."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from rwkv_batch.wire.protocol import Sampling

# "nucleus" does not count these: space, TAB, LF and the digits. Its origin lists TAB where LF was meant; here
# both are.
UNCOUNTED = frozenset((33, 10, 11, *range(49, 59)))
DRAWN = np.dtype([("id", "i8"), ("decaying", "f8"), ("count", "f8")])  # what a row keeps of an id


@dataclass(frozen=True)
class PenaltyRule:
    """The penalty of a drawn token: a part that decays, and a part that stays.

    The decaying part grows by `first` when the token is drawn for the first time and by `later` each further
    time, unless the token is one of `uncounted`; at each token drawn after it, it is multiplied by `decay`.
    The part that stays is `flat`, and `per_count` for every time that the token was drawn.
    """

    first: float = 0.0
    later: float = 0.0
    decay: float = 1.0
    uncounted: frozenset[int] = frozenset()
    flat: float = 0.0
    per_count: float = 0.0


def rule_from_sampling(sampling: Sampling) -> PenaltyRule | None:
    """The rule of a request's rows; None when they have no penalties.

    Those of OpenAI apply to every method, the alphas to "rapid" and "nucleus".
    """
    flat, per_count = sampling.presence_penalty, sampling.frequency_penalty
    if sampling.method == "rapid" and (sampling.alpha_presence or sampling.alpha_frequency):
        return PenaltyRule(
            first=sampling.alpha_presence,
            later=sampling.alpha_frequency,
            decay=sampling.alpha_decay,
            flat=flat,
            per_count=per_count,
        )
    if sampling.method == "nucleus" and (sampling.alpha_presence or sampling.alpha_frequency):
        # Its counts decay before each draw, so a token has decayed once when it first matters; its presence
        # penalty never decays.
        counted = sampling.alpha_frequency * sampling.alpha_decay
        return PenaltyRule(
            first=counted,
            later=counted,
            decay=sampling.alpha_decay,
            uncounted=UNCOUNTED,
            flat=flat + sampling.alpha_presence,
            per_count=per_count,
        )
    return PenaltyRule(flat=flat, per_count=per_count) if flat or per_count else None


class Penalties:
    """The penalties of one row, kept for the ids that it has drawn."""

    def __init__(self, rule: PenaltyRule, drawn: Iterable[int] = ()) -> None:
        """`drawn`: what the row has drawn already."""
        self._rule = rule
        self._places: dict[int, int] = {}  # id -> its place in the array
        self._drawn = np.zeros(64, DRAWN)
        for token in drawn:
            self.record(token)

    @property
    def drawn(self) -> np.ndarray:
        """`[ids]` DRAWN, in the order in which they were first drawn."""
        return self._drawn[: len(self._places)]

    def amounts(self) -> tuple[np.ndarray, np.ndarray]:
        """The ids drawn so far, each once, and what to subtract from their logits."""
        drawn = self.drawn
        # Added up in the order of the kernel.
        return drawn["id"], drawn["decaying"] + self._rule.flat + self._rule.per_count * drawn["count"]

    def record(self, token: int) -> None:
        """`token` has been drawn. A first time is recognised by the id, since its penalty may be 0."""
        size = len(self._places)
        place = self._places.setdefault(token, size)
        if size == len(self._drawn):
            self._drawn = np.resize(self._drawn, 2 * size)
        self._drawn["decaying"][:size] *= self._rule.decay
        if place == size:
            self._drawn[place] = token, 0, 0
        if token not in self._rule.uncounted:
            self._drawn["decaying"][place] += self._rule.first if place == size else self._rule.later
        self._drawn["count"][place] += 1
