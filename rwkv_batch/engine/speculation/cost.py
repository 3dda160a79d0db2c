"""What drafts cost: measured when an engine begins, on its device."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from rwkv_batch.runner.protocol import LAST, Batch, NewRow, Runner
from rwkv_batch.runner.speculation.draft_model import DraftModel
from rwkv_batch.runner.speculation.protocol import Verifier
from rwkv_batch.text.tokenizer import END_OF_TEXT
from rwkv_batch.wire.protocol import Sampling

LEAST_TIMES, MOST_TIMES = 2, 30  # that each step is measured
READ = 16  # tokens by which reading is measured
AHEAD = 4  # launches that are queued together where steps are queued ahead
SECONDS = 0.3  # that this may take beyond the least times
GREEDY = Sampling(temperature=0.0)


@dataclass(frozen=True)
class DraftCost:
    """In steps of one token."""

    fixed: float  # what a step takes more because there are drafts
    each: float  # and because it has a token more
    guess: float = 0.0  # what a pass of a draft model takes, for one row
    read: float = 0.0  # and because it has a token more
    chained: float = 0.0  # what one more pass takes that is queued together with the first

    def of_step(self, tokens: int) -> float:
        """What a step of so many tokens takes, without drafts."""
        return 1 + self.each * (tokens - 1)


def draft_cost(
    runner: Runner, verifier: Verifier, most: int, draft_model: DraftModel | None = None
) -> DraftCost:
    """Of drafts of up to `most` tokens. The state of slot 0 is as before any token, then too."""
    runner.begin(0, NewRow(GREEDY, 0, 0, ()))
    plain, together = _plain(runner)
    steps: list[Callable[[], object]] = [plain]
    for count in (1, most):
        batch = Batch(tokens=[END_OF_TEXT] * (1 + count), counts=[1 + count], slots=[0], draws=[0])
        steps.append(partial(_verify, verifier, batch, count))
    chain = min(draft_model.most_chained, most) if draft_model else 1
    if draft_model:
        draft_model.begin(0)
        steps += [partial(draft_model.first, {0: [END_OF_TEXT] * count}) for count in (1, READ)]
        if chain > 1:
            steps.append(partial(draft_model.first, {0: [END_OF_TEXT]}, passes=chain))
    # What others do on the host meanwhile does not count.
    clock = time.process_time if runner.device.type == "cpu" else time.perf_counter
    several, short, long, *passes = _seconds(steps, clock)
    one = several / together
    runner.states.clear([0])
    each = max((long - short) / (most - 1), 0.0) if most > 1 else max(short - one, 0.0)
    guess, read = (passes[0], max(passes[1] - passes[0], 0.0) / (READ - 1)) if passes else (0.0, 0.0)
    chained = max(passes[2] - guess, 0.0) / (chain - 1) if chain > 1 else 0.0
    fixed = max(short - one - each, 0.0)
    return DraftCost(fixed / one, each / one, guess / one, read / one, chained / one)


def _plain(runner: Runner) -> tuple[Callable[[], object], int]:
    """Steps of one token as they run without drafts, and how many; those with drafts are not queued ahead."""
    if not runner.run_ahead_stop_ids:
        known = Batch(tokens=[END_OF_TEXT], counts=[1], slots=[0], draws=[0])
        return lambda: runner.run(known).wait(), 1
    last = Batch(tokens=[LAST], counts=[1], slots=[0], draws=[0], steps=runner.most_steps)

    def queued() -> object:
        return [runner.run(last) for _ in range(AHEAD)][-1].wait()

    return queued, AHEAD * runner.most_steps


def _verify(verifier: Verifier, batch: Batch, count: int) -> object:
    return verifier.feed(batch, {0: count})(None, {})


def _seconds(steps: Sequence[Callable[[], object]], clock: Callable[[], float]) -> list[float]:
    """The shortest of some times of each, which take turns."""
    shortest, began, times = [float("inf")] * len(steps), time.monotonic(), 0
    while times < LEAST_TIMES or (times < MOST_TIMES and time.monotonic() < began + SECONDS):
        for place, step in enumerate(steps):
            start = clock()
            step()
            shortest[place] = min(shortest[place], clock() - start)
        times += 1
    return shortest
