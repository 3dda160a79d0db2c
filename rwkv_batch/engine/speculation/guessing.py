"""Drafts by a second model, for rows whose own text has none.

A pass of that model costs a part of a step, which is measured (`cost.py`). It is made where the tokens that
it adds to the step are expected to be worth more: by how often guesses of these rows were right lately. A row
whose guesses are wrong has none for a while, then is tried again.
"""

from bisect import bisect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from rwkv_batch.engine.constraints.ahead import MasksAhead
from rwkv_batch.engine.scheduling.row import Row
from rwkv_batch.engine.speculation.cost import DraftCost
from rwkv_batch.runner.speculation.draft_model import DraftModel, Guess

MOST_READ = 256  # tokens of a prompt, the last ones, that are read before a row's first guess
READ_AT_ONCE = 64  # tokens that are read in one step for rows that have no guesses before they are read
LEAST_GAIN = 1.25  # what a pass is expected to gain, in multiples of its cost
HORIZON = 64  # tokens for which a row is expected to go on, at most, where reading its prompt is weighed
# Guesses by the chance that the draft model gives them: how often they are right, before a row has shown it.
EDGES = (0.3, 0.5, 0.7, 0.85, 0.95)
FIRST_RATES = (0.15, 0.35, 0.55, 0.7, 0.85, 0.95)
FIRST_WEIGHT = 4.0  # guesses that these count as
FORGETTING = 0.95  # what a guess counts when one more has come
# How often guesses are right at all: before any, and how fast that follows what is found, of a row and of
# all. In so many steps without a guess it comes back to the first rate.
RATE, ROW_SHARE, SHARED_SHARE, BACK = 0.75, 0.15, 0.02, 64


@dataclass(eq=False, slots=True)
class GuessedRow:
    """What the draft model has read of a row, and how good its guesses were."""

    arrival: int  # of the row
    text: list[int]  # of its prompt and of what it had drawn, what is read
    begun: int  # how many tokens it had drawn
    rate: float  # how often a guess is right
    read: int = 0  # tokens of this text, and behind it of those drawn, that the state has seen
    made: list[Guess] = field(default_factory=list)  # that are not known to be right or wrong
    made_at: int = 0  # how many tokens were drawn before these
    right: list[float] = field(default_factory=lambda: [rate * FIRST_WEIGHT for rate in FIRST_RATES])
    counted: list[float] = field(default_factory=lambda: [FIRST_WEIGHT] * len(FIRST_RATES))

    def unread(self, drawn: list[int]) -> list[int]:
        """What the state has not seen."""
        more = self.read - len(self.text)
        behind = drawn[self.begun + max(more, 0) :]
        return behind if more >= 0 else self.text[self.read :] + behind

    def chance(self, guess: Guess) -> float:
        """That it is right, if all before it are."""
        kind = bisect(EDGES, guess.chance)
        return self.right[kind] / self.counted[kind]

    def learn(self, drawn: Sequence[int]) -> list[bool]:
        """The row has drawn these in all. Which of its latest guesses were right, up to a wrong one."""
        found = list[bool]()
        if len(drawn) <= self.made_at:  # what comes behind them is in flight
            return found
        for guess, token in zip(self.made, drawn[self.made_at :], strict=False):
            kind, right = bisect(EDGES, guess.chance), guess.token == token
            self.counted[kind] = self.counted[kind] * FORGETTING + 1
            self.right[kind] = self.right[kind] * FORGETTING + right
            self.rate += (right - self.rate) * ROW_SHARE
            found.append(right)
            if not right:
                break
        self.made = []
        return found

    def rest(self) -> None:
        """There was a step without guesses: in the end they are tried again."""
        self.rate += max(RATE - self.rate, 0.0) / BACK


@dataclass(frozen=True)
class Draft:
    """What a row may draw next."""

    tokens: list[int]
    expected: float  # how many of them are right on average
    ahead: MasksAhead | None = None  # what may follow, where a grammar binds the row

    def gain(self, least: float) -> float:
        """Tokens by which it is expected to be ahead, where each has to gain so much."""
        return self.expected - least * len(self.tokens)


