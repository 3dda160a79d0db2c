"""The wire to the engine as one caller may use it: the only way on which a handler reaches the engine.

What a key stores stands under names of its own in the engine, which no other key can say: so a route need not
know to whom something belongs, and cannot forget it. What is not named here is for the operator alone.
"""

from collections.abc import Callable
from hashlib import blake2b
from uuid import uuid4

from msgspec.structs import replace

from routes.callers.caller import Caller, Role, RowPlaces, not_allowed
from routes.callers.metering import Accounts, MeteredJob, plain_error
from routes.errors import ApiError
from rwkv_batch.keys.ledger import OverLimit, TooManyRows
from rwkv_batch.keys.records import Key
from rwkv_batch.wire.client import Job, MakeJob, RequestFailed, RequestRejected, Wire
from rwkv_batch.wire.commands import (
    PAUSED,
    Command,
    DeleteSession,
    Detokenize,
    ExportSession,
    ForkSession,
    GetDocument,
    ImportSession,
    ListAdapters,
    ListDocuments,
    ListModels,
    ListRequests,
    ListSessions,
    ListStartStates,
    PauseRequest,
    PutDocument,
    RemoveDocument,
    RewindSession,
    SessionHistory,
    StopRequest,
    Tokenize,
)
from rwkv_batch.wire.host.merging import TIERS
from rwkv_batch.wire.protocol import (
    OWNER,
    REQUEST_BYTES,
    CommandReply,
    Failed,
    GenerateRequest,
    ModelMessage,
    SessionTurn,
    owned,
    owner_and_name,
)
from rwkv_batch.wire.supervision import ChangeGranted, Serving

PAGE = 1000  # sessions that are asked for at once
BEHIND_OWNERS = chr(ord(OWNER) + 1)  # which follows all names that have an owner
NOT_SENT = "The request could not be sent to the engine."
# Which anyone may ask who may use the server at all.
HARMLESS = ListAdapters | ListModels | ListStartStates | Tokenize | Detokenize
OF_SESSIONS = DeleteSession | ForkSession | SessionHistory | RewindSession | ExportSession | ImportSession
OF_DOCUMENTS = PutDocument | GetDocument | RemoveDocument | ListDocuments


