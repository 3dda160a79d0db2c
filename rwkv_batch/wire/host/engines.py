"""The front end's side of the wire where a host has several engines.

It is used as the wire to one engine is (rwkv_batch/wire/client.py). Each request goes where `Placement` says,
in parts if its rows are spread. When an engine dies, what has sent nothing yet runs again on another.
"""

import itertools
import threading
import time
from collections.abc import Sequence
from functools import partial

from msgspec.structs import replace

from rwkv_batch.wire.client import UNKNOWN, Client, Job, MakeJob
from rwkv_batch.wire.commands import Command, RemoveDocument, SessionHistory
from rwkv_batch.wire.host.every_engine import NONE_SERVES, EveryEngine
from rwkv_batch.wire.host.finishing import finish
from rwkv_batch.wire.host.merging import accepted_whole, part_of, serving_of_all
from rwkv_batch.wire.host.turns import Change
from rwkv_batch.wire.placing.homes import shared
from rwkv_batch.wire.placing.placement import NoEngine, Placed, Placement, key_of
from rwkv_batch.wire.protocol import (
    Accepted,
    CommandReply,
    EngineLoad,
    Event,
    Failed,
    GenerateRequest,
    Progress,
    Rejected,
    RowTimes,
    WatchLoad,
)
from rwkv_batch.wire.supervision import ChangeGranted, Serving

LOADS = "load"  # the id of their reports
CLOCK_DIFFERS = 0.01  # seconds, which are more than a clock that is only adjusted drifts while a turn runs
NO_DOCUMENT = "no document"  # a key that nobody uses


class Engines:
    """All engines of the host. Safe to use from any thread."""

    most_rows = None

    def __init__(self, addresses: Sequence[str], name: str, homes: str = "") -> None:
        """`addresses`: where the engines listen; `name`: one that no other front end has.

        `homes`: the file of what all front ends know of sessions; "": there is no other front end.
        """
        self.placement = Placement(len(addresses), shared(homes, len(addresses)) if homes else None)
        self.links = [Client(address, name) for address in addresses]
        self._placing = threading.Lock()  # nothing else may wait inside: see Client
        self._wholes: dict[str, _Whole] = {}  # requests under way
        self._serving: dict[int, Serving] = {}
        self.commands = EveryEngine(self.links, self._home, self._ready)

    @property
    def count(self) -> int:
        return len(self.links)

    def submit(self, request: GenerateRequest, kind: MakeJob = Job) -> Job:
        """Send a request; see Wire."""
        job = kind(request, self._cancel)
        whole = self._wholes[request.id] = _Whole(self, job)
        try:
            with self._placing:
                shares = self.placement.place(request)
        except NoEngine:
            whole.end(Failed(request.id, NONE_SERVES, gone=True))
            return job
        whole.parts = [_Part(whole, share, whole.numbered(part_of(request, share))) for share in shares]
        for part in whole.parts:
            self.send(part)
        return job

    async def ask(self, command: Command) -> CommandReply:
        """Send a command and wait for its reply; see Wire."""
        return await self.commands.ask(command)

    def serves(self, serving: Serving) -> Serving:
        """Note what an engine serves; returns what all have together. See Wire."""
        number = serving.engine
        began = number not in self._serving
        self._serving[number] = serving
        self.links[number].serves(serving)
        with self._placing:
            self.placement.serves(number, {info.model: info.slots for info in serving.models})
        if began:
            report = _LoadReader(self.placement, number)
            self.links[number].send_for(report, WatchLoad(LOADS), lasts=True)
        return self._together()

    def _together(self) -> Serving:
        return serving_of_all([self._serving[each] for each in sorted(self._serving)])

    def lose(self, engine: int, message: str) -> Serving | None:
        """Note that an engine has died; what the others have together. See Wire."""
        self._serving.pop(engine, None)
        with self._placing:
            self.placement.lost(engine)
        if not self._serving:
            return None
        self.links[engine].fail_all(message, gone=True)
        return self._together()

    def may_change(self, granted: ChangeGranted) -> None:
        """The supervisor lets this front end make a change; see Wire."""
        turns = self.commands.turns
        if turns and granted.left:
            turns.finish(granted.left, lambda change: self._finish(change, granted.had))
        elif turns:
            turns.granted()

    async def _finish(self, change: Change, had: Sequence[str]) -> bool:
        """Bring to its end what another front end has begun."""
        return await finish(self.links, self._ready(getattr(change, "to_model", "")), change, had)

    def fail_all(self, message: str) -> None:
        """Everything in flight fails."""
        for link in self.links:
            link.fail_all(message)

    def close(self) -> None:
        for link in self.links:
            link.close()

    def send(self, part: "_Part") -> None:
        """To its engine."""
        link = self.links[part.share.engine]
        link.send_for(part, part.request)
        if part.whole.over:  # meanwhile
            link.cancel(part.request.id)
            self.placement.over(part.share.ticket)

    def run_again(self, part: "_Part") -> None:
        """A part whose engine has died goes to others."""
        whole, mine = part.whole, part.share.prompts
        try:
            with self._placing:
                shares = self.placement.place(part.request)
        except NoEngine:
            whole.end(Failed(part.request.id, NONE_SERVES, gone=True))
            return
        parts = []
        for share in shares:
            request = whole.numbered(part_of(part.request, share))
            parts.append(_Part(whole, share._replace(prompts=[mine[p] for p in share.prompts]), request))
        whole.replace(part, parts)
        for each in parts:
            self.send(each)

    def cancel(self, whole: "_Whole") -> None:
        """Its rows end. Waits for nothing."""
        whole.over = True
        self.forget(whole)
        for part in whole.parts:
            self.links[part.share.engine].cancel(part.request.id)
            self.placement.over(part.share.ticket)

    def forget(self, whole: "_Whole") -> None:
        """It is not under way any more."""
        self._wholes.pop(whole.job.request.id, None)

    def _cancel(self, key: str) -> None:
        if whole := self._wholes.get(key):
            self.cancel(whole)

    def _home(self, model: str, key: str) -> int:
        with self._placing:
            return self.placement.home(model, key)

    def _ready(self, model: str = "") -> list[int]:
        return self.placement.ready(model)


