"""What may follow behind each token of a draft, in a text that a grammar binds."""

from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher

from rwkv_batch.text.grammars import MaskThreads


class MasksAhead:
    """A copy of one row's matcher, which a draft moves on: what is refused leaves the row's own as it is."""

    def __init__(self, matcher: LLMatcher, mask: np.ndarray, threads: MaskThreads) -> None:
        """The row has no token in flight. mask: `[words]` int32, of what it draws next."""
        self._matcher, self._threads = matcher.deep_copy(), threads
        self._masks: list[np.ndarray | None] = [mask]  # the copy has seen a token less than these are
        self._draft: list[int] = []

    def forced(self) -> list[int]:
        """The only tokens that can come next, where the text does not begin otherwise."""
        return list(self._matcher.compute_ff_tokens())

    def fitting(self, tokens: Sequence[int]) -> int:
        """How many of these can come next."""
        return int(self._matcher.validate_tokens(list(tokens)))

    def follow(self, draft: Sequence[int]) -> None:
        """This is the draft. What was one before is its beginning."""
        self._draft = list(draft)

    def mask(self, count: int) -> np.ndarray | None:
        """What may come behind so many tokens of the draft; None: that could not be computed."""
        while len(self._masks) <= count and self._masks[-1] is not None:
            self._matcher.consume_token(self._draft[len(self._masks) - 1])
            bits, errors = self._threads.masks([self._matcher])
            self._masks.append(None if errors[0] else bits[0])
        return self._masks[count] if count < len(self._masks) else None
