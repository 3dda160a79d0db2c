"""What is to be done about streams that nobody has any more, in a thread of its own."""

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

log = logging.getLogger(__name__)


class DroppedStreams:
    """One for each front end.

    A stream is dropped in the thread that runs, wherever that is when the garbage collector finds it: it may
    hold any lock, also one of a library. So nothing is done there that could wait for one.
    """

    def __init__(self) -> None:
        self._ends = SimpleQueue[Callable[[], object]]()  # whose `put` may come in between its own
        threading.Thread(target=self._run, name="dropped", daemon=True).start()

    def put(self, end: Callable[[], object]) -> None:
        """Have `end` called soon. Waits for nothing."""
        self._ends.put(end)

    def _run(self) -> None:
        while True:
            _call(self._ends.get())


def _call(end: Callable[[], object]) -> None:
    try:
        end()
    except Exception as error:  # the thread serves all others
        log.error("a stream that was dropped has not ended: %s", type(error).__name__)
