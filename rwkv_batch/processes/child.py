"""A process of the server, and its pipe to the supervisor."""

import logging
import multiprocessing
import queue
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing.connection import wait
from threading import Thread

REFUSED = 2  # the exit code of what cannot do its work, for which nothing starts it again

log = logging.getLogger(__name__)
spawn = multiprocessing.get_context("spawn")  # a fork would share sockets and threads


class Child:
    """A process and the supervisor's end of its pipe. `target` is called with `args` and the other end."""

    def __init__(self, name: str, target: Callable[..., None], *args: object) -> None:
        self.name, self.started = name, time.monotonic()
        self.control, theirs = spawn.Pipe()
        self.process = spawn.Process(target=target, args=(*args, theirs), name=name)
        self.process.start()
        theirs.close()
        self._outbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._sender = Thread(target=self._transmit, name="pipe", daemon=True)
        self._sender.start()
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
