"""Processes that use a state pool at random while their disk is recorded (power_cut.py): python
pool_workload.py FOLDER SEED OPERATIONS VARIANT ...

Each variant of the pool has three such processes, which end in the middle of what they do. The second goes on
with the files of the first, as after kill -9, and the third with what a power cut has left of them.
"""

import ctypes
import json
import os
import random
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]

import power_cut  # noqa: E402
from pool_truth import (  # noqa: E402
    KEYS,
    NEW,
    Changes,
    Checked,
    Possible,
    as_truth,
    check,
    possible,
    some_tokens,
    survivors,
)
from pools import ALL_TURNS, NEVER, Bench  # noqa: E402
from power_cut import Cut, Disk, Kind, Operation  # noqa: E402

from rwkv_batch.state.entries import Turn  # noqa: E402
from rwkv_batch.state.log import store  # noqa: E402

SMALL = {"l1": 1, "l2": 1}
VARIANTS: dict[str, dict[str, Any]] = {
    "images that are worthwhile": SMALL,
    "no images": SMALL | {"replay_rate": NEVER},
    "images behind": SMALL | {"replay_rate": NEVER, "replay_tokens": 5},
    "a limit": SMALL | {"limit": 450_000},
    "no token log": SMALL | {"token_log": False},
}
DATABASE = "sessions.db"
MOST_WAITING = 5
REOPENED = 12  # operations after which a pool is closed, and another opened
NEWEST = 4  # sessions that are deleted before that
CHECKPOINT_BYTES = 128 << 10  # so small that the log is moved into the file many times


@dataclass(eq=False)
class Recording:
    """What processes have done to a disk, one after the other."""

    variant: str
    disk: Path  # as the last of them has left it
    base: Path | None = None  # the disk before the first of them

    @property
    def trace(self) -> Path:
        return self.disk.parent.parent / f"{self.disk.name}.trace"

    @property
    def failure(self) -> Path:
        """What was wrong with a process that did not come to its end."""
        return self.trace.with_suffix(".failure")

    @cached_property
    def operations(self) -> list[Operation]:
        return power_cut.read_trace(self.trace)

    def possible(self, position: int) -> Possible:
        """What each session may be after a crash."""
        marks = (operation.data for operation in self.operations if operation.kind is Kind.MARK)
        found = json.loads(next(marks))[1] if self.base else {}
        before = {key: truth for key, value in found.items() if (truth := as_truth(value))}
        return possible(self.operations[:position], before)

    def check(self, cuts: Iterable[Cut]) -> Iterator[Checked | str]:
        """Check the disk after each cut, in ascending order: what was found, or what is wrong."""
        if self.failure.exists():
            yield f"{self.disk.name}: {self.failure.read_text()}"
            return
        replayed = Disk(self.disk, self.operations, self.base)
        memory = "/dev/shm" if os.path.isdir("/dev/shm") else None  # where a sync takes no time
        with tempfile.TemporaryDirectory(dir=memory, ignore_cleanup_errors=True) as scratch:
            for cut in cuts:
                found = self.disk.parent.parent / f"{self.disk.name}-{cut.position}-{cut.names}-{cut.seed}"
                replayed.rebuild(cut, found)
                used = shutil.copytree(found, Path(scratch) / found.name)
                try:
                    checked = check(
                        used / DATABASE, VARIANTS[self.variant], self.possible(cut.position), cut.seed
                    )
                except Exception as error:
                    yield f"{self.disk.name}, {cut}: {error!r}; its disk is {found}, its trace {self.trace}"
                    continue
                shutil.rmtree(used)
                shutil.rmtree(found)
                yield checked


def record(
    folder: Path, seed: int, operations: int, variants: Sequence[str] = (*VARIANTS,)
) -> list[Recording]:
    """Run the processes, with so many operations each; two recordings for each variant."""
    disks = folder.resolve() / "disks"
    disks.mkdir()
    command = [sys.executable, __file__, disks, seed, operations, *variants]
    power_cut.run([str(word) for word in command], f"{disks}/", folder)
    made = [recording for variant in variants for recording in recordings(disks, variant)]
    return [recording for recording in made if recording.trace.exists()]


