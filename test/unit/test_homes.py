"""The table of sessions that front ends share: what it holds, what it counts and drops, who may write."""

import fcntl
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_placement import UNTIMED, placement

from rwkv_batch.wire.placing import homes
from rwkv_batch.wire.placing.homes import SPAN_SECONDS, SPANS, WAYS, Homes

NAMES = [f"session {number}" for number in range(30)]


def fewest(sessions: list[int]) -> int:
    return sessions.index(min(sessions))


def counts_of(table: Homes, name: str) -> list[int]:
    """What is counted when a session comes that is not there."""
    seen = list[list[int]]()

    def choose(sessions: list[int]) -> int:
        seen.append(sessions)
        return 0

    table.give(name, choose)
    return seen[0]


@UNTIMED
@given(st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 2), st.integers(0, SPANS)), max_size=60))
def test_it_counts_the_sessions_of_each_engine_that_were_used_of_late(
    uses: list[tuple[str, int, int]],
):
    now, used = 0.0, dict[str, tuple[int, float]]()
    table = Homes(3, clock=lambda: now)
    for name, engine, spans in uses:
        now += spans * SPAN_SECONDS
        found = table.find(name)
        assert found == (used[name][0] if name in used else None)
        if found is None:
            assert table.give(name, lambda sessions, engine=engine: engine) == engine
        used[name] = used.get(name, (engine, now))[0], now
    late = Counter(engine for engine, at in used.values() if now - at < SPANS * SPAN_SECONDS)
    assert counts_of(table, "another") == [late[engine] for engine in range(3)]


def test_of_too_many_sessions_those_stay_that_were_used_last(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(homes, "SETS", 1)
    now = 0.0
    table = Homes(2, clock=lambda: now)
    for name in NAMES[:WAYS]:
        now += SPAN_SECONDS
        table.give(name, lambda sessions: 0)
    now += SPAN_SECONDS
    assert table.find(NAMES[0]) == 0
    now += SPAN_SECONDS
    table.give(NAMES[WAYS], lambda sessions: 1)
    there = [name for name in NAMES if table.find(name) is not None]
    assert there == [NAMES[0], *NAMES[2 : WAYS + 1]]
    assert counts_of(table, "another") == [WAYS - 1, 1], "what is dropped is not counted"


def test_front_ends_that_meet_sessions_at_once_agree_and_divide_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(homes, "LOCK_SECONDS", 600)
    homes.create(tmp_path / "homes", 3)
    tables = [homes.shared(str(tmp_path / "homes"), 3) for _ in range(4)]
    together, names = Barrier(len(tables)), [f"s{number}" for number in range(300)]

    def meet(table: Homes) -> list[int | None]:
        together.wait()
        return [
            found if (found := table.find(name)) is not None else table.give(name, fewest) for name in names
        ]

    with ThreadPoolExecutor(len(tables)) as pool:
        found = [*pool.map(meet, tables)]
    assert found[0] == found[1] == found[2] == found[3]
    assert Counter(found[0]) == {0: 100, 1: 100, 2: 100}
    late = homes.shared(str(tmp_path / "homes"), 3)
    assert [late.find(name) for name in names] == found[0]


def test_of_two_front_ends_that_find_no_engine_the_later_one_gets_that_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(homes, "LOCK_SECONDS", 0)
    homes.create(tmp_path / "homes", 2)
    one, two = (homes.shared(str(tmp_path / "homes"), 2) for _ in range(2))

    def choose(sessions: list[int]) -> int:
        assert two.give("s", fewest) is None, "only one writes at a time"
        return 1

    assert one.find("s") is two.find("s") is None
    assert one.give("s", choose) == 1
    assert two.give("s", fewest) == two.find("s") == 1


def test_while_nobody_can_write_all_front_ends_have_one_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As where a front end is stopped just when it has the lock."""
    monkeypatch.setattr(homes, "LOCK_SECONDS", 0)
    file = tmp_path / "homes"
    homes.create(file, 3)
    fronts = [placement(3, homes=homes.shared(str(file), 3)) for _ in range(2)]
    before = [fronts[0].home("rwkv", name) for name in NAMES]
    with open(file, "rb") as stopped:
        fcntl.flock(stopped, fcntl.LOCK_EX)
        for name in (f"new {number}" for number in range(30)):
            assert fronts[0].home("rwkv", name) == fronts[1].home("rwkv", name)
        assert [fronts[1].home("rwkv", name) for name in NAMES] == before
