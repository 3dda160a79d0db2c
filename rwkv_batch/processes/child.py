"""A process of the server, and its pipe to the supervisor."""

import logging
import multiprocessing
import queue
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing.connection import wait
from threading import Thread

START_AGAIN = 1.0  # seconds until it is tried again to start a process where there can be none
FAILED = 1  # the exit code of what may work when it is started again
REFUSED = 2  # the exit code of what cannot do its work, for which nothing starts it again

log = logging.getLogger(__name__)
spawn = multiprocessing.get_context("spawn")  # a fork would share sockets and threads


class CannotStart(OSError):
    """The system has no process or thread left; it may have later."""

    def __init__(self, name: str, why: Exception) -> None:
        super().__init__(None, f"{name}: {getattr(why, 'strerror', None) or why}")


class Child:
    """A process and the supervisor's end of its pipe. `target` is called with `args` and the other end."""

    def __init__(self, name: str, target: Callable[..., None], *args: object) -> None:
        """Raises CannotStart; then nothing of it is left."""
        self.name, self.started = name, time.monotonic()
        self._outbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._sender = Thread(target=self._transmit, name="pipe", daemon=True)
        try:
            self.control, theirs = spawn.Pipe()
        except OSError as error:
            raise CannotStart(name, error) from error
        try:
            self._sender.start()
            place = tempfile.gettempdir()  # known since the server began
            self.process = spawn.Process(target=_begin, args=(place, target, *args, theirs), name=name)
            self.process.start()
        except (OSError, RuntimeError) as error:  # of a process, of a thread
            self._outbox.put(None)
            self.control.close()
            raise CannotStart(name, error) from error
        finally:
            theirs.close()
        log.info("%s started as process %d", name, self.process.pid)

    def send(self, message: object) -> None:
        """Waits for nothing: a process that is stopped may not read its pipe for long."""
        self._outbox.put(message)

    def refusal(self) -> str | None:
        """Why it cannot do its work, once it has ended; None: it has died otherwise."""
        self.process.join()
        if self.process.exitcode != REFUSED:
            return None
        with suppress(EOFError, OSError):
            return str(self.control.recv())
        return "It has not said why it ends."

    def close(self) -> None:
        """Returns when it has ended."""
        self.process.join()
        self._outbox.put(None)
        self._sender.join()
        self.control.close()

    def _transmit(self) -> None:
        with suppress(OSError):  # it has died, which its sentinel reports
            while (message := self._outbox.get()) is not None:
                self.control.send(message)


def _begin(place: str, target: Callable[..., None], *args: object) -> None:
    """In the new process, which would find the folder for temporary files by writing one into each."""
    tempfile.tempdir = place
    target(*args)


class LaterStarts:
    """Processes that die while the server runs are started again, if not now, then later."""

    def __init__(self) -> None:
        self._waiting: list[tuple[float, Callable[[], None]]] = []  # and when, of the monotonic clock

    @property
    def due(self) -> float | None:
        """Seconds until `look` does something; None: nothing waits for it."""
        times = [at for at, _ in self._waiting]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def start(self, start: Callable[[], None], pause: float = 0.0) -> None:
        """Call this in so many seconds, and if it raises CannotStart now and then until it does not."""
        if pause:
            self._waiting.append((time.monotonic() + pause, start))
            return
        try:
            start()
        except CannotStart as error:
            log.error("%s; this is tried again in %.0f s", error.strerror, START_AGAIN)
            self._waiting.append((time.monotonic() + START_AGAIN, start))

    def look(self) -> None:
        """Start what is due."""
        now = time.monotonic()
        due = [each for each in self._waiting if each[0] <= now]  # in their order
        self._waiting = [each for each in self._waiting if each[0] > now]
        for _, start in due:
            self.start(start)


def end_all(children: Iterable[Child], seconds: float) -> list[Child]:
    """Kill them. Returns those that do not end within so many seconds, as a device or a disk keeps them."""
    left: dict[object, Child] = {child.process.sentinel: child for child in children}
    for child in left.values():
        child.process.kill()
    deadline = time.monotonic() + seconds
    while left and (patience := deadline - time.monotonic()) > 0:
        for sentinel in wait([child.process.sentinel for child in left.values()], patience):
            left.pop(sentinel).close()
    return [*left.values()]