def recordings(disks: Path, variant: str) -> tuple[Recording, Recording]:
    """That of the first two processes, and that of the third."""
    disk = disks / variant.replace(" ", "-")
    after_cut = disk.with_name(f"{disk.name}-cut")
    return Recording(variant, disk), Recording(variant, after_cut, disks.parent / f"{after_cut.name}.base")


class _RecordedBench(Bench):
    """Calls `polled` after callbacks have run."""

    polled: Callable[[], None] = staticmethod(lambda: None)

    def poll(self) -> None:
        super().poll()
        self.polled()


class Workload:
    """A process that is recorded, with marks of what it asks for and what is acknowledged (pool_truth.py)."""

    def __init__(self, recording: Recording, possible: Possible, draw: random.Random, first: int) -> None:
        self._path, self._options = recording.disk / DATABASE, VARIANTS[recording.variant]
        self._draw, self._number = draw, first
        self._waiting: dict[int, object] = {}  # by number: names of callbacks
        self._asked: dict[int, Changes] = {}  # of those
        self._library = ctypes.CDLL(None)
        self._library.disk_trace_start(os.fsencode(recording.trace))
        self._open()
        self._truth = survivors(self._bench, possible)
        self._mark("found", self._truth)

    def run(self, operations: int) -> None:
        """Does not return."""
        rare = (self._branch, self._fork, self._rewind, self._delete, self._move)
        steps = [*[self._turn] * 5, *rare]
        for number in range(1, operations + 1):
            self._draw.choice(steps)()
            self._wait(self._draw.randint(0, MOST_WAITING))
            if number % REOPENED == 0 and number < operations:
                self._reopen()
        self._library.disk_trace_exit()

    # Operations

    def _turn(self) -> None:
        key = self._draw.choice(KEYS)
        self._take_turn(key, key)

    def _branch(self) -> None:
        source, target = self._draw.sample(KEYS, 2)
        self._take_turn(source, target)

    def _take_turn(self, source: str, target: str, least: int = 1) -> None:
        self._wait_for(source, target)
        tokens = some_tokens(self._draw, least)
        number = self._ask({target: self._truth.get(source, NEW).plus(tokens, self._bench.pool.token_log)})
        self._waiting[number] = self._bench.turn(source, tokens, target, wait=False)

    def _fork(self) -> None:
        source, target = self._draw.sample(KEYS, 2)
        self._wait_for(source, target)
        if session := self._bench.pool.find(source):
            number = self._ask({target: self._truth[source]})
            self._call(number, self._bench.pool.point, self._bench.pool.at(target), session.head)

    def _rewind(self) -> None:
        """Rewind a session in the way of the engine."""
        key = self._draw.choice(KEYS)
        session, truth = self._bench.pool.find(key), self._truth.get(key, NEW)
        if not session or len(truth.turns) < 2:
            return
        turns: list[Turn] = self._bench.do(self._bench.pool.turns, session, ALL_TURNS).value
        number = self._draw.randint(1, len(truth.turns) - 1)
        last = next(turn for turn in turns if turn.number == number)
        imaged = session.head.imaged
        asked = self._ask({key: truth._replace(turns=truth.turns[:number])})
        head = last.head(imaged if imaged <= last.end else 0)
        self._call(asked, self._bench.pool.point, self._bench.pool.at(key), head)

    def _delete(self) -> None:
        self._delete_all(self._draw.choice(KEYS), self._draw.random() < 0.5)

    def _delete_all(self, key: str, prefix: bool) -> None:
        gone = [other for other in self._truth if other == key or (prefix and other.startswith(f"{key}:"))]
        if gone:
            self._call(self._ask(dict.fromkeys(gone)), self._bench.pool.delete, key, prefix)

    def _move(self) -> None:
        """Export a session, and import it under another key, or its own."""
        source, target = self._draw.choice(KEYS), self._draw.choice(KEYS)
        self._wait_for(source, target)
        what = self._draw.choice(("both", "tokens", "state"))
        exported = self._bench.do(self._bench.pool.files.export, source, what)
        if exported.error:  # there is no such session, or not this of it
            return
        truth = self._truth[source]
        number = self._ask({target: truth.as_state() if what == "state" else truth})
        self._call(number, self._bench.import_, target, exported.value)
        self._wait(0)  # until the file is read it is not known what comes before it

    def _reopen(self) -> None:
        """Delete the newest turns and take as many, so that their numbers and images come again."""
        keys = self._draw.sample(KEYS, NEWEST)
        self._take_turns(keys)
        for key in keys:
            self._delete_all(key, False)
        self._bench.close()
        self._acknowledge()
        assert not self._waiting, "closing a pool ends all that is under way"
        self._open()
        self._take_turns(self._draw.sample(KEYS, NEWEST))

    def _take_turns(self, keys: Sequence[str]) -> None:
        """Take so many turns that images of the first are written."""
        for key in keys:
            self._take_turn(key, key, least=5)
        self._bench.settle()

    # The truth

    def _open(self) -> None:
        self._bench = _RecordedBench(self._path, **self._options)
        self._bench.polled = self._acknowledge

    def _ask(self, changes: Changes) -> int:
        """This is asked for now; its number."""
        self._number += 1
        self._mark("asked", self._number, changes)
        self._asked[self._number] = changes
        for key, truth in changes.items():
            if truth:
                self._truth[key] = truth
            else:
                del self._truth[key]
        return self._number

    def _call(self, number: int, method: Callable[..., None], *arguments: Any) -> None:
        self._waiting[number] = object()
        method(*arguments, self._bench.callback(self._waiting[number]))

    def _acknowledge(self) -> None:
        for number, name in list(self._waiting.items()):
            if name in self._bench.results:
                del self._waiting[number], self._asked[number]
                error = self._bench.results.pop(name).error
                assert error is None, error
                self._mark("done", number)

    def _wait(self, most: int) -> None:
        """Until no more than so many are under way."""
        self._bench.wait_until(lambda: len(self._waiting) <= most)

    def _wait_for(self, *keys: str) -> None:
        """Without a token log, until no change of these is under way: the engine makes one at a time."""
        if not self._bench.pool.token_log:
            self._bench.wait_until(
                lambda: not any(key in asked for key in keys for asked in self._asked.values())
            )

    def _mark(self, *what: Any) -> None:
        data = json.dumps(what).encode()
        self._library.disk_trace_mark(data, len(data))


