"""The masks of rows that a grammar binds, computed beside the step that runs.

When a row has drawn a token, its next mask is computed while the device feeds that token. A row whose masks
take long holds up nobody: it takes part in no step before its mask is there.
"""

import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from llguidance import LLMatcher

from rwkv_batch.engine.constraints.ahead import MasksAhead
from rwkv_batch.sampling.masks import RowMasks, mask_words
from rwkv_batch.text.grammars import MaskThreads, too_complex

PATIENCE = 0.01  # seconds that a step waits for the masks of its rows
QUICK = 0.002  # seconds for the mask of one row that steps wait for again
MOST_THREADS = 8

log = logging.getLogger(__name__)


class RowConstraint:
    """What binds one row. All but the mask belong to the engine's thread.

    `mask` `[words]` int32 is of the next draw; None: it is not there yet. `error`: why there is none, in one
    sentence; `broken`: whether that is no fault of the grammar. `slow`: steps do not wait for its masks.
    """

    def __init__(self, matcher: LLMatcher, field: str = "") -> None:
        """matcher: at the text's beginning; the row has it for itself. field: as of wire.protocol.Grammar."""
        self.matcher, self.field = matcher, field
        self.mask: np.ndarray | None = None
        self.error, self.broken = "", False
        self.slow = True  # before its first mask, nobody knows

    @property
    def can_draw(self) -> bool:
        """Whether a step may draw for it: its mask is there, or will be soon enough."""
        return not self.slow or self.mask is not None or self.error != ""


class MaskMaker:
    """Masks for all rows of one engine. `wake` is called from another thread when a slow one is there."""

    def __init__(self, vocab: int, wake: Callable[[], None]) -> None:
        self._words, self._wake = mask_words(vocab), wake
        self._threads: MaskThreads | None = None
        self._quick = ThreadPoolExecutor(1, "masks")
        self._slow = ThreadPoolExecutor(1, "slow-masks")
        self._drawn: list[tuple[RowConstraint, list[int]]] = []  # since the last `submit`
        self._under_way: Future[None] | None = None  # the masks of quick rows
        self._latest_slow: Future[None] | None = None

    def begin(self, row: RowConstraint, drawn: Sequence[int]) -> None:
        """Compute a row's first mask; it has drawn these before, if it is one that goes on."""
        self._latest_slow = self._slow.submit(self._make_slowly, row, list(drawn))

    def drawn(self, row: RowConstraint, tokens: list[int]) -> None:
        """The row has drawn these, at least one; `submit` comes next."""
        row.mask = None
        self._drawn.append((row, tokens))

    def submit(self) -> None:
        """Compute the next masks of the rows that have drawn."""
        if not self._drawn:
            return
        drawn, self._drawn = self._drawn, []
        quick = [(row, tokens) for row, tokens in drawn if not row.slow]
        for row, tokens in drawn:
            if row.slow:
                self._latest_slow = self._slow.submit(self._make_slowly, row, tokens)
        if quick:
            rows, of_rows = zip(*quick, strict=True)
            self._under_way = self._quick.submit(self._make, rows, of_rows)

    def of(self, rows: Sequence[tuple[int, RowConstraint]]) -> RowMasks:
        """The masks of rows, each with its place, as soon as they are there. A row with an error has none."""
        self._settle()
        found = [(place, row.mask) for place, row in rows if row.mask is not None]
        bits = [mask for _, mask in found]
        table = np.stack(bits) if bits else np.zeros((0, self._words), np.int32)
        return RowMasks([place for place, _ in found], table)

    def ahead(self, row: RowConstraint) -> MasksAhead | None:
        """For a draft of a row with nothing in flight; None: its masks are not there, or take long."""
        self._settle()
        if row.slow or row.mask is None or row.error:
            return None
        return MasksAhead(row.matcher, row.mask, self._shared_threads())

    def _settle(self) -> None:
        """Wait for the masks of quick rows."""
        if self._under_way:
            self._under_way.result()
            self._under_way = None

    def wait(self) -> bool:
        """Wait for all that steps do not wait for; False if there has been nothing since the last call."""
        latest, self._latest_slow = self._latest_slow, None
        if latest:
            latest.result()
        return latest is not None

    def close(self) -> None:
        """End the threads."""
        self._quick.shutdown(wait=False, cancel_futures=True)
        self._slow.shutdown(wait=False, cancel_futures=True)

    def _make(self, rows: Sequence[RowConstraint], drawn: Sequence[list[int]]) -> None:
        """In a thread. Where it has taken long, the next masks of these rows are computed one by one."""
        try:
            self._make_together(rows, drawn)
        except Exception as error:
            for row in rows:
                _break(row, error)

    def _make_together(self, rows: Sequence[RowConstraint], drawn: Sequence[list[int]]) -> None:
        began, threads = time.perf_counter(), self._shared_threads()
        matchers = [row.matcher for row in rows]
        for matcher, tokens in zip(matchers, drawn, strict=True):
            if len(tokens) > 1:
                matcher.consume_tokens(tokens[:-1])
        threads.advance(matchers, [tokens[-1] for tokens in drawn])
        bits, errors = threads.masks(matchers)
        slow = time.perf_counter() - began > PATIENCE
        for row, mask, error in zip(rows, bits, errors, strict=True):
            row.slow, row.error = slow, too_complex(error, row.field)
            row.mask = None if error else mask

    def _make_slowly(self, row: RowConstraint, tokens: list[int]) -> None:
        """In a thread."""
        began = time.perf_counter()
        try:
            if tokens:
                row.matcher.consume_tokens(tokens)
            bits, errors = self._shared_threads().masks([row.matcher])
        except Exception as error:
            _break(row, error)
        else:
            row.slow = time.perf_counter() - began > QUICK
            row.error = too_complex(errors[0], row.field)
            row.mask = None if errors[0] else bits[0]
        self._wake()

    def _shared_threads(self) -> MaskThreads:
        if self._threads is None:
            count = max(1, min(MOST_THREADS, (os.cpu_count() or 1) // 2))
            self._threads = MaskThreads(count, self._words)
        return self._threads


def _break(row: RowConstraint, error: Exception) -> None:
    """Its masks cannot be computed, as where the host has no memory."""
    log.error("the mask of a row could not be computed", exc_info=error)
    row.mask, row.broken = None, True
    row.error = f"What may follow in this text could not be computed ({type(error).__name__}); send it again."
