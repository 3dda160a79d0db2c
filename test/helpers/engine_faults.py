"""What an engine is asked while one of its calls fails, and whether it is what it was before afterwards.

An engine with a tiny model gets a fixed list of requests and commands. What is answered with an error is
asked again, once nothing fails any more; then every answer has to be that of an engine in which nothing has
failed. At the end all is deleted, and every slot, thread and file has to be free.
"""

import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from engine_driver import SAMPLED, WEIGHTS, Driver, free_slots
from failing_memory import failing_memory
from fault_points import FaultPoints, open_files, opened_since
from mixtures import numbers, parts
from row_adapters import write

from rwkv_batch.state.log.store import Store
from rwkv_batch.wire.commands import (
    PAUSED,
    Command,
    DeleteSession,
    ExportSession,
    ForkSession,
    GetDocument,
    ImportSession,
    ListSessions,
    LoadAdapter,
    PauseRequest,
    PutStartState,
    RemoveAdapter,
    RemoveDocument,
    RemoveStartStates,
    RewindSession,
    SessionHistory,
)
from rwkv_batch.wire.protocol import (
    CommandReply,
    Event,
    Failed,
    GenerateRequest,
    Grammar,
    Progress,
    Rejected,
    Sampling,
    SessionTurn,
)

PATIENCE = 30.0  # seconds until an engine that waits for nothing counts as hung
LONG = [(11 * i) % 390 + 1 for i in range(150)]
OPTIONS = {"max_rows": 4, "l1": 1, "l2": 1, "prefix_cache_mb": 1, "replay_tokens": 8, "max_adapters": 1}
PLATE = Grammar("regex", "[A-Z]{2}-[0-9]{3}")
TRIES = 3


class Hung(AssertionError):
    """Nothing more comes."""


class Died(Exception):
    """An error has left the engine's methods: its process ends."""


@dataclass
class Outcome:
    """Of one list of requests, with one call that has failed or none."""

    answers: dict[str, Any] = field(default_factory=dict)  # by what was asked
    errors: list[str] = field(default_factory=list)  # that clients got meanwhile
    died: str = ""  # why the engine's process would have ended
    free: int = 0  # slots in the end