class _Whole:
    """A request under way."""

    def __init__(self, engines: Engines, job: Job) -> None:
        self.engines, self.job, self.parts = engines, job, list[_Part]()
        self.submitted = time.time()  # seconds since 1970
        self._clock = self.submitted - time.monotonic()
        self.over = False
        self._running = job.rows
        self._numbers = itertools.count()
        self._lock = threading.Lock()  # held for no call

    def numbered(self, request: GenerateRequest) -> GenerateRequest:
        """With an id that no other part has, as two may come to one engine."""
        number = next(self._numbers)
        return replace(request, id=f"{self.job.request.id}/{number}") if number else request

    @property
    def clock_was_set(self) -> bool:
        """Whether the host's clock has been since it was submitted."""
        return abs(time.time() - time.monotonic() - self._clock) > CLOCK_DIFFERS

    def replace(self, part: "_Part", others: list["_Part"]) -> None:
        """These have its rows now."""
        with self._lock:
            self.parts = [each for each in self.parts if each is not part] + others

    def accept(self, part: "_Part", event: Accepted) -> None:
        part.accepted = event
        with self._lock:
            answers = [(part.share.prompts, part.accepted) for part in self.parts if part.accepted]
            whole = len(answers) == len(self.parts)
        if whole:
            self.job.put(accepted_whole(len(self.job.request.prompts), answers))

    def rows_ended(self, rows: int) -> None:
        """Note that so many of its rows have ended by themselves."""
        with self._lock:
            self._running -= rows
            ended = not self._running
        if ended:
            self.engines.forget(self)

    def end(self, event: Rejected | Failed) -> None:
        """All of it has failed."""
        with self._lock:
            ended, self.over = self.over, True
        if not ended:
            self.job.put(event)
        self.engines.cancel(self)


