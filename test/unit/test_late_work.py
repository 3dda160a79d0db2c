"""Graphs come in the order in which steps want them, and GEMMs are timed while nothing runs."""

from collections import Counter

import pytest

from rwkv_batch.model.cuda.steps.late import LateWork


class Ladder:
    """Of graphs that know nothing but when they were captured."""

    def __init__(self, name: str, log: list[str], *sizes: int, room: int = 1000) -> None:
        self.name, self.log, self.sizes, self.room = name, log, sizes, room
        self.runs: Counter[int] = Counter()
        self.graphs: dict[int, int] = {}  # by size: how many have been captured in its place

    @property
    def missing(self) -> list[int]:
        return [size for size in self.sizes if size not in self.graphs]

    def capture(self, size: int) -> None:
        if not self.room:
            raise RuntimeError("CUDA error: out of memory")
        self.room -= 1
        self.log.append(f"{self.name} {size}")
        self.graphs[size] = 1

    def forget(self, size: int) -> None:
        self.graphs.pop(size, None)


class TimedMethods:
    """Every number of tokens takes three pieces; what is found out is a faster method."""

    def __init__(self, log: list[str], known: dict[int, str], better: str = "tile") -> None:
        self.log, self.known, self.better, self.held = log, known, better, 0

    def measure(self, sizes, progress=True) -> None:
        raise AssertionError("this takes too long")

    def unmeasured(self, sizes) -> list[int]:
        return [size for size in sizes if size not in self.known]

    def methods(self, tokens: int) -> dict[str, str]:
        return {"out": self.known.get(tokens, "blas")}

    def measuring(self, tokens: int):
        self.held += 1
        try:
            for _ in range(3):
                self.log.append(f"time {tokens}")
                yield
            self.known[tokens] = self.better
        finally:
            self.held -= 1


def finish(work: LateWork, idle: bool) -> None:
    while work.piece(idle):
        pass


def test_what_most_steps_have_run_without_comes_first():
    log: list[str] = []
    decode, prefill = Ladder("decode", log, 1, 2, 4), Ladder("prefill", log, 16, 32)
    decode.runs[4], prefill.runs[32] = 5, 9
    finish(LateWork([decode, prefill]), idle=False)
    assert log[:2] == ["prefill 32", "decode 4"]
    assert sorted(log[2:]) == ["decode 1", "decode 2", "prefill 16"]


def test_large_graphs_wait_until_nothing_runs_and_come_then():
    log: list[str] = []
    work = LateWork([Ladder("decode", log, 1, 512, 1024), Ladder("prefill", log, 16, 5120)])
    finish(work, idle=False)
    assert log == ["decode 1", "decode 512", "prefill 16"]
    finish(work, idle=True)
    assert log[3:] == ["decode 1024", "prefill 5120"]


def test_nothing_is_timed_while_rows_run():
    log: list[str] = []
    work = LateWork([Ladder("decode", log, 1, 2)], TimedMethods(log, {}), [1, 2])
    finish(work, idle=False)
    assert log == ["decode 1", "decode 2"]
    finish(work, idle=True)
    assert log.count("time 1") == log.count("time 2") == 3


def test_graphs_are_captured_again_with_what_is_faster_and_only_these():
    log: list[str] = []
    tuner = TimedMethods(log, {4: "tile"})
    finish(LateWork([Ladder("decode", log, 1, 2, 4)], tuner, [1, 2, 4]), idle=True)
    assert Counter(log) == {"decode 1": 2, "decode 2": 2, "decode 4": 1, "time 1": 3, "time 2": 3}
    log.clear()
    same = TimedMethods(log, {}, better="blas")
    finish(LateWork([Ladder("decode", log, 1)], same, [1]), idle=True)
    assert log.count("decode 1") == 1


def test_a_step_ends_the_timing_before_it_begins_and_its_memory_is_free():
    log: list[str] = []
    tuner = TimedMethods(log, {})
    work = LateWork([Ladder("decode", log, 1)], tuner, [1])
    assert work.piece(idle=True) and work.piece(idle=True) and tuner.held == 1
    work.give_up()
    assert tuner.held == 0 and not work.piece(idle=False)
    finish(work, idle=True)
    assert tuner.known == {1: "tile"} and tuner.held == 0


def test_without_memory_for_more_graphs_steps_go_on_without(caplog: pytest.LogCaptureFixture):
    log: list[str] = []
    work = LateWork([Ladder("decode", log, 1, 2, 4, room=1)])
    finish(work, idle=False)
    assert log == ["decode 1"] and not work.piece(idle=True)
    assert "out of memory" in caplog.text
