"""A store of objects for fsspec, in memory, that can be slow, full, away or damaged."""

import threading
from typing import Any, ClassVar

import fsspec
from fsspec import AbstractFileSystem

PROTOCOL = "faulty"
PATIENCE = 30.0  # seconds until something that does not come is a failure


class FaultyObjects(AbstractFileSystem):  # type: ignore[misc]
    """All of one process are the same store: `kept`, by path."""

    protocol = PROTOCOL
    cachable = False
    kept: ClassVar[dict[str, bytes]] = {}
    reads = 0
    fails_to_read: Exception | None = None
    fails_to_write: Exception | None = None
    holds: threading.Event | None = None  # calls return when it is set

    @classmethod
    def renew(cls) -> None:
        """An empty store without faults."""
        if cls.holds:
            cls.holds.set()
        cls.kept, cls.reads = {}, 0
        cls.fails_to_read = cls.fails_to_write = cls.holds = None

    def pipe_file(self, path: str, value: bytes, **more: Any) -> None:
        self._wait()
        if self.fails_to_write:
            raise self.fails_to_write
        self.kept[path] = value

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **more: Any) -> bytes:
        type(self).reads += 1
        self._wait()
        if self.fails_to_read:
            raise self.fails_to_read
        if path not in self.kept:
            raise FileNotFoundError(path)
        return self.kept[path][start:end]

    def find(self, path: str, prefix: str = "", **more: Any) -> list[str]:
        self._wait()
        if self.fails_to_read:
            raise self.fails_to_read
        return [each for each in self.kept if each.startswith(f"{path}/{prefix}")]

    def rm_file(self, path: str) -> None:
        self._wait()
        if self.fails_to_write:
            raise self.fails_to_write
        if self.kept.pop(path, None) is None:
            raise FileNotFoundError(path)

    def _wait(self) -> None:
        if self.holds:
            assert self.holds.wait(PATIENCE)


fsspec.register_implementation(PROTOCOL, FaultyObjects, clobber=True)
