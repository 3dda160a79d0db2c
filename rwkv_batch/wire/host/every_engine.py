"""Commands where a host has several engines: to one of them, or to all with one answer.

What is about a session goes to its engine. Adapters and the models themselves are brought to all engines
or to none. What is stored in the database is asked of one.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress

from msgspec.structs import replace

from rwkv_batch.wire.client import Client, EngineGone, RequestFailed, RequestRejected
from rwkv_batch.wire.codec import decode_paused, encode
from rwkv_batch.wire.commands import (
    PAUSED,
    Command,
    ExportSession,
    FetchState,
    GetDocument,
    GetMetrics,
    KeyedCommand,
    ListAdapters,
    ListDocuments,
    ListModels,
    ListRequests,
    ListSessions,
    LoadAdapter,
    LoadModel,
    MayChangeModels,
    PauseRequest,
    PutDocument,
    RemoveAdapter,
    RemoveDocument,
    RemoveModel,
    SessionHistory,
    StartStateCommand,
    StopRequest,
)
from rwkv_batch.wire.host.merging import (
    PART,
    metrics_of_all,
    name_of,
    requests_of_all,
    resumed_whole,
    sessions_of_all,
)
from rwkv_batch.wire.host.turns import Change, ChangeTurns
from rwkv_batch.wire.protocol import CommandReply

REPEATABLE = SessionHistory | ExportSession | GetDocument | PutDocument
NONE_SERVES = "No engine serves now; try again in a moment."

log = logging.getLogger(__name__)


class EveryEngine:
    """`home`: the engine of a session or document of a model; it raises LookupError if none is ready.
    `ready`: those that are ready and have the model. `turns`: see there; None: no other front end makes
    changes.
    """

    turns: ChangeTurns | None = None

    def __init__(
        self,
        links: Sequence[Client],
        home: Callable[[str, str], int],
        ready: Callable[[str], list[int]],
    ) -> None:
        self._links, self._home, self._ready = links, home, ready
        self._changing = asyncio.Lock()  # one change at a time
        self._changes = set[asyncio.Task[CommandReply]]()  # under way; asyncio itself may drop them

    async def ask(self, command: Command) -> CommandReply:
        """Send a command and wait for its reply; see Wire."""
        match command:
            case GetMetrics():
                found = await self._all(command)
                return CommandReply(command.id, metrics=metrics_of_all(found))
            case ListRequests():
                requests, paused = requests_of_all([reply for _, reply in await self._all(command)])
                return CommandReply(command.id, requests=requests, paused=paused)
            case ListSessions(after=after, limit=limit):
                replies = [reply for _, reply in await self._all(command)]
                return sessions_of_all(replies, limit, in_order=after is not None or limit is not None)
            case ListDocuments():
                keys = {key for _, reply in await self._all(command) for key in reply.keys}
                return CommandReply(command.id, keys=sorted(keys))
            case FetchState() | MayChangeModels():
                replies = [reply for _, reply in await self._all(command)]
                return next((reply for reply in replies if reply.data), replies[0])
            case StopRequest():
                return await self._stop(command)
            case PauseRequest():
                return await self._pause(command)
            case GetDocument(key=key) if key.startswith(PAUSED):
                return await self._paused(command)
            case RemoveDocument(key=key) if key.startswith(PAUSED):
                return await self._forget(command)
            case _ if isinstance(command, StartStateCommand):  # all engines look them up in their database
                return await self._any(command, command.to_model)
            case LoadModel() | RemoveModel() | LoadAdapter() | RemoveAdapter():
                change = asyncio.create_task(self._change_and_note(command))
                self._changes.add(change)
                change.add_done_callback(self._changes.discard)
                return await asyncio.shield(change)  # as half of a change would be neither noted nor undone
            case ListModels():
                return await self._any(command)
            case KeyedCommand(to_model=model, key=key):
                return await self._keyed(command, model, key)
            case _:
                return await self._any(command, command.to_model)

    async def _one(self, engine: int, command: Command) -> CommandReply:
        return await self._links[engine].ask(command)

    async def _any(self, command: Command, model: str = "") -> CommandReply:
        """The answer of the first engine that gives one."""
        for engine in self._ready(model):
            try:
                return await self._one(engine, command)
            except EngineGone:
                continue
        raise EngineGone(NONE_SERVES)

    async def _keyed(self, command: Command, model: str, key: str) -> CommandReply:
        """The answer of the session's engine. If that dies, another one is asked what may be asked twice."""
        while True:
            try:
                engine = self._home(model, key)
            except LookupError:
                raise EngineGone(NONE_SERVES) from None
            try:
                return await self._one(engine, command)
            except EngineGone:
                if not isinstance(command, REPEATABLE):
                    raise

    async def _all(self, command: Command) -> list[tuple[int, CommandReply]]:
        """What every engine answers, without those that die meanwhile. Raises RequestRejected first."""
        return await self._those(dict.fromkeys(self._ready(getattr(command, "to_model", "")), command))

    async def _those(self, commands: Mapping[int, Command]) -> list[tuple[int, CommandReply]]:
        """What these engines answer, each to its command. See `_all`."""
        answers = await asyncio.gather(
            *(self._one(engine, command) for engine, command in commands.items()), return_exceptions=True
        )
        found = list[tuple[int, CommandReply]]()
        for engine, answer in zip(commands, answers, strict=True):
            if isinstance(answer, CommandReply):
                found.append((engine, answer))
            elif not isinstance(answer, EngineGone):
                raise answer
        if not found:
            raise EngineGone(NONE_SERVES)
        return found

    # Requests

    async def _running(self, name: str, model: str, id_: str) -> list[int]:
        """The engines that run a request of this name."""
        listed = await self._all(ListRequests(id_, to_model=model))
        return [engine for engine, reply in listed if any(each.name == name for each in reply.requests)]

    async def _told(
        self, command: StopRequest | PauseRequest, each: Callable[[int], Command]
    ) -> list[tuple[Command, CommandReply]]:
        """Tell every engine that runs the request. If one dies, its rows may run on another one by then.

        `each`: the command for one of so many.
        """
        found = list[tuple[Command, CommandReply]]()
        while engines := await self._running(command.name, command.to_model, command.id):
            commands, replies = {engine: each(len(engines)) for engine in engines}, []
            with suppress(EngineGone):
                replies = await self._those(commands)
            found += [(commands[engine], reply) for engine, reply in replies]
            if len(replies) == len(engines):
                break
        return found

    async def _stop(self, command: StopRequest) -> CommandReply:
        """Where it runs; if it runs nowhere, the paused one is forgotten."""
        if told := await self._told(command, lambda engines: command):
            requests, _ = requests_of_all(reply for _, reply in told)
            return replace(told[0][1], requests=requests)
        key = PAUSED + command.name
        return await self._forget(RemoveDocument(command.id, key, to_model=command.to_model))

    async def _pause(self, command: PauseRequest) -> CommandReply:
        """Where it runs; each of several engines stores its part."""
        before = await self._parts(command.name, command.to_model, command.id)
        numbers = itertools.count()

        def part(engines: int) -> PauseRequest:
            number = next(numbers)
            return replace(command, part=f"{PART}{number}" if number or engines > 1 else "")

        told = await self._told(command, part)
        if not told:
            return await self._any(command, command.to_model)
        stored = {
            command.name + sent.part
            for sent, reply in told
            if isinstance(sent, PauseRequest) and reply.requests
        }
        for name in {*before} - stored:  # of an earlier pause
            key = PAUSED + name
            await self._all(RemoveDocument(command.id, key, to_model=command.to_model))
        requests, _ = requests_of_all(reply for _, reply in told)
        return replace(told[0][1], requests=requests)

    async def _parts(self, name: str, model: str, id_: str) -> list[str]:
        """The names of the documents of a paused request: its own, or those of its parts."""
        listed = await self._all(ListRequests(id_, to_model=model))
        found = {each for _, reply in listed for each in reply.paused if each.partition(PART)[0] == name}
        return sorted(found)

    async def _paused(self, command: GetDocument) -> CommandReply:
        """The whole request."""
        names = await self._parts(command.key.removeprefix(PAUSED), command.to_model, command.id)
        found = list[CommandReply]()
        for name in names:
            found.append(await self._first_found(replace(command, key=PAUSED + name)))
        data = [reply.data for reply in found if reply.data]
        if len(data) < 2:
            return CommandReply(command.id, data=data[0] if data else b"")
        return CommandReply(command.id, data=encode(resumed_whole([decode_paused(each) for each in data])))

    async def _forget(self, command: RemoveDocument) -> CommandReply:
        names = await self._parts(command.key.removeprefix(PAUSED), command.to_model, command.id)
        found = 0
        for name in names:
            for _, reply in await self._all(replace(command, key=PAUSED + name)):
                found += reply.found
        return CommandReply(command.id, found=min(found, 1))

    async def _first_found(self, command: GetDocument) -> CommandReply:
        """Of the engines, whose databases may differ."""
        replies = [reply for _, reply in await self._all(command)]
        return next((reply for reply in replies if reply.data), replies[0])

    # What all engines have

    async def _change_and_note(self, command: Change) -> CommandReply:
        async with self._changing, self.turns.turn(command) if self.turns else nullcontext():
            return await self._change(command)

    async def _change(self, command: Change) -> CommandReply:
        """By all engines or by none."""
        engines = self._ready(getattr(command, "to_model", ""))
        if isinstance(command, LoadModel | RemoveModel):
            await self._demand_idle(engines, command.id)
        there = await self._there(command)
        answers = await self._each(engines, command)
        replies = {engine: answer for engine, answer in answers if isinstance(answer, CommandReply)}
        if refused := _first_refusal(answers):
            undone = await asyncio.gather(
                *(self._undo(engine, reply, command, there) for engine, reply in replies.items()),
                return_exceptions=True,
            )
            for engine, error in zip(replies, undone, strict=True):
                if error and not isinstance(error, EngineGone):
                    log.error("%s keeps a change that another has refused: %s", name_of(engine), error)
            raise _named(*refused)
        if not replies:
            raise EngineGone(NONE_SERVES)
        found = max(reply.found for reply in replies.values())
        return replace(next(iter(replies.values())), found=found)

    async def _demand_idle(self, engines: Sequence[int], id_: str) -> None:
        """One may run rows of a model that was replaced, and refuse what others make for good. Raises that.

        None begins with another change before this one, whose turn it is.
        """
        if refused := _first_refusal(await self._each(engines, MayChangeModels(id_))):
            raise _named(*refused)

    async def _each(
        self, engines: Iterable[int], command: Command
    ) -> list[tuple[int, CommandReply | BaseException]]:
        engines = list(engines)
        answers = await asyncio.gather(
            *(self._one(engine, command) for engine in engines), return_exceptions=True
        )
        return list(zip(engines, answers, strict=True))

    async def _there(self, command: Change) -> set[str]:
        """The names of what there is of its kind."""
        match command:
            case LoadModel():
                return {info.model for info in (await self._any(ListModels(command.id))).models}
            case LoadAdapter(to_model=model):
                listed = await self._any(ListAdapters(command.id, to_model=model), model)
                return {info.name for info in listed.adapters}
        return set()

    async def _undo(self, engine: int, reply: CommandReply, command: Change, there: set[str]) -> None:
        """Remove what it has made there, unless that took the place of something."""
        match command:
            case LoadModel():
                for name in {info.model for info in reply.models} - there:
                    await self._one(engine, RemoveModel(command.id, name))
            case LoadAdapter(key=key, to_model=model) if key not in there:
                await self._one(engine, RemoveAdapter(command.id, key, to_model=model))


def _first_refusal(
    answers: list[tuple[int, CommandReply | BaseException]],
) -> tuple[int, BaseException] | None:
    """Of an engine that has not died meanwhile."""
    for engine, answer in answers:
        if isinstance(answer, BaseException) and not isinstance(answer, EngineGone):
            return engine, answer
    return None


def _named(engine: int, error: BaseException) -> BaseException:
    """The refusal, which names the engine."""
    message = f"{name_of(engine)}: {error}"
    if isinstance(error, RequestRejected):
        return RequestRejected(error.reason, message, error.field)
    return RequestFailed(message) if isinstance(error, RequestFailed) else error
