"""Runs plans in one process, or in several that share their requests and stay from one run to the next.

A progress bar runs beside it where stderr is a terminal, and Ctrl-C stops a run.
"""

import asyncio
import contextlib
import itertools
import multiprocessing
import resource
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from tqdm import tqdm

from bench.load import Load, LoadPlan
from bench.report import Record

TICK = 0.2  # seconds between two looks at the progress


@dataclass
class Share:
    """What one process measured."""

    records: list[Record]
    unfinished: int = 0
    cpu: float = 0.0  # of one core, while it ran
    beside: list[Record] = field(default_factory=list)


@dataclass
class Run:
    """What all processes measured."""

    shares: list[Share] = field(default_factory=list)
    interrupted: bool = False

    @property
    def records(self) -> list[Record]:
        return [record for share in self.shares for record in share.records]

    @property
    def beside(self) -> list[Record]:
        return [record for share in self.shares for record in share.beside]

    @property
    def unfinished(self) -> int:
        return sum(share.unfinished for share in self.shares)

    @property
    def cpu(self) -> float:
        """Of one core, of the busiest process."""
        return max(share.cpu for share in self.shares)


class GeneratorLost(Exception):
    """A generator process ended without its results."""


class ProgressBar:
    """Shows finished requests and the text events of each process so far, where stderr is a terminal."""

    def __init__(self, requests: int) -> None:
        self._bar = tqdm(total=requests, unit="request", disable=None, dynamic_ncols=True)
        self._seen: dict[int, tuple[int, int, int]] = {}

    def show(self, share: int, ended: int, failed: int, events: int) -> None:
        self._seen[share] = (ended, failed, events)
        ended, failed, events = map(sum, zip(*self._seen.values(), strict=True))
        self._bar.set_postfix(failed=failed, text_events=events, refresh=False)
        self._bar.update(ended - self._bar.n)
        self._bar.refresh()

    def close(self) -> None:
        self._bar.close()


def raise_file_limit() -> None:
    """Allow as many connections as the system permits this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):  # some systems refuse their own hard limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class Generators:
    """The processes that send requests. To be used in a `with` statement; one process is this one."""

    def __init__(self, processes: int) -> None:
        self._processes = processes
        self._pipes: list[Connection] = []
        self._children: list[BaseProcess] = []
        self.cpu = 0.0  # of one core, the busiest process in any run

    def __enter__(self) -> "Generators":
        raise_file_limit()
        if self._processes == 1:
            return self
        context = multiprocessing.get_context("spawn")
        self._counter = context.Value("q", 0)
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited: Ctrl-C reaches the whole group
        try:
            for share in range(self._processes):
                ours, theirs = context.Pipe()
                child: BaseProcess = context.Process(
                    target=_child, args=(theirs, self._counter, share, self._processes), daemon=True
                )
                child.start()
                theirs.close()
                self._pipes.append(ours)
                self._children.append(child)
        finally:
            signal.signal(signal.SIGINT, before)
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        for child in self._children:
            child.join()

    def run(self, plan: LoadPlan, *beside: LoadPlan) -> Run:
        """Send all requests of the plan; the plans beside it run until it has ended.

        Ctrl-C ends it early with what there is. Raises GeneratorLost.
        """
        progress = ProgressBar(plan.requests)
        plans = [plan, *beside]
        try:
            run = self._run_in_children(plans, progress) if self._pipes else _run_here(plans, progress)
        except (EOFError, OSError):
            raise GeneratorLost(
                "a generator process ended before its results came; was it killed for lack of memory?"
            ) from None
        finally:
            progress.close()
        self.cpu = max(self.cpu, run.cpu)
        return run

    def _run_in_children(self, plans: list[LoadPlan], progress: ProgressBar) -> Run:
        run, self._counter.value = Run(), 0

        def send_all(message: object) -> None:
            for pipe in self._pipes:
                with contextlib.suppress(OSError):  # a lost process is noticed when its results are awaited
                    pipe.send(message)

        def interrupt(*_: object) -> None:
            run.interrupted = True
            send_all(None)

        before = signal.signal(signal.SIGINT, interrupt)
        try:
            send_all(plans)
            for pipe in self._pipes:
                pipe.recv()  # it is ready
            send_all(time.monotonic() + TICK)
            self._collect(run, progress)
        finally:
            signal.signal(signal.SIGINT, before)
        return run

    def _collect(self, run: Run, progress: ProgressBar) -> None:
        waiting = list(self._pipes)
        while waiting:
            for ready in wait(waiting):
                assert isinstance(ready, Connection)
                message = ready.recv()
                if isinstance(message, Share):
                    run.shares.append(message)
                    waiting.remove(ready)
                else:
                    progress.show(self._pipes.index(ready), *message)


def _run_here(plans: list[LoadPlan], progress: ProgressBar) -> Run:
    run, numbers = Run(), itertools.count()

    async def work() -> Share:
        loads = [Load(plan, numbers.__next__, time.monotonic()) for plan in plans]

        def interrupt() -> None:
            run.interrupted = True
            loads[0].stop()

        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, interrupt)
        return await _drive(loads, lambda *counts: progress.show(0, *counts))

    run.shares.append(asyncio.run(work()))
    return run


def _child(pipe: Connection, counter, share: int, shares: int) -> None:
    """For each run: takes the plans and the moment to start, then perhaps None to stop early.

    Sends progress and at last its Share.
    """
    raise_file_limit()

    def next_index() -> int:
        with counter.get_lock():
            counter.value += 1
            return counter.value - 1

    async def work(plans: list[LoadPlan], start: float) -> Share:
        loads = [Load(plan, next_index, start, share, shares) for plan in plans]
        loop = asyncio.get_running_loop()

        def stop() -> None:  # a message from the parent, or its end
            loop.remove_reader(pipe.fileno())
            loads[0].stop()

        loop.add_reader(pipe.fileno(), stop)
        return await _drive(loads, lambda *counts: pipe.send(counts))

    with contextlib.suppress(BrokenPipeError, EOFError):  # the parent has gone
        while True:
            plans = pipe.recv()
            if plans is None:  # of a run that had ended here already
                continue
            pipe.send("ready")
            start = pipe.recv()
            pipe.send(Share([]) if start is None else asyncio.run(work(plans, start)))


async def _drive(loads: list[Load], show: Callable[[int, int, int], object]) -> Share:
    """Run the first of the loads, the others beside it; show (ended, failed, text events) now and then."""
    load, *beside = loads
    cpu, wall = time.process_time(), time.monotonic()
    others = [asyncio.ensure_future(other.run()) for other in beside]
    running = asyncio.ensure_future(load.run())
    while not running.done():
        await asyncio.wait({running}, timeout=TICK)
        show(len(load.records), sum(1 for r in load.records if r.failure), load.events)
    used = (time.process_time() - cpu) / (time.monotonic() - wall)
    for other in beside:
        other.stop()
    await asyncio.gather(running, *others)
    return Share(load.records, load.unfinished, used, list(_records(beside)))


def _records(loads: list[Load]) -> Iterator[Record]:
    for load in loads:
        yield from load.records
