"""Runs a plan in one process, or in several that share its requests.

A progress bar runs beside it, and Ctrl-C stops it.
"""

import asyncio
import contextlib
import itertools
import multiprocessing
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from answer import Record
from load import Load, LoadPlan
from tqdm import tqdm

TICK = 0.2  # seconds between two looks at the progress


@dataclass
class Share:
    """What one process measured."""

    records: list[Record]
    unfinished: int
    cpu: float  # of one core, while it ran


@dataclass
class Run:
    """What all processes measured."""

    shares: list[Share] = field(default_factory=list)
    interrupted: bool = False

    @property
    def records(self) -> list[Record]:
        return [record for share in self.shares for record in share.records]


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


def generate(plan: LoadPlan, processes: int, progress: ProgressBar) -> Run:
    """Send all requests of the plan. Ctrl-C ends it early with what there is. Raises GeneratorLost."""
    return (
        _generate_here(plan, progress)
        if processes == 1
        else _generate_in_processes(plan, processes, progress)
    )


def _generate_here(plan: LoadPlan, progress: ProgressBar) -> Run:
    run, numbers = Run(), itertools.count()

    async def work() -> Share:
        load = Load(plan, lambda: next(numbers), time.monotonic())

        def interrupt() -> None:
            run.interrupted = True
            load.stop()

        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, interrupt)
        return await _drive(load, lambda *counts: progress.show(0, *counts))

    run.shares.append(asyncio.run(work()))
    return run


def _generate_in_processes(plan: LoadPlan, processes: int, progress: ProgressBar) -> Run:
    context, run = multiprocessing.get_context("spawn"), Run()
    counter = context.Value("q", 0)
    pipes: list[Connection] = []
    children: list[BaseProcess] = []

    def send_all(message: float | None) -> None:
        for pipe in pipes:
            with contextlib.suppress(OSError):  # a lost process is noticed when its results are awaited
                pipe.send(message)

    def interrupt(*_: object) -> None:
        run.interrupted = True
        send_all(None)

    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited: Ctrl-C reaches the whole group
    try:
        for share in range(processes):
            ours, theirs = context.Pipe()
            child: BaseProcess = context.Process(
                target=_child, args=(theirs, plan, counter, share, processes), daemon=True
            )
            child.start()
            theirs.close()
            pipes.append(ours)
            children.append(child)
        signal.signal(signal.SIGINT, interrupt)
        for pipe in pipes:
            pipe.recv()  # it has started
        send_all(time.monotonic() + TICK)
        _collect(pipes, run, progress)
    except (EOFError, OSError):
        raise GeneratorLost(
            "a generator process ended before its results came; was it killed for lack of memory?"
        ) from None
    finally:
        signal.signal(signal.SIGINT, before)
        for pipe in pipes:
            pipe.close()
        for child in children:
            child.join()
    return run


def _collect(pipes: list[Connection], run: Run, progress: ProgressBar) -> None:
    waiting = list(pipes)
    while waiting:
        for ready in wait(waiting):
            assert isinstance(ready, Connection)
            message = ready.recv()
            if isinstance(message, Share):
                run.shares.append(message)
                waiting.remove(ready)
            else:
                progress.show(pipes.index(ready), *message)


def _child(pipe: Connection, plan: LoadPlan, counter, share: int, shares: int) -> None:
    """Takes the moment to start, then perhaps None to stop early; sends progress and at last its Share."""
    raise_file_limit()

    def next_index() -> int:
        with counter.get_lock():
            counter.value += 1
            return counter.value - 1

    async def work(start: float) -> Share:
        load, loop = Load(plan, next_index, start, share, shares), asyncio.get_running_loop()

        def stop() -> None:  # a message from the parent, or its end
            loop.remove_reader(pipe.fileno())
            load.stop()

        loop.add_reader(pipe.fileno(), stop)
        return await _drive(load, lambda *counts: pipe.send(counts))

    with contextlib.suppress(BrokenPipeError, EOFError):  # the parent has gone
        pipe.send("ready")
        start = pipe.recv()
        pipe.send(Share([], 0, 0.0) if start is None else asyncio.run(work(start)))


async def _drive(load: Load, show: Callable[[int, int, int], object]) -> Share:
    """Run a load and show (ended, failed, text events) now and then."""
    cpu, wall = time.process_time(), time.monotonic()
    running = asyncio.ensure_future(load.run())
    while not running.done():
        await asyncio.wait({running}, timeout=TICK)
        show(len(load.records), sum(1 for r in load.records if r.failure), load.events)
    running.result()
    return Share(load.records, load.unfinished, (time.process_time() - cpu) / (time.monotonic() - wall))