@dataclass(frozen=True)
class WantedGuesses:
    """A row for which guesses are wanted, `most` of them at most."""

    row: Row
    most: int
    ahead: MasksAhead | None = None  # as of Draft

    @property
    def left(self) -> int:
        """Tokens that it draws more, at most."""
        return self.row.request.max_tokens - len(self.row.drawn)


@dataclass(frozen=True)
class GuessingRow(WantedGuesses):
    """One that is in a slot."""

    known: GuessedRow = field(kw_only=True)
    slot: int = field(kw_only=True)


@dataclass(frozen=True)
class Hope:
    """What guesses for some rows are expected to be worth, in tokens."""

    taking: Collection[int]  # those for which they are, by place
    passes: int  # that are made together
    gain: float  # of all, behind what passes and steps take for them
    expected: float  # how many guesses are right
    guesses: int

    def reading(self, cost: DraftCost, pace: float) -> Callable[[int, int], bool]:
        """Whether it pays to read so much for a row that draws so many tokens more: (left, unread)."""
        share, each = self.gain / max(len(self.taking), 1), cost.read * pace
        return lambda left, unread: unread * each < share * min(left, HORIZON)


NO_HOPE = Hope((), 1, 0.0, 0.0, 0)


def hope_of(rows: Mapping[int, tuple[float, int]], cost: DraftCost, pace: float, chained: int) -> Hope:
    """Of as many passes, `chained` at most, as gain most.

    rows: how often a guess for each is right, and how many are wanted at most. pace: as of Guessing.drafts.
    """
    pace *= LEAST_GAIN
    least = cost.each * pace
    gains = {place: rate - least - cost.read * pace for place, (rate, _) in rows.items()}
    taking = {place: rows[place] for place, gain in gains.items() if gain > 0}
    gain, passes = sum(gains[place] for place in taking) - cost.guess * pace, 1
    expected, guesses = sum(rate for rate, _ in taking.values()), len(taking)
    while passes < chained:
        right = [rate ** (passes + 1) for rate, most in taking.values() if most > passes]
        right = [chance for chance in right if chance > least]
        more = sum(right) - least * len(right) - cost.chained * pace
        if more <= 0:
            break
        gain, passes, expected, guesses = gain + more, passes + 1, expected + sum(right), guesses + len(right)
    return Hope(taking, passes, gain, expected, guesses)


