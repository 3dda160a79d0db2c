"""The state of a front end while it runs: the engine, the requests in flight, and whether it drains."""

import asyncio
import threading
import time
import weakref

from routes.http.errors import ApiError
from routes.http.stream import JobStream, failure_status
from rwkv_batch.config import FrontendConfig
from rwkv_batch.wire.client import Client, RequestFailed, RequestRejected
from rwkv_batch.wire.commands import Command
from rwkv_batch.wire.protocol import CommandReply
from rwkv_batch.wire.supervision import EngineInfo

ENGINE_LOST = "The engine has stopped and is being started again; try again in a moment."
NO_REPLY = "The engine does not answer; try again in a moment."
SHUT_DOWN = "The server is shutting down; try again in a moment."
CUT_OFF_WITHIN = 1.0  # seconds that the last events of requests that are cut off may take
ANSWERED_WITHIN = 60.0  # seconds; a command may have to read a state from disk behind others
CROWD = 32  # live streams from which on events are joined
ABANDONED_AFTER = 60.0  # seconds in which a client reads nothing of its stream


class Frontend:
    """One per process. Handlers run on the event loop; other callers are threads."""

    def __init__(self, settings: FrontendConfig, client: Client) -> None:
        self.settings, self.client = settings, client
        self.engine: EngineInfo | None = None  # None until it is ready
        self.draining = False
        self.started = int(time.time())
        self._live = 0
        self._changed = threading.Condition()
        self._streams: weakref.WeakSet[JobStream] = weakref.WeakSet()

    @property
    def status(self) -> str:
        return "draining" if self.draining else "ready" if self.engine else "loading"

    def ready_engine(self) -> EngineInfo:
        """Raises ApiError 503 when no request can be taken."""
        engine = self.engine
        if self.draining:
            raise ApiError(503, SHUT_DOWN)
        if engine is None:
            raise ApiError(503, "The model is still loading; try again in a moment.")
        return engine

    def enter(self) -> None:
        """A request goes to the engine. Raises ApiError 503 when too many are in flight."""
        with self._changed:
            if self._live >= self.settings.max_streams:
                raise ApiError(
                    503, f"{self._live} requests are being answered and no more fit; try again in a moment."
                )
            self._live += 1

    def leave(self) -> None:
        """Called once for each `enter`."""
        with self._changed:
            self._live -= 1
            self._changed.notify_all()

    async def ask(self, command: Command) -> CommandReply:
        """Have the engine carry out `command`. Raises ApiError."""
        engine = self.ready_engine()
        self.enter()
        try:
            return await asyncio.wait_for(self.client.ask(command), ANSWERED_WITHIN)
        except (RequestRejected, RequestFailed) as error:
            raise ApiError(failure_status(error, engine_lives=self.engine is engine), str(error)) from None
        except TimeoutError:
            raise ApiError(503, NO_REPLY) from None
        finally:
            self.leave()

    def crowded(self) -> bool:
        return self._live >= CROWD

    def watch(self, stream: JobStream) -> None:
        """Close `stream` once its client reads nothing for ABANDONED_AFTER seconds."""
        with self._changed:
            self._streams.add(stream)

    def close_abandoned(self) -> None:
        with self._changed:
            streams = list(self._streams)
        for stream in streams:
            if stream.idle() > ABANDONED_AFTER:
                stream.close("client stopped taking")

    def engine_lost(self) -> None:
        self.engine = None
        self.client.fail_all(ENGINE_LOST)

    def drain(self, seconds: float) -> None:
        """Take no more requests; return when none is live, or after `seconds`."""
        self.draining = True
        for message, patience in ((None, seconds), (SHUT_DOWN, CUT_OFF_WITHIN)):
            if message:
                self.client.fail_all(message)
            with self._changed:
                if self._changed.wait_for(lambda: self._live == 0, patience):
                    return
