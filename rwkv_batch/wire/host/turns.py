"""A front end's turns to change models and adapters, of which the supervisor gives one at a time."""

import asyncio
from collections.abc import Callable
from types import TracebackType

from msgspec.structs import replace

from rwkv_batch.wire.codec import encode
from rwkv_batch.wire.commands import LoadAdapter, LoadModel, RemoveAdapter, RemoveModel
from rwkv_batch.wire.supervision import ChangeOver, ChangeWanted

Change = LoadModel | RemoveModel | LoadAdapter | RemoveAdapter


class ChangeTurns:
    """`async with` waits for a turn, and gives it back. One at a time, on one event loop."""

    def __init__(self, send: Callable[[object], None], named: Callable[[str], str]) -> None:
        """`send`: to the supervisor. `named`: what a model of a file is called that has no other name."""
        self._send, self._named = send, named
        self._granted: Callable[[], object] | None = None
        self._change: bytes | None = None

    async def __aenter__(self) -> "ChangeTurns":
        loop, granted = asyncio.get_running_loop(), asyncio.Event()
        self._granted, self._change = lambda: loop.call_soon_threadsafe(granted.set), None
        self._send(ChangeWanted())
        await granted.wait()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._send(ChangeOver(self._change))

    def granted(self) -> None:
        """The supervisor has given the turn. From any thread."""
        if self._granted:
            self._granted()

    def changed(self, change: Change) -> None:
        """All engines have made this change, which others make that are started later."""
        if isinstance(change, LoadModel):
            change = replace(change, name=change.name or self._named(change.path))
        self._change = encode(change)