class CallerWire:
    """For one HTTP request. Raises ApiError for what the caller may not do."""

    def __init__(self, wire: Wire, caller: Caller, accounts: Accounts | None) -> None:
        self._wire, self._caller, self._accounts = wire, caller, accounts

    @property
    def count(self) -> int:
        return self._wire.count

    @property
    def most_rows(self) -> int | None:
        return self._caller.key.rows if self._caller.key else None

    def submit(self, request: GenerateRequest, kind: MakeJob = Job) -> Job:
        """Have a request run in the caller's name; its limits are counted first. See Wire."""
        caller = self._caller
        self._demand_model(request)
        if request.adapter and not caller.may_use_adapter(request.adapter):
            raise not_allowed(f"use the adapter {request.adapter[:200]}")
        turn = request.turn
        if turn and not (turn.source is turn.target is turn.branch is None):
            self._demand_sessions("use sessions; leave `session_id` out, or send `store`: false")
        request = replace(request, name=self._owned(request.name), turn=self._turn(turn))
        if caller.key and caller.key.priority == "batch":
            request = replace(request, batch=True)
        if caller.trace and caller.trace.recorded:
            request = replace(request, traced=True)
            caller.trace.requests.append(request)
        rows = len(request.prompts) * request.n
        limited = caller.key if caller.limited and self._accounts else None
        if limited:
            self._admit(limited, rows)
        made = list[MeteredJob]()

        def make(request: GenerateRequest, cancel: Callable[[str], None]) -> MeteredJob:
            made.append(MeteredJob(request, cancel, caller, self._accounts, number))
            return made[0]

        try:
            number = caller.served.submitted(request)
            job = self._wire.submit(request, make)
        except BaseException:  # nobody has the job, and its rows would count until this process ends
            for each in made:
                each.put(Failed(request.id, NOT_SENT))
                each.cancel()
            if limited and self._accounts and not made:
                self._accounts.release(limited, caller.places, rows)
            raise
        if self._accounts and isinstance(job, MeteredJob):  # the key may have been revoked since it was sent
            self._accounts.end_if_revoked(job)
        return job

    async def ask(self, command: Command) -> CommandReply:
        """Send a command in the caller's name; see Wire."""
        self._demand_model(command)
        try:
            return await self._ask(command)
        except (RequestRejected, RequestFailed) as error:
            raise plain_error(error, self._caller.plain) from None

    async def _ask(self, command: Command) -> CommandReply:
        caller, operator = self._caller, self._caller.role is Role.OPERATOR
        match command:
            case ListAdapters(name=None):
                found = await self._wire.ask(command)
                usable = [each for each in found.adapters if caller.may_use_adapter(each.name)]
                return replace(found, adapters=usable)
            case _ if isinstance(command, HARMLESS):
                return await self._wire.ask(command)
            case _ if caller.role is Role.ANYONE:
                raise ApiError(401, "Unauthorized: this needs a key; send one.")
            case ListRequests() if operator:
                return await self._wire.ask(command)
            case ListRequests():
                return await self._requests(command)
            case PauseRequest() if caller.key and not caller.key.sessions:
                raise not_allowed("pause requests, which stores them")
            case StopRequest(name=name) | PauseRequest(name=name):
                return await self._wire.ask(replace(command, name=await self._request(command, name)))
            case GetDocument(key=key) | RemoveDocument(key=key) if key.startswith(PAUSED):
                name = await self._request(command, key.removeprefix(PAUSED))
                return await self._wire.ask(replace(command, key=PAUSED + name))
            case PutDocument(key=key) if key.startswith(PAUSED):
                return await self._wire.ask(replace(command, key=PAUSED + self._owned(key[len(PAUSED) :])))
        if isinstance(command, ListSessions | OF_SESSIONS | OF_DOCUMENTS):
            self._demand_sessions("use sessions or stored responses")
        match command:
            case ListSessions(after=None, limit=None) if operator and not caller.owner_asked:
                return await self._wire.ask(command)
            case ListSessions():
                return await self._sessions(command)
            case ListDocuments(prefix=prefix):
                found = await self._wire.ask(replace(command, prefix=self._owned(prefix)))
                return replace(found, keys=[owner_and_name(key)[1] for key in found.keys])
            case ForkSession(key=key, target=target):
                mine = replace(command, key=self._owned(key), target=self._owned(target))
                return await self._wire.ask(mine)
            case _ if isinstance(command, OF_SESSIONS | OF_DOCUMENTS):
                return await self._wire.ask(replace(command, key=self._owned(command.key)))
        caller.demand_operator()
        return await self._wire.ask(command)

    def serves(self, serving: Serving) -> Serving:
        """Note what an engine serves; see Wire."""
        return self._wire.serves(serving)

    def lose(self, engine: int, message: str) -> Serving | None:
        """Note that an engine has died; see Wire."""
        return self._wire.lose(engine, message)

    def may_change(self, granted: ChangeGranted) -> None:
        """Models may be changed; see Wire."""
        self._wire.may_change(granted)

    def fail_all(self, message: str) -> None:
        """Everything in flight fails, that of others too; see Wire."""
        self._wire.fail_all(message)

    def _admit(self, key: Key, rows: int) -> None:
        """Count the first job of an HTTP request; those of later rounds belong to it. Raises ApiError 429."""
        assert self._accounts
        if self._caller.served.requests:
            self._accounts.hold(key, self._caller.places, rows)
            return
        try:
            self._caller.stands(self._accounts.ledger.admit(key, rows))
            self._caller.places = RowPlaces(rows, rows)
        except TooManyRows as error:
            raise ApiError(403, str(error), code="permission_denied") from None
        except OverLimit as over:
            self._caller.stands(over.standings)
            self._caller.headers["retry-after"] = str(max(1, -int(-over.retry_after // 1)))
            raise ApiError(429, str(over)) from None

    def _demand_model(self, message: Command | GenerateRequest) -> None:
        """Raises ApiError 403; RuntimeError where nobody has asked who the caller is."""
        if self._caller.role is Role.UNKNOWN:
            raise RuntimeError("a route asks the engine without having asked for a key")
        if isinstance(message, ModelMessage) and not self._caller.may_use_model(message.to_model):
            raise not_allowed(f"use the model {message.to_model[:200]}")

    def _demand_sessions(self, what: str) -> None:
        key = self._caller.key
        if self._caller.role is Role.ANYONE or (key and not key.sessions):
            raise not_allowed(what)

    def _turn(self, turn: SessionTurn | None) -> SessionTurn | None:
        if turn is None or not self._caller.owner:
            return turn
        names = {name: getattr(turn, name) for name in ("source", "target", "branch")}
        mine = {name: self._owned(stored) for name, stored in names.items() if stored is not None}
        resumed = any(owner_and_name(stored)[0] for stored in names.values() if stored is not None)
        request = turn.request if resumed or not turn.request else self._digest(turn.request)
        return replace(turn, request=request, **mine)

    def _owned(self, name: str) -> str:
        """The name by which the engine knows it; one in a paused request is that already."""
        owner, _ = owner_and_name(name)
        if owner and owner != self._caller.owner and self._caller.role is not Role.OPERATOR:
            raise RuntimeError("a key asks for what belongs to another one")
        return name if owner else owned(self._caller.owner, name)

    def _digest(self, request: bytes) -> bytes:
        """Of an Idempotency-Key: another key may send the same for a session of the same name."""
        return blake2b(self._caller.owner.encode() + b"\0" + request, digest_size=REQUEST_BYTES).digest()

    async def _requests(self, command: ListRequests) -> CommandReply:
        """Those of the caller."""
        found = await self._wire.ask(command)
        owner = self._caller.owner
        running = [(*owner_and_name(each.name), each) for each in found.requests]
        paused = [owner_and_name(each) for each in found.paused]
        return replace(
            found,
            requests=[replace(each, name=name) for whose, name, each in running if whose == owner],
            paused=[name for whose, name in paused if whose == owner],
        )

    async def _request(self, command: ModelMessage, name: str) -> str:
        """The name of a request for the engine: the caller's, or for the operator anybody's."""
        mine = self._owned(name)
        if self._caller.role is not Role.OPERATOR or (mine != name and self._caller.owner_asked):
            return mine
        listed = await self._wire.ask(ListRequests(uuid4().hex, to_model=command.to_model))
        stored = [*(each.name for each in listed.requests), *listed.paused]
        others = [each for each in stored if owner_and_name(each)[1] == name]
        return mine if mine in others or not others else others[-1]

    async def _sessions(self, command: ListSessions) -> CommandReply:
        """Those of the caller, in the order of their names. They stand together, behind its mark."""
        if not self._caller.owner:  # those of no key come behind all others
            return await self._wire.ask(replace(command, after=max(command.after or "", BEHIND_OWNERS)))
        mark, mine = owned(self._caller.owner, ""), []
        page = replace(command, after=mark, limit=PAGE)
        while True:
            found = await self._wire.ask(replace(page, id=uuid4().hex))
            more = [each for each in found.sessions if each.key.startswith(mark)]
            mine += [replace(each, key=each.key.removeprefix(mark)) for each in more]
            if len(more) < PAGE:
                break
            page = replace(page, after=more[-1].key)
        l1, l2 = (sum(1 for each in mine if each.tier == tier) for tier in TIERS[:2])
        listed = [each for each in mine if each.key > (command.after or "")][: command.limit]
        return CommandReply(command.id, sessions=listed, total=len(mine), l1=l1, l2=l2)