class _Part:
    """The rows of a request that one engine has."""

    def __init__(self, whole: _Whole, share: Placed, request: GenerateRequest) -> None:
        self.whole, self.share, self.request = whole, share, request
        self.accepted: Accepted | None = None
        self._running, self._silent = len(share.rows), True

    @property
    def counts_late(self) -> bool:
        return self.whole.job.counts_late

    def ends(self, event: Event) -> bool:
        """Whether this is the last event; see EventReader."""
        match event:
            case Progress(rows=rows):
                return self._running == sum(1 for delta in rows if delta.finish_reason)
            case _:
                return isinstance(event, Rejected | Failed)

    def put(self, event: Event) -> None:
        """Take the event; see EventReader."""
        whole, placement = self.whole, self.whole.engines.placement
        match event:
            case Progress(rows=rows):
                if self._silent:
                    self._silent = False
                    placement.read(self.share.ticket)
                if ended := sum(1 for delta in rows if delta.finish_reason):
                    self._running -= ended
                    placement.ended(self.share.ticket, ended)
                    whole.rows_ended(ended)
                whole.job.put(event)
            case RowTimes():
                whole.job.put(event)
            case Accepted():
                whole.accept(self, event)
            case Rejected() | Failed() if whole.over:  # it was cancelled
                whole.job.put(event)
            case Failed(gone=True) if self._silent:
                self._run_again()
            case Rejected() | Failed():
                whole.end(event)

    def _run_again(self) -> None:
        """A turn does so only if it has not been stored, or has an Idempotency-Key.

        Whether it has been stored, an engine that is asked for its session knows.
        """
        engines, turn = self.whole.engines, self.request.turn
        key = (self.accepted and self.accepted.target) or (turn and (turn.target or turn.branch))
        if not turn or not key:
            engines.run_again(self)
            return
        try:
            home = engines._home(self.request.to_model, key_of(turn))
        except NoEngine:
            self.whole.end(Failed(self.request.id, NONE_SERVES, gone=True))
        else:
            _StoredTurn(self, engines.links[home], key).look()


class _StoredTurn:
    """Reads whether a turn's session has been changed since the turn was submitted.

    A commit that the dead engine has sent may still be under way. The process that writes carries out what
    comes later behind it; so another change, of nothing, comes first.
    """

    counts_late = False

    def __init__(self, part: _Part, link: Client, key: str) -> None:
        self._part, self._link, self._key = part, link, key
        self._waits = True  # for the commits

    def look(self) -> None:
        id_, model = self._part.request.id, self._part.request.to_model
        if self._waits:
            self._link.send_for(self, RemoveDocument(f"{id_} committed", NO_DOCUMENT, to_model=model))
        else:
            self._link.send_for(self, SessionHistory(f"{id_} stored", self._key, limit=0, to_model=model))

    def ends(self, event: Event) -> bool:
        """Whether this is the last event; see EventReader."""
        return True

    def put(self, event: Event) -> None:
        """Take the event; see EventReader."""
        whole, request = self._part.whole, self._part.request
        waited, self._waits = self._waits, False
        match event:
            case CommandReply() if waited:
                if request.turn and request.turn.request:  # by that the engine knows whether it is stored
                    whole.engines.run_again(self._part)
                else:
                    self.look()
            case CommandReply(updated=updated) if updated < whole.submitted and not whole.clock_was_set:
                whole.engines.run_again(self._part)
            case Rejected(reason="not_found"):
                whole.engines.run_again(self._part)
            case _:
                whole.end(Failed(request.id, f"The engine stopped while it answered. {UNKNOWN}", gone=True))


class _LoadReader:
    """Takes an engine's reports."""

    counts_late = False

    def __init__(self, placement: Placement, engine: int) -> None:
        self._reported = partial(placement.reported, engine)

    def ends(self, event: Event) -> bool:
        """Whether this is the last event; see EventReader."""
        return isinstance(event, Failed)  # the engine has died

    def put(self, event: Event) -> None:
        """Take the event; see EventReader."""
        if isinstance(event, EngineLoad):
            self._reported(event.rows, event.tokens)