class Guessing:
    """The guesses for one model's rows. For the engine's thread."""

    def __init__(self, model: DraftModel, slots: int) -> None:
        self.model, self._rate = model, RATE
        self._rows: dict[int, GuessedRow] = {}  # by slot
        model.allocate(slots)

    def of(self, row: Row) -> GuessedRow:
        """What is known of a row that runs, with what it has drawn."""
        assert row.slot is not None
        known = self._rows.get(row.slot)
        if known and known.arrival != row.arrival:
            known = None
        if known is None or not self.model.holds(row.slot):
            text = [*row.prompt[-MOST_READ:], *row.drawn][-MOST_READ:]
            rate = known.rate if known else self._rate
            known = self._rows[row.slot] = GuessedRow(row.arrival, text, len(row.drawn), rate)
            self.model.begin(row.slot)
        for right in known.learn(row.drawn):
            self._rate += (right - self._rate) * SHARED_SHARE
        return known

    def drafts(self, wanted: Mapping[int, WantedGuesses], cost: DraftCost, pace: float) -> dict[int, Draft]:
        """Those of rows that decode, by place. pace: what a step draws in the time of a step of one token."""
        asked, hope = self._hoped(wanted, cost, pace)
        pace *= LEAST_GAIN
        for place, each in asked.items():
            if hope.gain <= 0 or place not in hope.taking:
                each.known.rest()
        if hope.gain <= 0:
            self._rest()
            return {}
        taking = {place: asked[place] for place in hope.taking}
        ready = self._ready(taking, hope.reading(cost, pace))
        return self._guess(ready, hope.passes, cost, pace) if ready else {}

    def hope(self, wanted: Mapping[int, WantedGuesses], cost: DraftCost, pace: float) -> Hope:
        """What guesses for these rows would be worth if what they draw now were known; see `drafts`."""
        asked, hope = self._hoped(wanted, cost, pace)
        reads = hope.reading(cost, pace * LEAST_GAIN)
        for place in hope.taking:
            unread = len(asked[place].known.unread(asked[place].row.drawn))
            if unread <= READ_AT_ONCE // 2 or reads(asked[place].left, unread):
                return hope
        return NO_HOPE

    def rest(self, wanted: Mapping[int, WantedGuesses]) -> None:
        """There was a step of these rows without guesses."""
        for each in wanted.values():
            self.of(each.row).rest()
        self._rest()

    def _rest(self) -> None:
        self._rate += max(RATE - self._rate, 0.0) / BACK**2

    def _hoped(
        self, wanted: Mapping[int, WantedGuesses], cost: DraftCost, pace: float
    ) -> tuple[dict[int, GuessingRow], Hope]:
        asked = {
            place: GuessingRow(each.row, each.most, each.ahead, known=self.of(each.row), slot=each.row.slot)
            for place, each in wanted.items()
            if each.row.slot is not None
        }
        bound = any(each.row.draws.constraint for each in asked.values())
        rates = {place: (each.known.rate, each.most) for place, each in asked.items()}
        return asked, hope_of(rates, cost, pace, 1 if bound else self.model.most_chained)

    def _ready(
        self, taking: Mapping[int, GuessingRow], worth: Callable[[int, int], bool]
    ) -> dict[int, GuessingRow]:
        """Those that need no more reading before they guess; others read now, a piece.

        worth: whether reading so much pays for a row that draws so many tokens more.
        """
        ready, room = dict[int, GuessingRow](), READ_AT_ONCE
        pieces = dict[int, list[int]]()
        for place, each in taking.items():
            unread = each.known.unread(each.row.drawn)
            if len(unread) <= READ_AT_ONCE // 2:
                ready[place] = each
            elif room and worth(each.left, len(unread)):
                pieces[each.slot] = piece = unread[: min(room, len(unread) - 1)]
                each.known.read += len(piece)
                room -= len(piece)
        if pieces:
            self.model.read(pieces)
        return ready

    def _guess(
        self, ready: Mapping[int, GuessingRow], passes: int, cost: DraftCost, pace: float
    ) -> dict[int, Draft]:
        """passes: that are made before it is known what the first one guesses."""
        places, least = {each.slot: place for place, each in ready.items()}, cost.each * pace
        chances, drafts = dict.fromkeys(ready, 1.0), dict[int, Draft]()
        unread = {each.slot: each.known.unread(each.row.drawn) for each in ready.values()}
        for each in ready.values():
            each.known.read += len(unread[each.slot])
            each.known.made, each.known.made_at = [], len(each.row.drawn)
        found, begin = self.model.first(unread, _masks(ready.values(), 0), passes), passes == 1
        while found:
            guessed, hope = dict[int, int](), 0.0
            for slot, guesses in found.items():
                each = ready[place := places[slot]]
                each.known.made += guesses
                for guess in guesses:
                    chances[place] *= each.known.chance(guess)
                    if chances[place] <= least or not guess.chance or guess.token in each.row.text.stop_ids:
                        break
                    before = drafts.get(place, Draft([], 0.0))
                    drafts[place] = Draft(
                        [*before.tokens, guess.token], before.expected + chances[place], each.ahead
                    )
                    if len(before.tokens) + 1 == each.most:
                        break
                else:
                    guessed[slot] = guesses[-1].token
                    hope += max(chances[place] * each.known.rate - least, 0.0)
            passed = cost.guess + cost.read * (len(guessed) - 1)
            if not guessed or hope <= passed * pace:
                break
            going = {place: each for place, each in ready.items() if each.slot in guessed}
            for place, each in going.items():
                if each.ahead:
                    each.ahead.follow(drafts[place].tokens)
            masks = _masks(going.values(), len(drafts[next(iter(going))].tokens))
            found, begin = self.model.further(guessed, masks, begin=begin), False
        return drafts


def _masks(rows: Iterable[GuessingRow], count: int) -> dict[int, np.ndarray]:
    """By slot, what may follow behind so many guesses, where grammars bind rows."""
    masks = ((each.slot, each.ahead.mask(count)) for each in rows if each.ahead)
    return {slot: mask for slot, mask in masks if mask is not None}
