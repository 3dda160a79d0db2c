"""What each session has to be after a crash of a state pool, and whether it is that.

A process marks in its recording (power_cut.py), as JSON, what it asks for before it does, what has been
acknowledged, and what it has found at its start:

    ["asked", number, {key: truth, ...}]    the sessions are to be this from now on; null: deleted
    ["done", number]
    ["found", {key: truth, ...}]
"""

import json
import logging
import random
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pools import ALL_TURNS, BEGINNING, Bench, after
from power_cut import Kind, Operation

KEYS = [*"abcdef", "a:1", "a:2", "b:1", "b:2", "c:1", "ab"]


class Truth(NamedTuple):
    """What a session is."""

    past: str  # the state before its first known token
    start: int  # tokens before that
    turns: tuple[tuple[int, ...], ...]

    @property
    def state(self) -> bytes:
        return after(bytes.fromhex(self.past), [token for turn in self.turns for token in turn])

    @property
    def seen(self) -> int:
        return self.start + sum(map(len, self.turns))

    def plus(self, tokens: Sequence[int], token_log: bool) -> "Truth":
        """After another turn. Without a token log only the state is known then."""
        longer = self._replace(turns=(*self.turns, tuple(tokens)))
        return longer if token_log else longer.as_state()

    def as_state(self) -> "Truth":
        return Truth(self.state.hex(), self.seen, ())


NEW = Truth(BEGINNING.hex(), 0, ())
Changes = dict[str, Truth | None]  # None: deleted
Found = dict[str, Truth]
Possible = dict[str, list[Truth | None]]


def possible(operations: Iterable[Operation], base: Found) -> Possible:
    """What each session may be after these operations: as it was acknowledged last, or asked for later.

    `base`: what there was before the first operation.
    """
    entries: dict[str, list[tuple[int, Truth | None]]] = {key: [(0, truth)] for key, truth in base.items()}
    asked: dict[int, list[str]] = {}
    for mark in (json.loads(operation.data) for operation in operations if operation.kind is Kind.MARK):
        match mark:
            case ["asked", number, changes]:
                asked[number] = list(changes)
                for key, truth in changes.items():
                    entries.setdefault(key, [(0, None)]).append((number, as_truth(truth)))
            case ["done", number]:
                for key in asked[number]:
                    places = [place for place, entry in enumerate(entries[key]) if entry[0] == number]
                    del entries[key][: max(places, default=0)]
            case ["found", found]:  # by the process that comes next: what is not there will not come
                for key, its_entries in entries.items():
                    truth = as_truth(found.get(key))
                    while its_entries[-1][1] != truth:
                        its_entries.pop()
    return {key: [truth for _, truth in its_entries] for key, its_entries in entries.items()}


def as_truth(truth: list[Any] | None) -> Truth | None:
    return Truth(truth[0], truth[1], tuple(map(tuple, truth[2]))) if truth else None


def survivors(bench: Bench, possible: Possible) -> Found:
    """The sessions of a pool, each of which has to be one of those possible."""
    found = {}
    for key in sorted({*KEYS, *possible}):
        session, wanted = bench.pool.find(key), possible.get(key, [None])
        if session is None:
            assert None in wanted, f"the session {key} is lost: {wanted}"
            continue
        state = bench.look(key)
        result = bench.do(bench.pool.turns, session, ALL_TURNS)
        assert result.error is None, f"the turns of {key}: {result.error}"
        turns = tuple(tuple(turn.tokens) for turn in result.value if not turn.past_unknown)
        fitting = [
            truth
            for truth in wanted
            if truth and (truth.state, truth.seen, truth.turns) == (state, session.head.tokens, turns)
        ]
        assert fitting, f"the session {key} has {turns} and {state!r}, and was: {wanted}"
        found[key] = fitting[-1]
    assert [key for key, _ in sorted(bench.tiers())] == sorted(found), "the list of sessions"
    return found


@dataclass
class Checked:
    """What was found after crashes."""

    points: int = 0
    sessions: int = 0
    passed_over: int = 0  # images


def check(path: Path, options: dict[str, Any], possible: Possible, seed: int) -> Checked:
    """Open a pool over what a crash has left, and check everything that was promised of it."""
    draw = random.Random(seed)
    with _logged() as log:
        bench = Bench(path, **options)
        found = survivors(bench, possible)
        for key, truth in found.items():
            assert bench.look(key) == truth.state, f"{key} has another state when it comes from memory"
        checked = Checked(1, len(found), sum("passed over" in message for _, message in log))
        for key in draw.sample(KEYS, 3):
            tokens = some_tokens(draw)
            bench.turn(key, tokens)
            found[key] = found.get(key, NEW).plus(tokens, bench.pool.token_log)
        bench.close()
        exactly: Possible = {key: [truth] for key, truth in found.items()}
        again = Bench(path, **options)
        survivors(again, exactly)
        again.close()
        if all(truth.past == NEW.past for truth in found.values()):  # then images are only caches
            shutil.rmtree(f"{path}.images", ignore_errors=True)
            bare = Bench(path, **options)
            survivors(bare, exactly)
            bare.close()
    errors = [message for level, message in log if level >= logging.ERROR]
    assert not errors, f"a crash is no damage: {errors}"
    return checked


@contextmanager
def _logged() -> Iterator[list[tuple[int, str]]]:
    """Levels and messages of what the product logs inside."""
    records: list[tuple[int, str]] = []
    handler, logger = logging.Handler(), logging.getLogger()
    handler.emit = lambda record: records.append((record.levelno, record.getMessage()))  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield records
    finally:
        logger.removeHandler(handler)


def some_tokens(draw: random.Random, least: int = 1) -> list[int]:
    """Those of a turn."""
    return draw.choices(range(65536), k=draw.randint(least, 6))
