"""Engines of one database that are killed and stopped at random, and what must be left of their turns.

Each engine is a process with a pool, which takes turns on the sessions of all and writes down, in a file of
its own, what it asks for before it does, and what it is told: a file outlives kill -9. Every turn has tokens
of its own, so that the end tells which turns a session is made of.

    [0, turn, key, past]     asked for: a turn of a session that had so many turns
    [1, turn, seconds]       stored: it has been acknowledged, after so long
    [2, turn, seconds]       refused
    [3, key, turns]          a fork with these turns has been acknowledged
"""

import itertools
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.forkserver import ensure_running
from multiprocessing.process import BaseProcess
from pathlib import Path

from hosts import ProcessHost
from pools import ALL_TURNS, ALWAYS, BEGINNING, NEVER, Bench, after

from rwkv_batch.state.entries import Moved
from rwkv_batch.state.host.store import HostStore

KEYS = [f"s{number}" for number in range(6)]
FORKS = 20  # a fork for so many turns, about
PAUSE = 0.002  # seconds between what an engine does, at most
ASKED, STORED, REFUSED, FORKED = range(4)

forkserver = multiprocessing.get_context("forkserver")


def import_once() -> None:
    """Have everything imported in a process from which the engines are forked, so that they begin at once."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # which it does not get otherwise
    forkserver.set_forkserver_preload([__name__])
    ensure_running()
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


def tokens(turn: int) -> list[int]:
    """Those of the turn of this number, which tell it from all others."""
    return [turn & 0xFFFF, turn >> 16]


def number(found: list[int]) -> int:
    return found[0] | found[1] << 16


def engine(path: Path, address: str, seed: int, notes: Path) -> None:
    """The process: it takes turns until it is killed."""
    draw = random.Random(seed)
    file = os.open(notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(*line: object) -> None:
        os.write(file, json.dumps(line).encode() + b"\n")

    bench = Bench(
        store=HostStore(path, address),
        l1=draw.randint(0, 3),
        l2=draw.randint(0, 3),
        replay_tokens=draw.choice((4, 8192)),
        replay_rate=draw.choice((ALWAYS, NEVER)),
    )
    for turn in itertools.count(seed << 14):
        key = draw.choice(KEYS)
        if not draw.randrange(FORKS) and (session := bench.pool.find(key)):
            found = bench.do(bench.pool.turns, session, ALL_TURNS).value
            target = f"fork-{turn}"
            if bench.do(bench.pool.point, bench.pool.at(target), session.head).error is None:
                note(FORKED, target, [number(entry.tokens) for entry in found])
        try:
            begun = bench.begin_turn(key)
        except LookupError:  # its turns have gone meanwhile
            continue
        past = begun.session.head.number if begun.session else 0
        if not draw.randrange(4):
            time.sleep(draw.random() * PAUSE * 5)  # the text takes its time, and others may come first
        asked = time.monotonic()
        note(ASKED, turn, key, past)
        error = bench.wait(bench.end_turn(begun, tokens(turn))).error
        assert error is None or isinstance(error, Moved), error
        note(REFUSED if error else STORED, turn, round(time.monotonic() - asked, 4))
        time.sleep(draw.random() * PAUSE)


@dataclass
class Tally:
    """What has happened."""

    events: Counter[str] = field(default_factory=Counter)
    turns: Counter[str] = field(default_factory=Counter)  # stored, refused, unknown
    longest: float = 0.0  # seconds that a commit took of an engine that was not stopped
    failures: list[str] = field(default_factory=list)

    def add(self, other: "Tally") -> None:
        """What has happened elsewhere."""
        self.events += other.events
        self.turns += other.turns
        self.longest = max(self.longest, other.longest)
        self.failures += other.failures


@dataclass(eq=False)
class _Engine:
    process: BaseProcess
    notes: Path
    continues: float = 0.0  # when it is continued, if it is stopped


class Rounds:
    """Engines of one database, and what is done to them."""

    def __init__(
        self, folder: Path, engines: int, seed: int, stop_seconds: Sequence[float], tally: Tally | None = None
    ) -> None:
        """stop_seconds: how long an engine may be stopped. tally: to which what happens is added."""
        folder.mkdir()
        import_once()
        self.tally, self._folder, self._draw = tally or Tally(), folder, random.Random(seed)
        self._stop_seconds, self._number = stop_seconds, seed * 1000
        self.host = ProcessHost(folder / "sessions.db", forkserver)
        self.host.start()
        self._stopped: set[Path] = set()  # notes of engines that have been
        self._engines = [self._begin() for _ in range(engines)]
        while not all(one.notes.exists() and one.notes.stat().st_size for one in self._engines):
            assert all(one.process.exitcode is None for one in self._engines)
            time.sleep(0.01)  # torch is being imported, once

    def run(self, events: int) -> Iterator[None]:
        """One event after the other; then everything is killed and checked."""
        for _ in range(events):
            time.sleep(self._draw.uniform(0.02, 0.15))
            self._event()
            yield
        self.end()

    def end(self) -> None:
        """All are killed, but those that are stopped go on first, among others that have gone on long ago."""
        for one in sorted(self._engines, key=lambda one: one.continues):
            if one.continues:
                time.sleep(max(0.0, one.continues - time.monotonic()))
                self._signal(one, signal.SIGCONT)
                time.sleep(0.2)
        for one in self._engines:
            one.process.kill()
            one.process.join()
        self.host.kill()
        self.check()
        self.host.close()

    def _begin(self) -> _Engine:
        self._number += 1
        notes = self._folder / f"{self._number}.notes"
        arguments = self.host.path, self.host.address, self._number, notes
        process = forkserver.Process(target=engine, args=arguments, daemon=True)
        process.start()
        return _Engine(process, notes)

    def _event(self) -> None:
        now = time.monotonic()
        for one in self._engines:
            if one.continues and one.continues < now:
                self._signal(one, signal.SIGCONT)
                one.continues = 0.0
        running = [one for one in self._engines if not one.continues]
        for one in running:
            if one.process.exitcode is not None:
                self.tally.failures.append(f"an engine ended by itself: {one.process.exitcode}")
        kind = self._draw.choice(("kill engine", "kill engine", "kill writer", "stop engine", "stop writer"))
        if kind == "stop engine" and len(running) < 2:
            kind = "kill writer"
        self.tally.events[kind] += 1
        if kind == "kill engine":
            one = self._draw.choice(self._engines)
            one.process.kill()
            one.process.join()
            self._engines[self._engines.index(one)] = self._begin()
        elif kind == "stop engine":
            one = self._draw.choice(running)
            self._stopped.add(one.notes)
            self._signal(one, signal.SIGSTOP)
            one.continues = now + self._draw.choice(self._stop_seconds)
        elif kind == "kill writer":
            self.host.kill()
            self.host.start(first=False)
        else:
            process = self.host.process
            assert process.pid
            os.kill(process.pid, signal.SIGSTOP)
            time.sleep(self._draw.uniform(0.0, 0.3))
            os.kill(process.pid, signal.SIGCONT)

    @staticmethod
    def _signal(one: _Engine, number: int) -> None:
        assert one.process.pid
        with suppress(ProcessLookupError):
            os.kill(one.process.pid, number)

    def check(self) -> None:
        """What the database has, against what the engines have written down."""
        asked: dict[int, tuple[str, int]] = {}
        told: dict[int, int] = {}
        forks: dict[str, list[int]] = {}
        for file in self._folder.glob("*.notes"):
            for line in file.read_bytes().splitlines(keepends=True):
                if not line.endswith(b"\n"):
                    continue
                kind, *fields = json.loads(line)
                if kind == ASKED:
                    asked[fields[0]] = fields[1], fields[2]
                elif kind == FORKED:
                    forks[fields[0]] = fields[1]
                else:
                    told[fields[0]] = kind
                    if file not in self._stopped:
                        self.tally.longest = max(self.tally.longest, fields[1])
        bench = Bench(self.host.path)
        found = {key: self._turns(bench, key) for key, _ in bench.tiers()}
        places = {turn: (key, place) for key in KEYS for place, turn in enumerate(found.get(key, []))}
        for turn, (key, past) in asked.items():
            outcome = told.get(turn)
            self.tally.turns[{STORED: "stored", REFUSED: "refused"}.get(outcome, "unknown")] += 1
            if outcome == STORED and turn not in places:
                self._fail(f"turn {turn} of {key} was acknowledged and is lost")
            if outcome == REFUSED and turn in places:
                self._fail(f"turn {turn} of {key} was refused and is stored")
            if turn in places and places[turn] != (key, past):
                self._fail(f"turn {turn} came behind {past} turns of {key} and is {places[turn]}")
        for key, turns in found.items():
            if len(set(turns)) < len(turns) or not set(turns) <= set(asked):
                self._fail(f"{key} has turns twice, or that nobody asked for")
        for key, turns in forks.items():
            if found.get(key) != turns:
                self._fail(f"{key} was acknowledged as a fork with {len(turns)} turns")
        bench.close()

    def _turns(self, bench: Bench, key: str) -> list[int]:
        session = bench.pool.find(key)
        assert session
        turns = [number(turn.tokens) for turn in bench.do(bench.pool.turns, session, ALL_TURNS).value]
        if bench.look(key) != after(BEGINNING, [token for turn in turns for token in tokens(turn)]):
            self._fail(f"the state of {key} is not that of its turns")
        return turns

    def _fail(self, sentence: str) -> None:
        self.tally.failures.append(sentence)
