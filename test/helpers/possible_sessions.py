"""What sessions may be, after some requests have been answered while others were under way.

The rule is linearizability: there is an order of all requests, each at some moment between its call and its
answer, in which they would have had these answers one after the other. Of a request that was never answered,
as its client or the server went away, either all has happened or nothing.
"""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from hashed_model import BEGINNING, after

MOST = 5000  # possibilities


class Turn(NamedTuple):
    """What a turn has added."""

    prompt: tuple[int, ...]
    completion: tuple[int, ...]


class Conversation(NamedTuple):
    """A session that is there."""

    turns: tuple[Turn, ...] = ()
    state: bytes = BEGINNING

    def plus(self, turn: Turn) -> "Conversation":
        return Conversation((*self.turns, turn), after(self.state, [*turn.prompt, *turn.completion]))


Sessions = tuple[tuple[str, Conversation], ...]  # those that are there, by key, sorted
Outcomes = tuple[Sessions, object]  # what there is after a request, and its answer


def find(sessions: Sessions, key: str | None) -> Conversation | None:
    return dict(sessions).get(key or "")


def put(sessions: Sessions, key: str, conversation: Conversation | None) -> Sessions:
    """With this session; None: without it."""
    changed: dict[str, Conversation | None] = {**dict(sessions), key: conversation}
    return tuple(sorted((name, found) for name, found in changed.items() if found is not None))


@dataclass(eq=False)
class Call:
    """A request. `carry_out`: what it does to sessions, and how it is answered then.

    read: what it takes from them at an earlier moment, which `carry_out` gets beside them.
    """

    name: str
    carry_out: Callable[..., Outcomes]
    read: Callable[[Sessions], Hashable] | None = None


class Impossible(AssertionError):
    """No order of the requests has these answers."""


@dataclass(frozen=True)
class _Possibility:
    sessions: Sessions
    answers: frozenset[tuple[Call, object]] = frozenset()  # of calls that are done and not answered yet
    readings: frozenset[tuple[Call, object]] = frozenset()  # of calls that have read, and done nothing yet

    def without(self, call: Call) -> "_Possibility":
        """That call has been answered, or never will be."""
        answers, readings = (
            frozenset(each for each in known if each[0] is not call)
            for known in (self.answers, self.readings)
        )
        return _Possibility(self.sessions, answers, readings)

    def after(self, call: Call) -> "_Possibility | None":
        """When this call has come one step further; None: it is done."""
        if any(done is call for done, _ in self.answers):
            return None
        found = [value for reader, value in self.readings if reader is call]
        if call.read and not found:
            reading = (call, call.read(self.sessions))
            return _Possibility(self.sessions, self.answers, self.readings | {reading})
        sessions, answer = call.carry_out(self.sessions, *found)
        rest = self.without(call)
        return _Possibility(sessions, rest.answers | {(call, answer)}, rest.readings)


class PossibleSessions:
    """All that sessions may be now."""

    def __init__(self) -> None:
        self._now = {_Possibility(())}
        self._open: list[Call] = []  # not answered yet
        self.log: list[str] = []

    def called(self, call: Call) -> None:
        self.log.append(f"{call.name} ...")
        self._open.append(call)

    def answered(self, call: Call, answer: object) -> None:
        """Raises Impossible."""
        self.log.append(f"{call.name} -> {str(answer)[:100]}")
        everything = self._carried_out()
        done = (call, answer)
        fitting = {each.without(call) for each in everything if done in each.answers}
        if not fitting:
            could = {repr(found) for each in everything for made, found in each.answers if made is call}
            right = " or ".join(sorted(could))
            raise Impossible(f"{call.name} was answered with {answer!r}, and could have been with: {right}")
        self._now = fitting
        self._open.remove(call)

    def refused(self, call: Call) -> None:
        """It was answered that nothing is done. Raises Impossible."""
        self.log.append(f"{call.name} refused")
        self._now = {
            each.without(call) for each in self._now if all(made is not call for made, _ in each.answers)
        }
        self._open.remove(call)
        assert self._now, "it cannot have been known before that it was done"

    def lost(self, calls: Iterable[Call]) -> None:
        """Nothing more comes of these than what has come by now; they were not answered."""
        for call in calls:
            self.log.append(f"{call.name} lost")
            self._now = {each.without(call) for each in self._carried_out(only=call)}
            self._open.remove(call)

    def conversations(self, key: str) -> set[Conversation | None]:
        return {find(each.sessions, key) for each in self._now}

    def _carried_out(self, only: Call | None = None) -> set[_Possibility]:
        """With any of the open calls done, in any order."""
        found, new = set(self._now), list(self._now)
        while new:
            each = new.pop()
            for call in self._open if only is None else [only]:
                later = each.after(call)
                if later and later not in found:
                    found.add(later)
                    new.append(later)
            assert len(found) < MOST, "there are too many possibilities; have fewer requests under way"
        return found
