"""The state pool driven at random, with a plain dictionary as the truth it is compared with."""

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from pools import ALWAYS, BEGINNING, NEVER, SLOTS, Bench, after, files

pytestmark = pytest.mark.thorough

KEYS = st.sampled_from(["a", "a:1", "a:2", "ab", "b", "b:1", "c"])
TOKENS = st.lists(st.integers(0, 65535), min_size=1, max_size=6)
End = tuple[bytes, int]  # of a turn: the state, and how many tokens it has seen
Truth = tuple[End, ...]  # where the known turns of a session begin, and the end of each
START: End = BEGINNING, 0


class PoolMachine(RuleBasedStateMachine):
    """`truth`: what readers must find. `log`: what has been asked for since the last answered commit, in
    order: after a crash each session is what it was committed as, or any of those.
    """

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.truth: dict[str, Truth] = {}
        self.committed: dict[str, Truth] = {}
        self.log: list[tuple[str, Truth | None]] = []
        self.waiting: list[tuple[object, int]] = []  # turns, and how long the log was with them
        self.number = 0

    @initialize(
        l1=st.integers(0, 3),
        l2=st.integers(0, 3),
        durable=st.booleans(),
        token_log=st.booleans(),
        replay_rate=st.sampled_from([ALWAYS, NEVER]),
        replay_tokens=st.sampled_from([0, 5, 1000]),
    )
    def start(self, durable: bool, **options) -> None:
        self.options, self.durable = options | {"durable": durable}, durable
        self.open()

    def open(self) -> None:
        self.number += 1
        self.bench = Bench(self.directory / f"{self.number}.db", **self.options)

    def change(self, key: str, state: Truth | None) -> None:
        self.log.append((key, state))
        if state:
            self.truth[key] = state
        else:
            self.truth.pop(key, None)

    def commit(self, length: int) -> None:
        """The first entries of the log have been committed."""
        for key, state in self.log[:length]:
            if state:
                self.committed[key] = state
            else:
                self.committed.pop(key, None)
        del self.log[:length]
        self.waiting = [(name, end - length) for name, end in self.waiting if end > length]

    def answered(self, length: int) -> None:
        if self.durable:
            self.commit(length)

    def wait_for_turns(self) -> None:
        """Wait for all turns under way."""
        for name, length in list(self.waiting):
            assert self.bench.wait(name).error is None
            if (name, length) in self.waiting:
                self.waiting.remove((name, length))
        self.answered(len(self.log))

    @rule(source=KEYS, other=st.none() | KEYS, tokens=TOKENS, wait=st.booleans())
    def turn(self, source: str, other: str | None, tokens: list[int], wait: bool) -> None:
        """Continue a session, in place or under another name."""
        if len(self.bench.free) < 3:
            self.wait_for_turns()
        before = self.truth.get(source, (START,))
        state, seen = before[-1]
        name = self.bench.turn(source, tokens, other, wait=False)
        end = after(state, tokens), seen + len(tokens)
        self.change(other or source, (*before, end) if self.bench.pool.token_log else (end,))
        self.waiting.append((name, len(self.log)))
        if wait:
            self.wait_for_turns()

    @rule(key=KEYS, tokens=TOKENS)
    def turn_that_fails(self, key: str, tokens: list[int]) -> None:
        session, _, slot = self.bench.begin(key)
        assert self.bench.state(slot) == self.truth.get(key, (START,))[-1][0]
        self.bench.feed(slot, tokens)
        if session:
            self.bench.pool.unpin(session.head)
        self.bench.release(slot)

    @rule(key=KEYS)
    def look(self, key: str) -> None:
        expected = self.truth.get(key)
        assert self.bench.look(key) == (expected and expected[-1][0])

    @rule(key=KEYS, prefix=st.booleans())
    def delete(self, key: str, prefix: bool) -> None:
        gone = [other for other in self.truth if other == key or (prefix and other.startswith(f"{key}:"))]
        for other in gone:
            self.change(other, None)
        assert self.bench.delete(key, prefix) == len(gone)
        if gone:  # otherwise the answer comes at once, though some of it is still on its way to the disk
            self.answered(len(self.log) if self.bench.pool.token_log else 0)

    @rule(source=KEYS, copy=KEYS)
    def fork(self, source: str, copy: str) -> None:
        if source == copy:
            return
        assert (self.bench.fork(source, copy) is None) == (source in self.truth)
        if source in self.truth:
            self.change(copy, self.truth[source])
            self.answered(len(self.log) if self.bench.pool.token_log else 0)

    @rule(source=KEYS, copy=KEYS, place=st.floats(0, 1))
    def rewind(self, source: str, copy: str, place: float) -> None:
        """Let a session end with an earlier turn, in place or as a copy."""
        known = self.truth.get(source, ())
        first = known and known[0] == START  # which no session ends with
        numbers = range(1 if first else 0, len(known))
        if numbers:
            number = numbers[int(place * (len(numbers) - 1))]
            assert self.bench.fork(source, copy, number) is None
            self.change(copy, known[: number + 1])
            self.answered(len(self.log) if self.bench.pool.token_log else 0)

    @rule(source=KEYS, copy=KEYS, what=st.sampled_from(["both", "tokens", "state"]), flip=st.booleans())
    def move(self, source: str, copy: str, what: str, flip: bool) -> None:
        """Export, and import under another key."""
        result = self.bench.do(self.bench.pool.files.export, source, what)
        if source not in self.truth:
            assert result.error == f"There is no session {source}."
        elif what == "both":
            assert result.error is None
        if result.value:
            data = bytearray(result.value)
            data[self.number % len(data)] ^= flip << (self.number % 8)
            imported = self.bench.do(self.bench.import_, copy, bytes(data))
            if flip:
                assert imported.error
            elif imported.error is None:
                whole = what != "state" and self.bench.pool.token_log
                self.change(copy, self.truth[source] if whole else self.truth[source][-1:])
                self.answered(len(self.log) if self.bench.pool.token_log else 0)
            else:
                assert not self.bench.pool.token_log and "stores no tokens" in imported.error

    @rule()
    def restart(self) -> None:
        self.bench.close()
        self.waiting = []
        self.commit(len(self.log))
        assert self.committed == self.truth
        database = self.bench.pool.store.path
        for file, data in files(database).items():
            copy = Path(str(file).replace(str(database), str(self.directory / f"{self.number + 1}.db"), 1))
            copy.parent.mkdir(exist_ok=True)
            copy.write_bytes(data)
        self.open()

    @precondition(lambda self: hasattr(self, "bench"))
    @rule()
    def crash(self) -> None:
        self.bench.crash(self.directory / f"{self.number + 1}.db")
        self.open()
        self.waiting = []
        log, self.log, self.truth = self.log, [], {}
        for key in {*self.committed, *(key for key, _ in log)}:
            possible = [self.committed.get(key), *(state for other, state in log if other == key)]
            session = self.bench.pool.find(key)
            found = (self.bench.look(key), session.head.tokens) if session else None
            assert found in [state and state[-1] for state in possible]
            if session:  # the same tokens may have come in other turns
                fits = [state for state in possible if state and state[-1] == found]
                self.truth[key] = next(state for state in fits if len(state) == session.head.number + 1)
        self.committed = dict(self.truth)

    @invariant()
    def sessions_are_those_of_the_dictionary(self) -> None:
        if hasattr(self, "bench"):
            result = self.bench.do(self.bench.pool.status, None, None)
            assert sorted((entry.key, entry.tokens) for entry in result.value.sessions) == sorted(
                (key, ends[-1][1]) for key, ends in self.truth.items()
            )

    @invariant()
    def tiers_keep_to_their_size_and_no_slot_is_lost(self) -> None:
        if hasattr(self, "bench") and not self.waiting:
            self.bench.settle()
            ends: dict[str, set[int]] = {"L1": set(), "L2": set(), "L3": set()}
            for key, tier in self.bench.tiers():
                ends[tier].add(self.bench.pool.find(key).head.turn)
            assert len(ends["L1"]) <= SLOTS - len(self.bench.free) <= self.options["l1"]
            assert len(ends["L2"]) <= self.options["l2"]

    def teardown(self) -> None:
        if hasattr(self, "bench"):
            self.wait_for_turns()
            for key in self.truth:
                self.bench.delete(key)
            self.bench.settle()
            assert len(self.bench.free) == SLOTS, "what nobody has takes no slot"
            self.bench.close()
        shutil.rmtree(self.directory)


PoolMachine.TestCase.settings = settings(
    max_examples=30, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestPool = PoolMachine.TestCase
