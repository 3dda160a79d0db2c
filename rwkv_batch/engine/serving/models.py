"""The engines of one process, one for each model. One thread steps them in turn.

While several are busy, each gets the same time of the device (`shares.py`). `changes.py` adds and removes
models between two steps.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from threading import Event as Flag
from threading import Lock
from typing import Any

from rwkv_batch.engine.engine import Engine
from rwkv_batch.engine.metrics.device_time import DeviceTime
from rwkv_batch.engine.scheduling.row import DECODING, Outbox
from rwkv_batch.engine.serving.background import Background
from rwkv_batch.engine.serving.report import Figures, of_engine, of_process, of_sessions
from rwkv_batch.engine.serving.shares import Shares
from rwkv_batch.ops.device import StepClock, touch
from rwkv_batch.state.entries import Status
from rwkv_batch.state.log.protocol import SessionStore
from rwkv_batch.wire.commands import (
    EngineCommand,
    ExportSession,
    FetchState,
    GetDocument,
    GetMetrics,
    ListDocuments,
    ListModels,
    ListRequests,
    ListSessions,
    ListStartStates,
    SessionHistory,
    StopRequest,
    TextCommand,
)
from rwkv_batch.wire.protocol import CommandReply, Event, Failed, GenerateRequest, Rejected, RequestKey
from rwkv_batch.wire.supervision import EngineInfo

IDLE_SECONDS = 60.0  # without a step, after which the device is asked whether it still works,
STALLED_SECONDS = 5.0  # or for which rows have waited without one
CANCELLED = "The request was cancelled."

Message = GenerateRequest | EngineCommand
READS = (
    ListSessions | SessionHistory | ExportSession | FetchState | GetDocument | ListDocuments | ListStartStates
)


class Member:
    """A model that runs. `drained` is set when it takes no more requests and has ended those it had."""

    engine: Engine

    def __init__(self, engine: Engine) -> None:
        self.engine, self.info = engine, engine.info
        self.clock = StepClock(engine.runner.devices)
        self.background = Background(engine.runner.improve)
        self.drained = Flag()
        self._closing = Lock()

    def close(self) -> None:
        """Store what is not stored yet, and return when that is done. From any thread, more than once."""
        with self._closing:
            self.engine.close()

    def forget(self) -> None:
        """It is closed: its memory can be freed."""
        del self.engine, self.background


class Models:
    """What the process serves; the first model is the default one.

    All methods are for the thread that steps, but `post`, `member` and `step_bytes`.
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        members = [Member(engine) for engine in engines]
        self._named = {member.info.model: member for member in members}
        self._running = members
        self._retiring: list[Member] = []  # of them, those that take no more requests
        self._ended: list[Member] = []  # behind these, until they are closed
        self._turn: Member | None = None  # whose step is under way
        self._shares: Shares[Member] = Shares()
        self._times = {device: DeviceTime() for device in members[0].clock.devices}
        self._touched = time.monotonic()  # when the device was last asked whether it works
        self._past: dict[str, Figures] = {}  # by name: what engines counted that have been replaced
        self._outbox: Outbox = []
        self._calls: deque[tuple[Callable[[], None], Future[Any] | None]] = deque()
        self._over = False  # no call is made any more
        # Of a name: what waits until the model has its database, or (True) until there is a model.
        self._held: dict[str, tuple[bool, list[tuple[RequestKey, Message]]]] = {}

    @property
    def busy(self) -> bool:
        """Whether `launch` and `land` would do something. See Engine.busy."""
        return bool(self._outbox or self._calls) or any(member.engine.busy for member in self._running)

    @property
    def improves_in(self) -> float | None:
        """Seconds until `improve` does something, while none is busy; None: there is nothing to do."""
        pending = self._pending
        return pending[0].due(self._last_step) if pending else None

    @property
    def load(self) -> tuple[int, int]:
        """Rows of all models that wait or run, and tokens of their prompts that are not read yet."""
        rows = [row for member in self._running for row in member.engine.scheduler.rows() if row.leads]
        return len(rows), sum(row.input.left for row in rows if row.state is not DECODING)

    def pulse(self) -> float:
        """Seconds for which rows have needed a step, and none has ended; 0: none needs one.

        Where no step has ended for long, this returns when the device has done something else, if it can.
        """
        now = time.monotonic()
        waited = max((member.engine.waited(now) for member in self._running), default=0.0)
        idle = now - max(self._last_step, self._touched)
        if idle > IDLE_SECONDS or waited > STALLED_SECONDS:
            for device in dict.fromkeys(each for m in self._running for each in m.engine.runner.devices):
                touch(device)
            self._touched = time.monotonic()
        return waited

    @property
    def infos(self) -> list[EngineInfo]:
        """What is served, the default model first."""
        return [member.info for member in self._named.values()]

    @property
    def step_bytes(self) -> int:
        """Memory of the device that steps of the models need at times; they share it, as one step runs."""
        return max((member.engine.step_bytes for member in self._running), default=0)

    def add(self, key: RequestKey, request: GenerateRequest) -> None:
        """Queue a request; see Engine.add."""
        if member := self._find(key, request):
            member.engine.add(key, request)

    def command(self, key: RequestKey, command: EngineCommand | ListModels | GetMetrics) -> None:
        """Carry out a command; see Engine.command."""
        if isinstance(command, ListModels):
            self.reply(key, CommandReply(command.id, models=self.infos))
        elif isinstance(command, GetMetrics):
            self._report(key)
        elif member := self._find(key, command):
            member.engine.command(key, command)

    def cancel(self, key: RequestKey, closes: bool = False) -> None:
        """Drop a request's rows, waiting or running. closes: as of Cancel."""
        stored = closes and any(member.engine.stores(key) for member in self._running)
        for member in self._running:
            member.engine.cancel(key)
        self._unhold(lambda held: held == key)
        if not closes or stored:
            return
        failed = Failed(key[1], CANCELLED)
        if self._running:
            self._running[0].engine.parts.rows.emit(key, failed)  # behind what is emitted of its rows
        else:  # a model takes the place of the only one, which has ended
            self.reply(key, failed)

    def cancel_frontend(self, frontend: bytes) -> None:
        """Drop everything a front end has asked for."""
        for member in self._running:
            member.engine.cancel_frontend(frontend)
        self._unhold(lambda held: held[0] == frontend)

    def reply(self, key: RequestKey, event: Event) -> None:
        """Send an event with those of the next `launch`."""
        self._outbox.append((key, event))

    def post(self, call: Callable[[], None], result: Future[Any] | None = None) -> None:
        """From any thread: make this call in the next `launch`. `result` is cancelled if none comes."""
        self._calls.append((call, result))
        if self._over:
            self._cancel()

    def _cancel(self) -> None:
        with suppress(IndexError):  # another thread may do the same
            while True:
                _, result = self._calls.popleft()
                if result:
                    result.cancel()

    def launch(self) -> Outbox:
        """The first half of a step of one model; see Engine.launch. Returns what is ready of all."""
        while self._calls:
            call, _ = self._calls.popleft()
            call()
        events = self._outbox.copy()
        self._outbox.clear()
        if len(self._running) == 1:
            return events + self._launch(self._running[0])
        busy = [member for member in self._running if member.engine.busy]
        turn = self._shares.choose(busy) if busy else None
        for member in self._running:
            if member is not turn:
                events += member.engine.collect()
        return events + self._launch(turn) if turn else events

    def _launch(self, turn: Member) -> Outbox:
        self._turn, counts = turn, turn.engine.counts
        if turn.engine.busy:
            turn.background.begin_step()
        counts.steps.kind = None
        turn.clock.start()
        events = turn.engine.launch()
        turn.clock.stop(counts.steps.kind, counts.steps.together)
        return events

    def land(self) -> Outbox:
        """The second half, of the same model; see Engine.land."""
        turn, self._turn = self._turn, None
        events = turn.engine.land() if turn else []
        if turn:
            turn.background.end_step()
            self._spend(turn)
        for member in [member for member in self._retiring if member.engine.drained]:
            events += member.engine.settle()
            self._retiring.remove(member)
            self._running.remove(member)
            self._ended.append(member)
            self._shares.forget(member)
            member.drained.set()
        return events

    def improve(self) -> None:
        """Between two steps: do a piece of what makes later ones faster, if it is time for one."""
        pending = self._pending
        if pending and self.busy:
            any(background.between_steps() for background in pending)  # of one of them
        elif pending and not pending[0].due(self._last_step):
            pending[0].while_idle()

    @property
    def _pending(self) -> list[Background]:
        return [member.background for member in self._running if member.background.pending]

    @property
    def _last_step(self) -> float:
        """When the last step of any model has ended."""
        return max((member.background.ended for member in self._running), default=0.0)

    def _spend(self, turn: Member) -> None:
        """Note the time of the steps that have ended."""
        spent = 0.0
        for kind, of_devices, steps in turn.clock.read():
            longest = max(of_devices)  # the stage for which the others wait
            turn.engine.counts.steps.times[kind].observe(longest / steps, steps)
            spent += longest
            for device, seconds in zip(turn.clock.devices, of_devices, strict=True):
                self._times[device].add(seconds)
        if len(self._running) > 1:
            self._shares.spent(turn, spent)

    def close(self) -> None:
        """Store what is not stored yet. Threads that wait for a call end."""
        for member in [*self._running, *self._ended]:
            member.close()
        self._over = True
        self._cancel()
        for member in [*self._running, *self._ended]:
            member.drained.set()

    # Changes

    def member(self, name: str) -> Member | None:
        """The model that is served under this name."""
        return self._named.get(name)

    def join(self, name: str, engine: Engine) -> None:
        """A further model."""
        member = self._named[name] = Member(engine)
        self._running.append(member)

    def take_over(self, name: str, engine: Engine) -> None:
        """New requests of this name are the engine's; what runs ends with the weights it began with.

        If that has ended already, the engine has the database. Otherwise what needs that waits.
        """
        old = self._named.get(name)
        member = self._named[name] = Member(engine)  # where the old one was in the order
        self._running.append(member)
        if old and not old.drained.is_set():
            self._retiring.append(old)
            self._held[name] = False, []
        else:
            self._release(name)

    def hold(self, name: str) -> None:
        """The model takes no more requests; new ones wait until another one takes over."""
        self._retiring.append(self._named[name])
        self._held[name] = True, []

    def retire(self, name: str) -> Member:
        """Nothing is served under this name any more; what runs ends."""
        member = self._named.pop(name)
        self._retiring.append(member)
        return member

    def abandon(self, name: str) -> None:
        """Nothing is served under this name, where requests have waited for a model."""
        del self._named[name]
        self._release(name)

    def flush(self, member: Member) -> None:
        """The last events of a model that has ended and is closed."""
        self._ended.remove(member)
        self._past.setdefault(member.info.model, Figures()).merge(_counted(member).counters())
        self._outbox += member.engine.collect()

    def attach(self, name: str, store: SessionStore | None) -> None:
        """The model has the database that was the old one's."""
        self._named[name].engine.attach(store)
        self._release(name)

    # Metrics

    def _report(self, key: RequestKey) -> None:
        """Reply with the metrics of all models, when their sessions have been counted."""
        for member in self._running:
            self._spend(member)
        figures = of_process(self._times, len(self._named))
        for member in [*self._running, *self._ended]:
            if member.info.model in self._named:
                figures.merge(_counted(member))
        for name in self._named:
            figures.merge(self._past.get(name, Figures()))
        self._past = {name: past for name, past in self._past.items() if name in self._named}
        # The pool of one that ends may be closed already.
        asked = {name: member for name, member in self._named.items() if member not in self._retiring}
        asked = {name: member for name, member in asked.items() if not member.drained.is_set()}
        left = len(asked)

        def counted(name: str, status: Status | None, error: str | None) -> None:
            nonlocal left
            left -= 1
            if status:
                figures.merge(of_sessions(name, status))
            if not left:
                self.reply(key, CommandReply(key[1], metrics=figures.series))

        for name, member in asked.items():
            member.engine.pool.status(None, 0, partial(counted, name))
        if not asked:
            self.reply(key, CommandReply(key[1], metrics=figures.series))

    def _release(self, name: str) -> None:
        for key, message in self._held.pop(name, (False, []))[1]:
            if isinstance(message, GenerateRequest):
                self.add(key, message)
            else:
                self.command(key, message)

    def _unhold(self, unwanted: Callable[[RequestKey], bool]) -> None:
        for _, held in self._held.values():
            held[:] = [(key, message) for key, message in held if not unwanted(key)]

    def _find(self, key: RequestKey, message: Message) -> Member | None:
        """The model that it is for; None: it waits, or there is none and it is rejected."""
        name = message.to_model or next(iter(self._named), "")
        if name in self._held:
            everything, held = self._held[name]
            old = next((each for each in self._retiring if each.info.model == name), None)
            if old and _is_for_the_old(message, old.engine):
                return old
            if everything or _needs_database(message):
                held.append((key, message))
                return None
        member = self._named.get(name)
        if member is None:
            text = f"There is no model {name[:60]} here; this server has {', '.join(self._named)}."
            self.reply(key, Rejected(key[1], "not_found", text))
        return member


def _counted(member: Member) -> Figures:
    figures = of_engine(member.info.model, member.engine)
    figures.put("background_work_pending", member.info.model, value=member.background.pending)
    return figures


def _is_for_the_old(message: Message, engine: Engine) -> bool:
    """Whether it reads what the database has, which is still the old engine's, or is about rows of it."""
    if isinstance(message, StopRequest):
        return any(row.request.name == message.name for row in engine.scheduler.rows())
    return isinstance(message, READS)


def _needs_database(message: Message) -> bool:
    if isinstance(message, GenerateRequest):
        return bool(message.turn or message.start_state or message.mixture)
    return not isinstance(message, ListRequests | StopRequest | TextCommand)