class Asked:
    """One engine, and what it is asked."""

    def __init__(self, folder: Path, points: FaultPoints, **options: Any) -> None:
        self.outcome, self._points, self._number, self._folder = Outcome(), points, 0, folder
        self.driver = Driver(Store(folder / "sessions.db"), **OPTIONS | options)
        self._events: dict[str, list[Event]] = {}
        self._rows: dict[str, int] = {}  # how many a request has

    # One thing that is asked

    def send(self, message: GenerateRequest | Command) -> str:
        method = (
            self.driver.engine.add if isinstance(message, GenerateRequest) else self.driver.engine.command
        )
        self._guarded(method, (b"test", message.id), message)
        return message.id

    def _guarded(self, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except Exception as error:
            raise Died(f"{type(error).__name__}: {error}"[:150]) from error

    def wait(self, *ids: str) -> list[list[Event]]:
        """Their events, when all of them have ended."""
        engine, end = self.driver.engine, time.monotonic() + PATIENCE
        while not all(self._ended(each) for each in ids):
            if not engine.busy and not self.driver.woken.wait(max(0.0, end - time.monotonic())):
                missing = [each for each in ids if not self._ended(each)]
                raise Hung(f"no answer to {missing}; failed: {self._points.hit}")
            self.driver.woken.clear()  # before the step, which sees what has woken
            for (_, id_), event in self._guarded(engine.step):
                self._events.setdefault(id_, []).append(event)
            if time.monotonic() > end:
                raise Hung(f"steps without an end; failed: {self._points.hit}")
        return [self._events.pop(each) for each in ids]

    def _ended(self, id_: str) -> bool:
        events = self._events.get(id_, [])
        if any(isinstance(each, Rejected | Failed | CommandReply) for each in events):
            return True
        rows = [row for each in events if isinstance(each, Progress) for row in each.rows]
        return sum(bool(row.finish_reason) for row in rows) == self._rows.get(id_, 1)

    def each(self, **asked: Any) -> None:
        """Ask all of these together; again what has failed, if it may have because of what was armed."""
        for _ in range(TRIES):
            ids = {}
            for name, make in asked.items():
                self._number += 1
                message = make(f"{name} {self._number}")
                if isinstance(message, GenerateRequest):
                    self._rows[message.id] = message.n * len(message.prompts)
                ids[name] = self.send(message)
            found = dict(zip(ids, self.wait(*ids.values()), strict=True))
            failed = {name: error for name, events in found.items() if (error := _error(events))}
            for name, events in found.items():
                if name not in failed:
                    self.outcome.answers[name] = _answer(events)
            if not failed:
                return
            assert self._points.hit or self._points.armed is None, failed
            self.outcome.errors += failed.values()
            asked = {name: asked[name] for name in failed}
        raise AssertionError(f"refused again and again: {failed}; failed: {self._points.hit}")

    # All of it

    def run(self) -> Outcome:
        """Raises Died, Hung."""
        for part in (
            self._rows_and_turns,
            self._tiers,
            self._files,
            self._states,
            self._adapters,
            self._pause,
        ):
            part()
        self._look()
        self.clear()
        return self.outcome

    def _rows_and_turns(self) -> None:
        self.each(
            shared=request(LONG, n=3, top_logprobs=2),
            scored=request(list(range(20, 50)), prompt_logprobs=1),
            bound=request([7], max_tokens=12, grammar=PLATE, sampling=Sampling(temperature=0.0)),
            a1=turn("a", list(range(40)), stop_strings=["zzzq"]),
            b1=turn("b", [300]),
            batch=request([5, 6], batch=True, max_tokens=20),
        )

    def _tiers(self) -> None:
        self.each(c1=turn("c", list(range(30))), d1=turn("d", [8, 8]))
        self.each(a2=turn("a", [9, 9], stop_strings=["zzzq", "qq"]), b2=turn("b", [10]))
        self.each(c2=turn("c", [11]), again=request(LONG, n=2))

    def _files(self) -> None:
        self.each(fork=lambda id_: ForkSession(id_, "a", target="e"))
        self.each(rewind=lambda id_: RewindSession(id_, "b", 1), export=lambda id_: ExportSession(id_, "a"))
        data = self.outcome.answers.pop("export")
        self.each(import_=lambda id_: ImportSession(id_, "f", data=data))
        self.each(e3=turn("e", [12]), f3=turn("f", [12]), b3=turn("b", [13]))

    def _states(self) -> None:
        for seed in (1, 2):
            if not (path := self._folder / f"{seed}.pth").exists():
                torch.save(numbers(seed), path)
        self.each(
            **{f"s{seed}": self._put_state(seed) for seed in (1, 2)},
        )
        self.each(
            in_state=request([5], start_state="s1"),
            g1=turn("g", [5, 6], start_state="s1"),
            mixed=request([5, 7], mixture=parts({1: 0.5, 2: 0.5})),
        )
        self.each(h1=turn("h", [3], mixture=parts({1: 0.5, 2: 0.5})))
        self.each(h2=turn("h", [4], mixture=parts({1: 0.5, 2: 0.5})), g2=turn("g", [5]))

    def _put_state(self, seed: int) -> Callable[[str], Command]:
        path = str(self._folder / f"{seed}.pth")
        return lambda id_: PutStartState(id_, f"s{seed}", path, "vk", b"")

    def _adapters(self) -> None:
        path = self._folder / "lora-1.pth"
        if not path.exists():
            path = write(self._folder, WEIGHTS, "lora", 1)
        self.each(load=lambda id_: LoadAdapter(id_, "lora", str(path), scaling=0.5))
        self.each(with_adapter=request([5], adapter="lora"))
        self.each(scaled=request([6], adapter="lora", adapter_scale=0.5), i1=turn("i", [5], adapter="lora"))
        self.each(i2=turn("i", [6], adapter="lora"), remove=lambda id_: RemoveAdapter(id_, "lora"))

    def _pause(self) -> None:
        self._number += 1
        name = f"long {self._number}"
        self.send(request([4], max_tokens=400, name=name)(name))
        for _ in range(3):
            for (_, id_), event in self._guarded(self.driver.engine.step):
                self._events.setdefault(id_, []).append(event)
        self.each(pause=lambda id_: PauseRequest(id_, name))
        self.wait(name)
        self.outcome.answers.pop("pause")
        self.each(paused=lambda id_: GetDocument(id_, PAUSED + name))
        self.outcome.answers.pop("paused")
        self.each(forget=lambda id_: RemoveDocument(id_, PAUSED + name))
        self.outcome.answers.pop("forget")

    def _look(self) -> None:
        """What is stored."""
        self._points.disarm()
        self.each(**{f"history of {key}": _history(key) for key in "abcdefghi"})

    def clear(self) -> None:
        """Delete all, and count what is free then."""
        listed = ListSessions("listed")
        (events,) = self.wait(self.send(listed))
        assert isinstance(events[-1], CommandReply)
        self.each(**{f"delete {entry.key}": _delete(entry.key) for entry in events[-1].sessions})
        self.each(states=lambda id_: RemoveStartStates(id_))
        self.each(sessions=lambda id_: ListSessions(id_))
        engine, end = self.driver.engine, time.monotonic() + PATIENCE
        while not engine.drained:
            assert time.monotonic() < end, "the engine is not drained"
            self._guarded(engine.step)
        self._guarded(engine.settle)
        self.settle()
        self.outcome.free = free_slots(engine.scheduler)

    def settle(self) -> None:
        """Wait until the threads of the pool are done."""
        for _ in range(2):
            pool = self.driver.engine.pool
            for worker in (pool.parts.threads.copier, pool.parts.threads.reader):
                done = threading.Event()
                worker.put(lambda: None, lambda _, error, done=done: done.set())
                self._poll_until(done)
            done = threading.Event()
            pool.parts.writer.put([], lambda removed, error, done=done: done.set())
            self._poll_until(done)

    def _poll_until(self, done: threading.Event) -> None:
        end = time.monotonic() + PATIENCE
        while not done.is_set():
            self.driver.woken.clear()
            self._guarded(self.driver.engine.pool.poll)
            if not done.is_set() and not self.driver.woken.wait(max(0.0, end - time.monotonic())):
                raise Hung(f"a thread of the pool does nothing; failed: {self._points.hit}")


def request(prompt: list[int], **fields: Any) -> Callable[[str], GenerateRequest]:
    given = {"max_tokens": 4, "sampling": SAMPLED, "stop_ids": [], "prompts": [prompt]} | fields
    return lambda id_: GenerateRequest(id=id_, **given)


def turn(key: str, prompt: list[int], **fields: Any) -> Callable[[str], GenerateRequest]:
    return request(prompt, turn=SessionTurn(source=key, target=key), **fields)


def _history(key: str) -> Callable[[str], Command]:
    return lambda id_: SessionHistory(id_, key)


def _delete(key: str) -> Callable[[str], Command]:
    return lambda id_: DeleteSession(id_, key)


def _error(events: list[Event]) -> str:
    for event in events:
        if isinstance(event, Rejected | Failed):
            return event.message
        if isinstance(event, Progress):
            for row in event.rows:
                if row.error:
                    return row.error
    return ""


def _answer(events: list[Event]) -> Any:
    if isinstance(events[-1], CommandReply):
        reply = events[-1]
        if reply.turns:
            return [(each.prompt, each.completion) for each in reply.turns]
        return reply.data or reply.found
    texts: dict[int, str] = {}
    for event in events:
        for row in event.rows if isinstance(event, Progress) else ():
            texts[row.row] = texts.get(row.row, "") + row.text
    return texts


def trial(points: FaultPoints, number: int, error: Callable[[], Exception], places: bool = False) -> Outcome:
    """Ask all of an engine of its own, of whose points that of this number fails; 0: none.

    Raises AssertionError where an answer does not come, or a thread or a file stays.
    """
    folder = Path(tempfile.mkdtemp(prefix="rwkv-faults-"))
    threads, files = set(threading.enumerate()), open_files()
    asked = None
    try:
        with failing_memory(points, error):
            asked = Asked(folder, points)
            points.arm(number, places)
            try:
                outcome = asked.run()
            except Died as died:
                outcome = asked.outcome
                outcome.died = str(died)
            points.disarm()
            asked.driver.engine.close()
        asked = None
        end = time.monotonic() + PATIENCE
        while left := {each for each in threading.enumerate() if not each.name.startswith(POOLED)} - threads:
            assert time.monotonic() < end, f"threads stay: {left}; failed: {points.hit}"
            time.sleep(0.001)
        assert not opened_since(files), f"files stay; failed: {points.hit}"
        return outcome
    finally:
        points.disarm()
        if asked:
            with suppress(Exception):
                asked.driver.engine.close()
        shutil.rmtree(folder, ignore_errors=True)


POOLED = ("grammars", "masks", "slow-masks")  # threads of pools, which end when these are collected


def every_place(points: FaultPoints, error: Callable[[], Exception]) -> Iterator[tuple[str, Outcome, str]]:
    """Of all places that allocate in an engine, one allocation each: the place, and what was wrong then."""
    trial(points, 0, error)  # with what is only made once
    expected = trial(points, 0, error, places=True)
    assert points.places is not None
    first: dict[str, int] = {}  # by the three innermost functions
    for number, place in enumerate(points.places, 1):
        first.setdefault(" < ".join(place.split(" < ")[:3]), number)
    for number in first.values():
        outcome, wrong = Outcome(), ""
        try:
            outcome = trial(points, number, error)
        except AssertionError as failed:
            wrong = str(failed)
        else:
            if outcome.died:
                wrong = f"the engine's process has ended: {outcome.died}"
            elif (outcome.answers, outcome.free) != (expected.answers, expected.free):
                wrong = "other answers, or slots that are not free"
        if points.hit:
            yield points.hit, outcome, wrong
