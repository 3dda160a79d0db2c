"""Savepoints of running turns: which are made, and what has to leave L1 for them."""

from pathlib import Path

from pools import BEGINNING, SLOTS, Bench, after

from rwkv_batch.state.entries import NONE
from rwkv_batch.state.pool.savepoints import RunningTurn


def saved(bench: Bench, owner: str, slot: int, drawn: int, before: int = NONE) -> list[int]:
    """What a turn had drawn at the savepoints that it has with this one, the newest first."""
    bench.pool.savepoints.save([RunningTurn(owner, slot, drawn, before)])
    bench.settle()  # what makes room for others is copied
    asked = list[int]()
    bench.pool.savepoints.find(owner, asked.append)
    return asked


def test_the_first_savepoint_has_the_place_of_what_its_turn_began_in(path: Path) -> None:
    bench = Bench(path, l1=4)
    for number, key in enumerate("abcd"):
        bench.turn(key, [number])
    session, _, slot = bench.begin("a", last=False)
    bench.feed(slot, [7])
    assert session and saved(bench, "turn", slot, 1, session.head.turn) == [1]
    assert dict(bench.tiers()) == {"a": "L3", "b": "L1", "c": "L1", "d": "L1"}
    bench.feed(slot, [8])
    assert saved(bench, "turn", slot, 2) == [1], "there is no room for a second one yet"
    assert dict(bench.tiers()) == {"a": "L3", "b": "L2", "c": "L1", "d": "L1"}
    assert saved(bench, "turn", slot, 2) == [2, 1]
    bench.feed(slot, [9])
    assert saved(bench, "turn", slot, 3) == [3, 2]
    found = bench.pool.savepoints.find("turn", lambda drawn: drawn < 3)
    assert found and found[1][:16].numpy().tobytes() == after(BEGINNING, [0, 7, 8])
    other = bench.slot()
    assert saved(bench, "other", other, 1) == [], "half of L1 is lent"
    bench.pool.savepoints.drop("turn")
    bench.pool.unpin(session.head)
    bench.release(slot)
    bench.release(other)
    assert len(bench.free) == SLOTS - 2 and bench.look("a") == after(BEGINNING, [0])
    bench.close()


def test_a_savepoint_leaves_what_others_share_and_what_nothing_brings_back(path: Path) -> None:
    for bench in (Bench(path, l1=2), Bench(l1=2, token_log=False)):
        bench.turn("a", [1])
        if bench.pool.token_log:
            assert bench.fork("a", "b") is None
        bench.turn("c", [2])
        session, _, slot = bench.begin("a", last=False)
        assert session and saved(bench, "turn", slot, 0, session.head.turn) == []
        assert bench.tier("a") != "L3" and bench.tier("c") != "L3"
        bench.pool.unpin(session.head)
        bench.release(slot)
        assert bench.look("a") == after(BEGINNING, [1])
        bench.close()
