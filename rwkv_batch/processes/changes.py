"""Changes of models and adapters where there are several engines: one at a time, made by all of them."""

from collections import deque

from rwkv_batch.processes.child import Child
from rwkv_batch.wire.codec import compacted
from rwkv_batch.wire.supervision import ChangeGranted


class ChangeQueue:
    """Which there have been since the server began, and which front end may make the next one.

    No engine begins to serve while one is made, so that all that serve make it.
    """

    def __init__(self) -> None:
        self.made: list[bytes] = []  # what an engine has to make that is started now
        self._changing: Child | None = None
        self._waiting: deque[Child] = deque()

    @property
    def under_way(self) -> bool:
        return self._changing is not None

    def wanted(self, frontend: Child) -> None:
        """A front end waits until it may make one."""
        self._waiting.append(frontend)
        self.grant()

    def over(self, frontend: Child, command: bytes | None) -> None:
        """It has made this one; None: none. `grant` follows."""
        if command is not None:
            self.made = compacted(self.made, command)
        if self._changing is frontend:
            self._changing = None

    def lost(self, frontend: Child) -> None:
        """It has died. `grant` follows."""
        self._waiting = deque(each for each in self._waiting if each is not frontend)
        self.over(frontend, None)

    def grant(self) -> None:
        """Let the one begin that has waited longest, if none is made now."""
        if self._changing is None and self._waiting:
            self._changing = self._waiting.popleft()
            self._changing.send(ChangeGranted())