def _run(recording: Recording, possible: Possible, seed: str, operations: int, first: int) -> bool:
    """In a process of its own, which ends in the middle of what it does; False: it has failed."""
    child = os.fork()
    if child == 0:
        try:
            Workload(recording, possible, random.Random(seed), first).run(operations)
        except BaseException:
            recording.failure.write_text(traceback.format_exc())
        os._exit(1)
    return os.waitpid(child, 0)[1] == 0


def _run_all(killed: Recording, after_cut: Recording, seed: int, operations: int) -> None:
    """The three processes of a variant. If one fails, the rest are left out."""
    killed.disk.mkdir()
    if not _run(killed, {}, f"{seed} 1 {killed.variant}", operations, 0):
        return
    end = len(killed.operations)
    if not _run(killed, killed.possible(end), f"{seed} 2 {killed.variant}", operations, operations):
        return
    del killed.operations  # there are more now
    cut = [*power_cut.cuts(killed.operations, 8, ("all",), seed)][-2]
    assert after_cut.base
    Disk(killed.disk, killed.operations).rebuild(cut, after_cut.base)
    shutil.copytree(after_cut.base, after_cut.disk)
    _run(after_cut, killed.possible(cut.position), f"{seed} 3 {killed.variant}", operations, 0)


def main(disks: str, seed: str, operations: str, *variants: str) -> None:
    store.CHECKPOINT_BYTES = CHECKPOINT_BYTES
    for variant in variants:
        _run_all(*recordings(Path(disks), variant), int(seed), int(operations))


if __name__ == "__main__":
    main(*sys.argv[1:])
