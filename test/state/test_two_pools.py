"""Two pools on one database, driven at random, with a plain dictionary as the truth.

A turn begins with what is stored then, and is stored if that is still what it was. So of the turns that run
together on one session the first to end is stored, and the others are refused.
"""

import tempfile
from functools import partial
from pathlib import Path

import pytest
from databases import PostgresHost
from hosts import ThreadHost
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from pools import ALL_TURNS, ALWAYS, BEGINNING, NEVER, BegunTurn, Bench, after
from postgres_server import PostgresServer

from rwkv_batch.state.entries import NONE, Conflict, DiskFailed, Moved, StoreAway, StoreBroken, StoreError
from rwkv_batch.state.host.messages import SentOutcome

pytestmark = pytest.mark.thorough

KEYS = st.sampled_from(["a", "a:1", "b"])
POOLS = st.integers(0, 1)
TOKENS = st.lists(st.integers(0, 65535), min_size=1, max_size=3)
Truth = tuple[tuple[int, ...], ...]  # the turns of a session
MOST_RUNNING = 4  # turns of a pool


class HostOfFile(ThreadHost):
    """A file of its own."""

    def __init__(self) -> None:
        self._place = tempfile.TemporaryDirectory()
        super().__init__(Path(self._place.name) / "sessions.db")
        self.start()

    def close(self) -> None:
        self.stop()
        super().close()
        self._place.cleanup()


class PairMachine(RuleBasedStateMachine):
    """`truth`: sessions that are there. `running`: turns by their pools, with what they go on from."""

    def __init__(self) -> None:
        super().__init__()
        self.host = self.database()
        self.truth: dict[str, Truth] = {}
        self.heads: dict[str, int] = {}  # the turns that they end with
        self.running: list[tuple[int, BegunTurn, Truth]] = []

    @initialize(
        l1=st.integers(0, 3),
        l2=st.integers(0, 3),
        replay_rate=st.sampled_from([ALWAYS, NEVER]),
        replay_tokens=st.sampled_from([0, 3, 1000]),
    )
    def start(self, **options) -> None:
        self.options = options
        self.pools = [self.open(), self.open()]

    @staticmethod
    def database() -> HostOfFile | PostgresHost:
        """Empty, for both pools."""
        return HostOfFile()

    def open(self) -> Bench:
        return Bench(store=self.host.open(), **self.options)

    def change(self, key: str, turns: Truth | None) -> None:
        if turns is None:
            del self.truth[key], self.heads[key]
            return
        found = self.pools[0].pool.find(key)
        assert found
        self.truth[key], self.heads[key] = turns, found.head.turn

    @rule(pool=POOLS, source=KEYS, other=KEYS)
    def begin_turn(self, pool: int, source: str, other: str) -> None:
        if sum(number == pool for number, *_ in self.running) < MOST_RUNNING:
            turn = self.pools[pool].begin_turn(source, other)
            self.running.append((pool, turn, self.truth.get(source, ())))

    @rule(which=st.integers(0, 7), tokens=TOKENS)
    @precondition(lambda self: self.running)
    def end_turn(self, which: int, tokens: list[int]) -> None:
        pool, turn, past = self.running.pop(which % len(self.running))
        bench = self.pools[pool]
        error = bench.wait(bench.end_turn(turn, tokens)).error
        assert error is None or isinstance(error, Moved)
        if self.heads.get(turn.at.key, NONE) != turn.at.turn:
            assert error, "it has been changed since"
        elif turn.appends or turn.parent is None:
            assert error is None, "it is what it was"
        # else what it goes on from may have been deleted
        if error is None:
            self.change(turn.at.key, (*past, tuple(tokens)))

    @rule(pool=POOLS, key=KEYS, tokens=TOKENS)
    def turn(self, pool: int, key: str, tokens: list[int]) -> None:
        self.pools[pool].turn(key, tokens)
        self.change(key, (*self.truth.get(key, ()), tuple(tokens)))

    @rule(pool=POOLS, source=KEYS, other=KEYS)
    def fork(self, pool: int, source: str, other: str) -> None:
        error = self.pools[pool].fork(source, other)
        assert (error is None) == (source in self.truth)
        if not error:
            self.change(other, self.truth[source])

    @rule(pool=POOLS, key=KEYS, back=st.integers(1, 3))
    def rewind(self, pool: int, key: str, back: int) -> None:
        turns = self.truth.get(key, ())[:-back]
        if turns:
            assert self.pools[pool].fork(key, key, turn=len(turns)) is None
            self.change(key, turns)

    @rule(pool=POOLS, key=KEYS, prefix=st.booleans())
    def delete(self, pool: int, key: str, prefix: bool) -> None:
        gone = [name for name in self.truth if name == key or (prefix and name.startswith(f"{key}:"))]
        assert self.pools[pool].delete(key, prefix) == len(gone)
        for name in gone:
            self.change(name, None)

    @rule(pool=POOLS, source=KEYS, other=KEYS, what=st.sampled_from(["both", "tokens"]))
    def move(self, pool: int, source: str, other: str, what: str) -> None:
        bench, reader = self.pools[pool], self.pools[1 - pool]
        exported = bench.do(bench.pool.files.export, source, what)
        assert (exported.error is None) == (source in self.truth)
        if not exported.error:
            assert reader.do(partial(reader.import_, other), exported.value).error is None
            self.change(other, self.truth[source])

    @rule(pool=POOLS)
    def restart_pool(self, pool: int) -> None:
        self.pools[pool].close()
        self.running = [entry for entry in self.running if entry[0] != pool]
        self.pools[pool] = self.open()

    @rule(pool=POOLS, key=KEYS, tokens=TOKENS)
    def the_answer_to_a_commit_is_lost(self, pool: int, key: str, tokens: list[int]) -> None:
        self.host.lose_the_next_answer()
        name = self.pools[pool].turn(key, tokens, wait=False)
        self.host.answer_again()
        assert self.pools[pool].wait(name).error is None
        self.change(key, (*self.truth.get(key, ()), tuple(tokens)))

    @invariant()
    def both_see_the_truth(self) -> None:
        for bench in self.pools if self.truth else ():
            assert {key for key, _ in bench.tiers()} == set(self.truth)
            for key, turns in self.truth.items():
                assert bench.look(key) == after(BEGINNING, [token for turn in turns for token in turn])
                session = bench.pool.find(key)
                assert session
                found = bench.do(bench.pool.turns, session, ALL_TURNS).value
                assert tuple(tuple(turn.tokens) for turn in found) == turns

    def teardown(self) -> None:
        for bench in self.pools:
            bench.close()
        self.host.close()


SETTINGS = settings(
    max_examples=15,
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def test_two_engines_on_one_file() -> None:
    run_state_machine_as_test(PairMachine, settings=SETTINGS)


def test_two_servers_on_one_postgresql(postgres: PostgresServer) -> None:
    class OnPostgres(PairMachine):
        @staticmethod
        def database() -> PostgresHost:
            return PostgresHost(postgres)

    run_state_machine_as_test(OnPostgres, settings=SETTINGS)


@pytest.mark.parametrize("kind", [Conflict, DiskFailed, StoreAway, StoreBroken, StoreError])
def test_an_error_is_of_its_kind_for_engines_too(kind: type[StoreError]) -> None:
    """Clients get 409, 503 or 500 by it."""
    sent = SentOutcome.from_result(1, None, kind("No."))
    assert type(sent.error) is kind and str(sent.error) == "No."
