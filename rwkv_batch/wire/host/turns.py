"""A front end's turns to change models and adapters, of which the supervisor gives one at a time."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from msgspec.structs import replace

from rwkv_batch.wire.codec import encode
from rwkv_batch.wire.commands import LoadAdapter, LoadModel, RemoveAdapter, RemoveModel
from rwkv_batch.wire.supervision import ChangeOver, ChangeWanted

Change = LoadModel | RemoveModel | LoadAdapter | RemoveAdapter


class ChangeTurns:
    """One turn at a time, on one event loop."""

    def __init__(self, send: Callable[[object], None], named: Callable[[str], str]) -> None:
        """`send`: to the supervisor. `named`: what a model of a file is called that has no other name."""
        self._send, self._named = send, named
        self._granted: Callable[[], object] | None = None

    @asynccontextmanager
    async def turn(self, change: Change) -> AsyncIterator[None]:
        """Wait for the turn to make this change, and give it back: without an exception it has been made."""
        loop, granted = asyncio.get_running_loop(), asyncio.Event()
        self._granted = lambda: loop.call_soon_threadsafe(granted.set)
        if isinstance(change, LoadModel):
            change = replace(change, name=change.name or self._named(change.path))
        self._send(ChangeWanted(encode(change)))
        await granted.wait()
        made = False
        try:
            yield
            made = True
        finally:
            self._send(ChangeOver(made))

    def granted(self) -> None:
        """The supervisor has given the turn. From any thread."""
        if self._granted:
            self._granted()
