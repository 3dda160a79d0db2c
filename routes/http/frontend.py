"""The state of a front end while it runs: the engine, the requests in flight, and whether it drains."""

import asyncio
import copy
import logging
import threading
import time
import weakref
from collections.abc import AsyncIterator, Sequence
from uuid import uuid4

from msgspec.structs import replace

from routes.callers.caller import Caller, not_allowed
from routes.callers.metering import Accounts
from routes.callers.trace import Tracing
from routes.callers.wire import CallerWire
from routes.http.counts import HttpCounts
from routes.http.dropped import DroppedStreams
from routes.http.errors import ApiError
from routes.http.readiness import Readiness
from routes.http.stream import JobStream, failure_status
from rwkv_batch.audit.log import AuditLog
from rwkv_batch.config import FrontendConfig
from rwkv_batch.packages import described
from rwkv_batch.wire.client import EngineGone, RequestFailed, RequestRejected, Wire
from rwkv_batch.wire.commands import Command
from rwkv_batch.wire.protocol import CommandReply, ModelMessage
from rwkv_batch.wire.supervision import EngineInfo, Loading, Restarts

LOADING = "The model is still loading; try again in a moment."
ENGINE_LOST = "The engine has stopped and is being started again; try again in a moment."
NO_REPLY = "The engine does not answer; try again in a moment."
SHUT_DOWN = "The server is shutting down; try again in a moment."
CUT_OFF_WITHIN = 1.0  # seconds that the last events of requests that are cut off may take
ANSWERED_WITHIN = 60.0  # seconds; a command may have to read a state from disk behind others
READ_WITHIN = 3600.0  # the same for one that reads a file, whose disk may be slow
CROWD = 32  # live streams from which on events are joined
STALLED = 10.0  # seconds after which a stream that nobody reads ends for a new one, where there is no room

log = logging.getLogger(__name__)


class Shared:
    """What all requests of a front end see the same."""

    def __init__(self) -> None:
        self.models: dict[str, EngineInfo] = {}  # by name, the default one first; none until they are ready
        self.loading: list[Loading] = []  # models that will be served beside these, or in place of some
        self.draining = False
        self.restarts = Restarts()  # of the server's processes
        self.informed = threading.Event()  # the supervisor has said what serves by now
        self.answered = HttpCounts()
        self.started = int(time.time())
        self.live = 0  # requests
        self.changed = threading.Condition()
        self.streams: weakref.WeakSet[JobStream] = weakref.WeakSet()
        self.dropped = DroppedStreams()


