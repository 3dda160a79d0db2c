"""The state pool driven at random, with a plain dictionary as the truth it is compared with."""

import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from pools import SLOTS, Bench

KEYS = st.sampled_from(["a", "a:1", "a:2", "ab", "b", "b:1", "c"])
State = tuple[int, bytes]  # tokens, contents


class PoolMachine(RuleBasedStateMachine):
    """`truth`: what readers must find. `log`: what has been asked for since the last answered commit, in
    order: after a crash each session is what it was committed as, or any of those.
    """

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.truth: dict[str, State] = {}
        self.committed: dict[str, State] = {}
        self.log: list[tuple[str, State | None]] = []
        # tokens of saves that have not been waited for, and how long the log was with them
        self.waiting: list[tuple[int, int]] = []
        self.number = 0

    @initialize(l1=st.integers(0, 3), l2=st.integers(0, 3), durable=st.booleans())
    def start(self, l1: int, l2: int, durable: bool) -> None:
        self.sizes = {"l1": l1, "l2": l2}
        self.durable = durable
        self.open()

    def open(self) -> None:
        self.number += 1
        self.bench = Bench(self.directory / f"{self.number}.db", durable=self.durable, **self.sizes)

    def change(self, key: str, state: State | None) -> None:
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
        self.waiting = [(token, end - length) for token, end in self.waiting if end > length]

    def answered(self, length: int) -> None:
        if self.durable:
            self.commit(length)

    def wait_for_saves(self) -> None:
        """Wait for all saves under way."""
        for token, length in list(self.waiting):
            assert self.bench.wait(token).error is None
            if (token, length) in self.waiting:
                self.waiting.remove((token, length))
        self.answered(len(self.log))

    def store(self, key: str, slot: int, wait: bool) -> None:
        contents = self.bench.fill(slot).numpy().tobytes()
        self.number += 1
        self.bench.pool.save(key, slot, self.number, self.bench.callback(self.number))
        self.change(key, (self.number, contents))
        self.waiting.append((self.number, len(self.log)))
        if wait:
            self.wait_for_saves()

    @rule(key=KEYS, wait=st.booleans())
    def save(self, key: str, wait: bool) -> None:
        if len(self.bench.free) < 2:
            self.wait_for_saves()
        self.store(key, self.bench.slot(), wait)

    @rule(key=KEYS, fails=st.booleans(), wait=st.booleans())
    def turn(self, key: str, fails: bool, wait: bool) -> None:
        """Continue a session where it is, or in a copy."""
        if len(self.bench.free) < 2:
            self.wait_for_saves()
        slot = self.bench.pool.take(key)
        if slot is None:
            slot = self.bench.slot()
            result = self.bench.do(self.bench.pool.load, key, slot)
            assert (result.error is None) == (key in self.truth)
        if expected := self.truth.get(key):
            assert self.bench.states._memory[slot].numpy().tobytes() == expected[1]
        if fails:
            self.bench.fill(slot)
            self.bench.release(slot)
        else:
            self.store(key, slot, wait)

    @rule(key=KEYS)
    def load(self, key: str) -> None:
        if len(self.bench.free) < 2:
            self.wait_for_saves()
        result, contents = self.bench.load(key)
        if key in self.truth:
            assert (result.error, result.value, contents.numpy().tobytes()) == (None, *self.truth[key])
        else:
            assert result.error == f"There is no session {key}."

    @rule(key=KEYS, prefix=st.booleans())
    def delete(self, key: str, prefix: bool) -> None:
        gone = [other for other in self.truth if other == key or (prefix and other.startswith(f"{key}:"))]
        for other in gone:
            self.change(other, None)
        assert self.bench.delete(key, prefix) == len(gone)
        if gone:  # otherwise the answer comes at once, whatever is still on its way to the disk
            self.answered(len(self.log))

    @rule(source=KEYS, copy=KEYS)
    def fork(self, source: str, copy: str) -> None:
        result = self.bench.do(self.bench.pool.fork, source, copy)
        assert (result.error is None) == (source in self.truth)
        if source in self.truth:
            self.change(copy, self.truth[source])
            self.answered(len(self.log))

    @rule(source=KEYS, copy=KEYS, flip=st.booleans())
    def move(self, source: str, copy: str, flip: bool) -> None:
        """Export, and import under another key."""
        result = self.bench.do(self.bench.pool.export, source)
        assert (result.error is None) == (source in self.truth)
        if result.value:
            data = bytearray(result.value)
            data[self.number % len(data)] ^= flip << (self.number % 8)
            result = self.bench.do(self.bench.pool.import_, copy, bytes(data))
            assert bool(result.error) == flip
            if not flip:
                self.change(copy, self.truth[source])
                self.answered(len(self.log))

    @rule()
    def restart(self) -> None:
        self.bench.close()
        self.waiting = []
        self.commit(len(self.log))
        assert self.committed == self.truth
        shutil.copy(self.bench.pool._store.path, self.directory / f"{self.number + 1}.db")
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
            result, contents = self.bench.load(key)
            found = None if result.error else (result.value, contents.numpy().tobytes())
            assert found in possible
            if found:
                self.truth[key] = found
        self.committed = dict(self.truth)

    @invariant()
    def sessions_are_those_of_the_dictionary(self) -> None:
        if hasattr(self, "bench"):
            assert {info.key: info.tokens for info in self.bench.pool.status()} == {
                key: tokens for key, (tokens, _) in self.truth.items()
            }
            assert len(self.bench.pool.status()) == len(self.truth)

    @invariant()
    def tiers_keep_to_their_size_and_no_slot_is_lost(self) -> None:
        if hasattr(self, "bench") and not self.waiting:
            self.bench.do(self.bench.pool.documents.get, "")  # copies that were asked for before are done
            tiers = [info.tier for info in self.bench.pool.status()]
            assert tiers.count("L1") <= self.sizes["l1"] and tiers.count("L2") <= self.sizes["l2"]
            assert len(self.bench.free) + tiers.count("L1") == SLOTS

    def teardown(self) -> None:
        if hasattr(self, "bench"):
            self.bench.close()
        shutil.rmtree(self.directory)


PoolMachine.TestCase.settings = settings(
    max_examples=30, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestPool = PoolMachine.TestCase
