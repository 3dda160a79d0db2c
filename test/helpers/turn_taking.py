"""Threads of the product that take turns, in an order drawn from a seed, on a clock that nobody waits for.

Inside `World.active` a thread that is started becomes a task. Exactly one task runs at a time, until it waits
for a queue, a condition, an event or the end of another task, or until it comes to a point at which others
may run. Which one runs next is drawn. The clock moves a little with each turn, and if all tasks wait it jumps
to the first of their deadlines. So a run is the same each time it is repeated with the same seed, and minutes
of waiting take none.

The order of sets of strings has to be the same too: run with PYTHONHASHSEED=0.
"""

import gc
import queue
import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any
from unittest import mock

from greenlet import GreenletExit, getcurrent, greenlet

SPEEDS = (1.0, 1.0, 1.0, 0.1, 0.01)  # of tasks: how often they are drawn, beside others


class Stuck(Exception):
    """All tasks wait, and nothing will happen any more."""


@dataclass(eq=False)
class Task:
    """A thread. `process`: those of the same one die together."""

    name: str
    process: str
    run: greenlet
    speed: float
    ready: Callable[[], bool] = lambda: True
    deadline: float | None = None
    ended: bool = False


class World:
    """All tasks, the clock, and the numbers that the product draws at random."""

    def __init__(self, seed: object) -> None:
        self.draw = Random(f"tasks {seed}")
        self.now = 1_000_000.0
        self.turns = 0
        self.errors: list[BaseException] = []  # with which tasks have ended
        self._secrets = Random(f"secrets {seed}")
        self._tasks: list[Task] = []
        self._hub = getcurrent()
        self._running: Task | None = None
        self._doomed: list[str] = []
        self.threads: dict[int, Task] = {}

    def start(self, name: str, run: Callable[[], object], process: str | None = None) -> Task:
        """A task of a process; None: of that of the task that runs."""
        process = process or (self._running.process if self._running else "main")

        def body() -> None:
            try:
                run()
            except Exception as error:
                self.errors.append(error)
            finally:
                task.ended = True

        task = Task(name, process, greenlet(body, self._hub), self.draw.choice(SPEEDS))
        self._tasks.append(task)
        return task

    def wait(self, ready: Callable[[], bool], seconds: float | None = None) -> bool:
        """For a task: let others run until this is true, which it returns, or so many seconds have gone."""
        task = self._running
        if task is None or task.ended:  # nobody else runs any more, or it is being killed
            return ready()
        task.ready, task.deadline = ready, None if seconds is None else self.now + seconds
        self._hub.switch()
        task.deadline = None
        return ready()

    def pause(self) -> None:
        """A point at which others may run."""
        self.wait(lambda: True)

    def sleep(self, seconds: float) -> None:
        self.wait(lambda: False, seconds)

    def kill(self, process: str) -> None:
        """End all tasks of a process before the next turn, in the middle of what they do."""
        self._doomed.append(process)
        self.pause()

    def run(self, until: Callable[[], bool], seconds: float) -> None:
        """Run tasks until that is true. Raises what a task has raised; Stuck, also after so many seconds."""
        give_up = self.now + seconds
        while not until():
            self._turn()
            if self.errors:
                raise self.errors[0]
            if self.now > give_up:
                raise Stuck(f"after {seconds:.0f} s there waits still: {self._waiting()}")

    def _turn(self) -> None:
        self._bury()
        tasks = self._tasks
        able = [task for task in tasks if task.ready() or (task.deadline or self.now + 1) <= self.now]
        if not able:
            deadlines = [task.deadline for task in tasks if task.deadline is not None]
            if not deadlines:
                raise Stuck(f"nothing happens any more, and there waits: {self._waiting()}")
            self.now = max(self.now, min(deadlines))
            return
        task = able[0] if len(able) == 1 else self.draw.choices(able, [each.speed for each in able])[0]
        self.turns += 1
        self.now += 0.0001
        self._running = task
        task.run.switch()
        self._running = None
        if task.ended:
            self._tasks.remove(task)

    def _bury(self) -> None:
        """End the tasks of processes that have been killed."""
        doomed, self._doomed = self._doomed, []
        for task in [task for task in self._tasks if task.process in doomed]:
            task.ended, self._running = True, task
            if task.run:  # it has begun
                task.run.throw(GreenletExit)
            self._running = None
            self._tasks.remove(task)

    def _waiting(self) -> str:
        return ", ".join(f"{task.process}/{task.name}" for task in self._tasks)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Threads that are started inside are tasks, and clocks and random numbers are the world's."""
        world = self

        class Queue:
            """A queue.SimpleQueue."""

            def __init__(self) -> None:
                self._items: deque[Any] = deque()

            def put(self, item: object) -> None:
                self._items.append(item)
                world.pause()

            def get(self, timeout: float | None = None) -> Any:
                if not world.wait(lambda: bool(self._items), timeout):
                    raise queue.Empty
                return self._items.popleft()

            def get_nowait(self) -> Any:
                if not self._items:
                    raise queue.Empty
                return self._items.popleft()

            def empty(self) -> bool:
                return not self._items

        class Condition:
            """A threading.Condition, of tasks that never stop while they hold it."""

            def __init__(self, lock: object = None) -> None:
                self._notified = 0

            def __enter__(self) -> None:
                pass

            def __exit__(self, *error: object) -> None:
                pass

            def wait(self, timeout: float | None = None) -> bool:
                seen = self._notified
                return world.wait(lambda: self._notified != seen, timeout)

            def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
                return world.wait(predicate, timeout)

            def notify(self, n: int = 1) -> None:
                self._notified += 1

            notify_all = notify

        def begin(thread: threading.Thread) -> None:
            world.threads[id(thread)] = world.start(thread.name, thread.run)

        def join(thread: threading.Thread, timeout: float | None = None) -> None:
            task = world.threads[id(thread)]
            world.wait(lambda: task.ended, timeout)

        def is_alive(thread: threading.Thread) -> bool:
            task = world.threads.get(id(thread))
            return task is not None and not task.ended

        def clock() -> float:
            return world.now

        bound = [
            module
            for name, module in sys.modules.items()
            if name.startswith("rwkv_batch.") and hasattr(module, "monotonic")
        ]
        with ExitStack() as patches:
            # What the collector ends, as a task of a killed process, would let others run in the middle of
            # anything, and not at the same place each time.
            gc.disable()
            patches.callback(gc.enable)
            for module in bound:
                patches.enter_context(mock.patch.object(module, "monotonic", clock))
            for owner, name, value in (
                (queue, "SimpleQueue", Queue),
                (threading, "Condition", Condition),
                (threading.Thread, "start", begin),
                (threading.Thread, "join", join),
                (threading.Thread, "is_alive", is_alive),
                (time, "monotonic", clock),
                (time, "time", clock),
                (secrets, "randbits", self._secrets.getrandbits),
                (secrets, "randbelow", self._secrets.randrange),
            ):
                patches.enter_context(mock.patch.object(owner, name, value))
            yield

    def end(self) -> None:
        """Kill all processes."""
        self._doomed = [task.process for task in self._tasks]
        self._bury()