class Frontend:
    """One per process. Handlers run on the event loop; other callers are threads.

    Where requests are counted or logged in detail, a handler gets one of its own (`seen_by`), whose `client`
    and `models` are those that its caller may use.
    """

    def __init__(self, settings: FrontendConfig, client: Wire, addresses: Sequence[str] = ()) -> None:
        """`addresses`: where the engines listen. Raises KeysError, AuditError."""
        self.settings, self.client = settings, client
        self.shared = Shared()
        self.readiness = Readiness(addresses)
        self.accounts = Accounts(settings.keys, settings.keys_copy) if settings.keys else None
        self.audit = AuditLog(settings.audit_log) if settings.audit_log else None
        self.tracing = _tracing_to(settings.traces) if settings.traces else None
        self._caller: Caller | None = None

    def seen_by(self, caller: Caller) -> "Frontend":
        """The front end for one request."""
        view = copy.copy(self)
        view.client, view._caller = CallerWire(self.client, caller, self.accounts), caller
        return view

    @property
    def metered(self) -> bool:
        """Whether handlers get a front end of their own."""
        return bool(self.accounts or self.audit or self.tracing) or self.settings.log_format == "json"

    @property
    def guarded(self) -> bool:
        """Whether a password or a key is needed."""
        return self.settings.password is not None or self.accounts is not None

    @property
    def models(self) -> dict[str, EngineInfo]:
        """By name, the default one first: those that may be used; none until they are ready."""
        models, caller = self.shared.models, self._caller
        if caller is None or caller.key is None or caller.key.models is None:
            return models
        return {name: info for name, info in models.items() if caller.may_use_model(name)}

    @property
    def loading(self) -> list[Loading]:
        return self.shared.loading

    @property
    def restarts(self) -> Restarts:
        return self.shared.restarts

    @property
    def started(self) -> int:
        return self.shared.started

    def refuse_hidden(self, name: str) -> None:
        """Raises ApiError 403 for a model that is served, but not to this caller."""
        if any(name == each or name.startswith((f"{each} ", f"{each}:")) for each in self.shared.models):
            raise not_allowed(f"use the model {name[:200]}")

    @property
    def draining(self) -> bool:
        return self.shared.draining

    @property
    def status(self) -> str:
        if self.draining:
            return "draining"
        return "ready" if self.shared.models and not self.readiness.down else "loading"

    def serve(self, models: list[EngineInfo]) -> None:
        """These are served from now on, the default one first."""
        self.shared.models = {info.model: info for info in models}

    @property
    def readiness_now(self) -> tuple[str, str]:
        """Whether a request would be answered now: "ready", or another state and the reason, one sentence."""
        if self.draining:
            return "draining", SHUT_DOWN
        if not self.shared.models or not self.readiness.serving:
            return "loading", ENGINE_LOST if self.restarts.engine else LOADING
        if self.readiness.down:  # before the supervisor has seen it
            return "loading", ENGINE_LOST
        if silent := self.readiness.silent:
            return "stalled", f"The engine has made no step for {silent:.0f} s."
        return "ready", ""

    def ready_engine(self) -> EngineInfo:
        """The default model. Raises ApiError 503 when no request can be taken."""
        models = self.models
        if self.draining:
            raise ApiError(503, SHUT_DOWN)
        if not models and self.shared.models:
            raise not_allowed("use any of the models that are served")
        if not models:
            raise ApiError(503, LOADING)
        return next(iter(models.values()))

    def tick(self) -> None:
        """Called ten times a second."""
        self.close_abandoned()
        if self.accounts:
            self.accounts.tick()

    def close(self) -> None:
        """Write what has been counted, when no request runs any more."""
        if self.accounts:
            self.accounts.write()
        if self.audit:
            self.audit.close()
        if self.tracing:
            self.tracing.close()

    def enter(self) -> None:
        """A request goes to the engine. Raises ApiError 503 when too many are in flight.

        Before that, the stream ends that has been read least lately, if that is long ago.
        """
        if self.shared.live >= self.settings.max_streams:
            stalled = max(self._streams(), key=JobStream.idle, default=None)
            if stalled and stalled.idle() > STALLED:
                stalled.stop()
        with self.shared.changed:
            if self.shared.live >= self.settings.max_streams:
                raise ApiError(
                    503,
                    f"{self.shared.live} requests are being answered and no more fit; try again in a moment.",
                )
            self.shared.live += 1

    def leave(self) -> None:
        """Called once for each `enter`."""
        with self.shared.changed:
            self.shared.live -= 1
            self.shared.changed.notify_all()

    async def ask(self, command: Command, within: float | None = None) -> CommandReply:
        """Have the engine carry out `command`, within so many seconds. Raises ApiError."""
        default = self.ready_engine()
        if self._caller and isinstance(command, ModelMessage) and not command.to_model:
            command = replace(command, to_model=default.model)  # the first that the caller may use
        self.enter()
        try:
            return await asyncio.wait_for(self.client.ask(command), within or ANSWERED_WITHIN)
        except (RequestRejected, RequestFailed) as error:
            raise ApiError(self.status_of(error), str(error)) from None
        except TimeoutError:
            raise ApiError(503, NO_REPLY) from None
        finally:
            self.leave()

    def status_of(self, error: RequestRejected | RequestFailed) -> int:
        """The HTTP status for what the engine has rejected or failed."""
        return failure_status(
            error, engine_lives=bool(self.shared.models) and not isinstance(error, EngineGone)
        )

    async def ask_each(self, command: Command) -> AsyncIterator[tuple[EngineInfo, CommandReply]]:
        """What every model answers, the default one first; without those that are removed meanwhile.

        Raises ApiError.
        """
        for model in list(self.models.values()):
            try:
                answer = await self.ask(replace(command, id=uuid4().hex, to_model=model.model))
            except ApiError as error:
                if error.status == 404:
                    continue
                raise
            yield model, answer

    @property
    def busy(self) -> bool:
        """Whether a request is with the engine."""
        return self.shared.live > 0

    def crowded(self) -> bool:
        return self.shared.live >= CROWD

    def watch(self, stream: JobStream) -> None:
        """Close `stream` once its client reads nothing for `send_timeout` seconds."""
        with self.shared.changed:
            self.shared.streams.add(stream)

    def close_abandoned(self) -> None:
        if most := self.settings.send_timeout:
            for stream in self._streams():
                if stream.idle() > most:
                    stream.stop()

    def _streams(self) -> list[JobStream]:
        with self.shared.changed:
            return [stream for stream in self.shared.streams if stream.live]

    def engine_lost(self, engine: int = 0) -> None:
        """That engine has died."""
        self.readiness.lost(engine)
        left = self.client.lose(engine, ENGINE_LOST)
        self.serve(left.models if left else [])
        self.shared.loading = left.loading if left else []
        if not left:
            self.client.fail_all(ENGINE_LOST)

    def drain(self, seconds: float) -> None:
        """Take no more requests; return when none is live, or after `seconds`."""
        self.shared.draining = True
        for message, patience in ((None, seconds), (SHUT_DOWN, CUT_OFF_WITHIN)):
            if message:
                self.client.fail_all(message)
            with self.shared.changed:
                if self.shared.changed.wait_for(lambda: self.shared.live == 0, patience):
                    return


def _tracing_to(url: str) -> Tracing | None:
    """Spans to a collector. The library is loaded only here. None: it cannot be.

    It could at the start, where `flags.collector` has tried; requests are worth more than spans.
    """
    try:
        from routes.callers.tracing import SpanSender

        return SpanSender(url)
    except Exception as error:  # of packages of others, of any class
        log.error("no spans are sent (%s); install the requirements of traces again", described(error))
        return None
