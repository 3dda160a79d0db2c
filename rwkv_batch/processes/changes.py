"""Changes of models and adapters where there are several engines: one at a time, made by all of them."""

from collections import deque

from rwkv_batch.processes.child import Child
from rwkv_batch.wire.codec import compacted
from rwkv_batch.wire.supervision import ChangeGranted


class ChangeQueue:
    """The changes since the server began, and which front end may make the next one.

    No engine begins to serve while one is made, so that all that serve make it.
    """

    def __init__(self) -> None:
        self.made: list[bytes] = []  # what an engine has to make that is started now
        self._changing: tuple[Child, bytes] | None = None
        self._waiting: deque[tuple[Child, bytes]] = deque()

    @property
    def under_way(self) -> bool:
        return self._changing is not None

    def wanted(self, frontend: Child, command: bytes) -> None:
        """A front end waits until it may make this one."""
        self._waiting.append((frontend, command))
        self.grant()

    def over(self, frontend: Child, made: bool) -> bytes | None:
        """It has made its change, or nothing has changed. `grant` follows.

        Returns what was made, which engines that are being started have to make too.
        """
        if self._changing is None or self._changing[0] is not frontend:
            return None
        (_, command), self._changing = self._changing, None
        if not made:
            return None
        self.made = compacted(self.made, command)
        return command

    def lost(self, frontend: Child) -> bytes | None:
        """It has died. `grant` follows.

        The change that it was making counts as made: engines carry out what they have been sent, though
        nobody waits for the answer. Returns it.
        """
        self._waiting = deque(each for each in self._waiting if each[0] is not frontend)
        return self.over(frontend, made=True)

    def grant(self) -> None:
        """Let the one begin that has waited longest, if none is made now."""
        if self._changing is None and self._waiting:
            self._changing = self._waiting.popleft()
            self._changing[0].send(ChangeGranted())
