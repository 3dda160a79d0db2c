"""A front end's turns to change models and adapters, of which the supervisor gives one at a time."""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from msgspec.structs import replace

from rwkv_batch.wire.codec import decode_to_engine, encode
from rwkv_batch.wire.commands import LoadAdapter, LoadModel, RemoveAdapter, RemoveModel
from rwkv_batch.wire.supervision import ChangeOver, ChangeWanted

Change = LoadModel | RemoveModel | LoadAdapter | RemoveAdapter


class ChangeTurns:
    """One turn at a time, on one event loop."""

    def __init__(self, send: Callable[[object], None], named: Callable[[str], str]) -> None:
        """`send`: to the supervisor. `named`: what a model of a file is called that has no other name."""
        self._to_supervisor, self._named = send, named
        self._sending = threading.Lock()  # as a pipe is for one thread at a time
        self._waiting = deque[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]]()  # as they have asked

    @asynccontextmanager
    async def turn(self, change: Change) -> AsyncIterator[None]:
        """Wait for the turn to make this change, and give it back: without an exception it has been made.

        Who is cancelled while it waits gives its turn back when that comes.
        """
        loop = asyncio.get_running_loop()
        granted = loop.create_future()
        if isinstance(change, LoadModel):
            change = replace(change, name=change.name or self._named(change.path))
        made = False
        try:
            self._waiting.append((loop, granted))
            self._send(ChangeWanted(encode(change)))
            await granted
            yield
            made = True
        finally:
            if granted.done() and not granted.cancelled():
                self._send(ChangeOver(made))

    def finish(self, left: bytes, work: Callable[[Change], Awaitable[bool]]) -> None:
        """Begin to make the change that another front end has left, in a thread of its own. From any thread.

        `work` says whether it has been made. Raises RuntimeError if there can be no thread.
        """
        change = decode_to_engine(left)
        assert isinstance(change, Change)

        async def run() -> None:
            made = False
            try:
                made = await work(change)
            finally:
                self._send(ChangeOver(made))

        threading.Thread(target=lambda: asyncio.run(run()), name="change", daemon=True).start()

    def granted(self) -> None:
        """The supervisor has given the turn to the one that has waited longest. From any thread."""
        loop, granted = self._waiting.popleft()
        loop.call_soon_threadsafe(self._give, granted)

    def _send(self, message: ChangeWanted | ChangeOver) -> None:
        with self._sending:
            self._to_supervisor(message)

    def _give(self, granted: asyncio.Future[None]) -> None:
        if granted.cancelled():
            self._send(ChangeOver(False))
        else:
            granted.set_result(None)
