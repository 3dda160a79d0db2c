"""The engine's end of the wire without a model: it echoes prompts, one character a token, and does mischief
when asked.

What a prompt begins with decides: "hang" (accepted, then silence), "held" (accepted, the rest after
`release`), "half" (a first piece, the rest after `release`), "slow" (20 ms a token), "trickle" (4 characters,
then silence), "late" (0.7 s before the first token), "overloaded", "unavailable", "invalid", "fail"
(accepted, then failed), "broken" (some text, then failed), "flood" (a piece each 5 ms, no end), "mute" (not
even accepted); anything else is echoed at once. A row whose own prompt begins with "ill" ends with an
error behind its first character, and others go on.

A turn echoes everything its session has seen, and stores that with its last delta. Session commands work on
`sessions`, whose keys decide in the same way ("mute", "late", "overloaded", "unavailable", "fail"); keys
beginning with "ram" are in host memory, with "disk" in the database. All but the last character of a prompt
that came before need not be computed again.
"""

import contextlib
import itertools
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path

import zmq
from msgspec import structs

from rwkv_batch.wire.codec import ToEngine, decode_to_engine, encode
from rwkv_batch.wire.commands import (
    Command,
    DeleteSession,
    DescribeStartState,
    Detokenize,
    ExportSession,
    FetchState,
    ForkSession,
    GetDocument,
    GetMetrics,
    ImportSession,
    ListAdapters,
    ListDocuments,
    ListModels,
    ListRequests,
    ListSessions,
    ListStartStates,
    LoadAdapter,
    LoadModel,
    PauseRequest,
    PutDocument,
    PutStartState,
    RemoveAdapter,
    RemoveDocument,
    RemoveModel,
    RemoveStartStates,
    RequestCommand,
    RewindSession,
    SessionHistory,
    StopRequest,
    Tokenize,
)
from rwkv_batch.wire.metrics import Series
from rwkv_batch.wire.protocol import (
    Accepted,
    AdapterInfo,
    Cancel,
    CommandReply,
    Event,
    Failed,
    GenerateRequest,
    Progress,
    Rejected,
    RequestInfo,
    RowDelta,
    SessionInfo,
    StartStateInfo,
    TurnInfo,
)
from rwkv_batch.wire.supervision import EngineInfo

INFO = EngineInfo(
    model="fake-rwkv",
    layers=1,
    width=64,
    parameters=1,
    dtype="float32",
    device="cpu",
    slots=8,
    vocabulary=65536,
    fingerprint="0123456789abcdef",
    checkpoint="fake-rwkv",
)
FILE = b"\xffSTATE "  # what an exported state begins with; no text in UTF-8
HELD_TURN = (1 << 62) + 7  # whose state other servers get
UPDATED = 1769479200.5


class FakeEngine:
    """Listens on `address` until closed. `requests`, `commands` and `cancelled` fill as messages come."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.requests: list[GenerateRequest] = []
        self.commands: list[Command] = []
        self.infos = [INFO]  # the models
        self.gone: set[str] = set()  # of them, those that front ends have not been told to forget yet
        self.cancelled: list[str] = []
        self.sessions: dict[str, str] = {}  # key -> all prompts it has seen
        self.turns: dict[str, list[str]] = {}  # the same, turn by turn
        self._known: set[str] = set()
        self._documents: dict[str, bytes] = {}
        self.start_states: dict[str, tuple[str, bytes, StartStateInfo]] = {}  # layout, file, info
        self.adapters: dict[str, AdapterInfo] = {}
        self.metrics: list[Series] = []
        self._numbers: dict[str, int] = {}  # the last one given out, by branch
        self._unstored: dict[str, tuple[str, str, list[str]]] = {}  # turns under way: id -> key, text, turns
        self._changed = threading.Condition()
        self._due: list[tuple[float, bytes, Event]] = []  # events to send, each at its time
        self._left: dict[str, int] = {}  # rows of requests that have not ended
        self._released = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def __enter__(self) -> "FakeEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        self._thread.join()

    def wait_for(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Whether `condition` became true as messages arrived, within `seconds`."""
        with self._changed:
            return self._changed.wait_for(condition, seconds)

    def release(self) -> None:
        """Let what is held until now go on."""
        self._released.set()

    def request(self, prompt: str) -> GenerateRequest:
        """The newest request with this prompt."""
        return next(r for r in reversed(self.requests) if prompt in r.prompts)

    def _run(self) -> None:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
            router.setsockopt(zmq.LINGER, 0)
            router.bind(self.address)
            while not self._closed:
                if router.poll(5):
                    identity, data = router.recv_multipart()
                    self._take(identity, decode_to_engine(data))
                now = time.monotonic()
                if self._released.is_set():
                    self._released.clear()
                    now = math.inf
                ready = [entry for entry in self._due if entry[0] <= now]
                self._due = [entry for entry in self._due if entry[0] > now]
                for _, _, event in ready:
                    self._store(event)
                for identity in dict.fromkeys(entry[1] for entry in ready):
                    with contextlib.suppress(zmq.ZMQError):
                        router.send_multipart(
                            [identity, encode([event for _, to, event in ready if to == identity])]
                        )

    def _take(self, identity: bytes, message: ToEngine) -> None:
        with self._changed:
            now = time.monotonic()
            if isinstance(message, Cancel):
                self.cancelled.append(message.id)
                self._left[message.id] = 0
                self._due = [entry for entry in self._due if entry[2].id != message.id]
                if message.closes:
                    self._due.append((now, identity, Failed(message.id, "The request was cancelled.")))
            elif isinstance(message, GenerateRequest):
                events = self.answer(message)
                self._left[message.id] = len(message.prompts) * message.n
                self.requests.append(message)
                self._due += [(now + delay, identity, event) for delay, event in events]
            else:
                self.commands.append(message)
                if not key_of(message).startswith("mute"):
                    delay = 0.7 if key_of(message).startswith("late") else 0
                    self._due.append((now + delay, identity, self.reply_to(message)))
            self._changed.notify_all()

    def answer(self, request: GenerateRequest) -> list[tuple[float, Event]]:
        """The events that answer `request`, with their delays in seconds, in order."""
        cached = [
            max(len(p) - 1, 0) if request.prefix_cache and str(p) in self._known else 0
            for p in request.prompts
        ]
        self._known.update(str(p) for p in request.prompts)
        turn = request.turn
        if turn is None:
            return script(request, cached)
        before = self.sessions.get(turn.source or "")
        if before is None and turn.required:
            return [(0, Rejected(request.id, "not_found", f"There is no session {turn.source}."))]
        (prompt,) = request.prompts
        assert isinstance(prompt, str) and request.n == 1
        separator = turn.separator if before is not None and not prompt.startswith(turn.separator) else ""
        target = turn.target or ""
        if turn.branch is not None:
            number = self._numbers[turn.branch] = self._numbers.get(turn.branch, 0) + 1
            target = f"{turn.branch}:{number}"
        text = (before or "") + separator + prompt
        if target:
            before_it = self.turns.get(turn.source or "", []) if before else []
            self._unstored[request.id] = target, text, [*before_it, text.removeprefix(before or "")]
        return script(request, cached, target, text)

    def _store(self, event: Event) -> None:
        if isinstance(event, Progress):
            self._left[event.id] -= sum(1 for delta in event.rows if delta.finish_reason)
        elif isinstance(event, Failed | Rejected):
            self._left[event.id] = 0
        if isinstance(event, Progress) and event.id in self._unstored and event.rows[0].finish_reason:
            key, text, turns = self._unstored.pop(event.id)
            self.sessions[key], self.turns[key] = text, turns

    def reply_to(self, command: Command) -> Event:
        id, key = command.id, key_of(command)
        if getattr(command, "to_model", None) in self.gone:
            return Rejected(id, "not_found", f"There is no model {command.to_model} here.")
        for reason in ("overloaded", "unavailable"):
            if key.startswith(reason):
                return Rejected(id, reason, f"The fake engine finds this {reason}.")
        if key.startswith("fail"):
            return Failed(id, "The fake engine failed.")
        on_one = ForkSession | ExportSession | SessionHistory | RewindSession
        if isinstance(command, on_one) and key not in self.sessions:
            return Rejected(id, "not_found", f"There is no session {key}.")
        match command:
            case ListSessions(after=after, limit=limit):
                keys = list(self.sessions)
                counts = {t: sum(1 for k in keys if tier(k) == t) for t in ("L1", "L2")}
                if after is not None or limit is not None:
                    keys = sorted(k for k in keys if k > (after or ""))[:limit]
                sessions = [SessionInfo(k, tier(k), UPDATED, len(self.sessions[k])) for k in keys]
                total = len(self.sessions)
                return CommandReply(id, sessions=sessions, total=total, l1=counts["L1"], l2=counts["L2"])
            case DeleteSession(prefix=prefix):
                gone = [k for k in self.sessions if k == key or (prefix and k.startswith(f"{key}:"))]
                for k in gone:
                    del self.sessions[k]
                return CommandReply(id, found=len(gone))
            case ForkSession(target=target, replace=replace, turn=number):
                if target in self.sessions and not replace:
                    return Rejected(id, "exists", f"There is a session {target} already.")
                return self._point(id, key, number, target)
            case RewindSession(turn=number):
                return self._point(id, key, number, key)
            case SessionHistory(after=after, limit=limit):
                infos, start = [], 0
                for number, text in enumerate(self.turns[key], 1):
                    tokens = list(text.encode())
                    infos.append(TurnInfo(number, start, start + len(text), text, "", tokens, [], UPDATED))
                    start += len(text)
                return CommandReply(id, position=start, turns=infos[after:][:limit])
            case ExportSession(what=what):
                kind = b"" if what == "both" else what.encode() + b" "
                return CommandReply(id, data=FILE + kind + self.sessions[key].encode())
            case FetchState(turn=turn):
                return CommandReply(id, data=FILE if turn == HELD_TURN else b"")
            case ImportSession(data=data):
                if not data.startswith(FILE):
                    return Rejected(id, "invalid", "The file holds no state.")
                self.sessions[key] = data.removeprefix(FILE).decode()
            case PutStartState(path=path, layout=layout, description=description):
                content = Path(path).read_bytes()
                if content.startswith(b"bad"):
                    return Rejected(id, "invalid", f"{path} holds no state.")
                info = StartStateInfo(key, description, UPDATED, 2, 1, bytes(16))
                self.start_states[key] = layout, content, info
                return CommandReply(id, start_states=[info])
            case DescribeStartState(description=description):
                if key in self.start_states:
                    layout, content, info = self.start_states[key]
                    self.start_states[key] = layout, content, structs.replace(info, description=description)
                return CommandReply(id, found=int(key in self.start_states))
            case ListStartStates(name=name):
                found = [state[2] for key, state in self.start_states.items() if name in (None, key)]
                return CommandReply(id, start_states=found)
            case RemoveStartStates(name=name):
                names = [key for key in self.start_states if name in (None, key)]
                for each in names:
                    del self.start_states[each]
                return CommandReply(id, found=len(names))
            case LoadAdapter(path=path):
                if Path(path).is_file() and Path(path).read_bytes().startswith(b"bad"):
                    return Rejected(id, "invalid", f"{path} is no adapter.")
                self.adapters[key] = AdapterInfo(key, "5eed" * 8, 4, UPDATED, path)
                return CommandReply(id, adapters=[self.adapters[key]])
            case ListAdapters(name=name):
                listed = [info for key, info in self.adapters.items() if name in (None, key)]
                return CommandReply(id, adapters=listed)
            case RemoveAdapter():
                return CommandReply(id, found=int(self.adapters.pop(key, None) is not None))
            case ListRequests():
                return CommandReply(id, requests=[self._info(each) for each in self._running(command)])
            case StopRequest(name=name):
                stopped = [each for each in self._running(command) if each.name == name]
                for request in stopped:
                    self._due = [entry for entry in self._due if entry[2].id != request.id]
                    self._left[request.id] = 0
                return CommandReply(id, requests=[self._info(each) for each in stopped])
            case PauseRequest(name=name):
                return CommandReply(
                    id, requests=[self._info(each) for each in self._running(command) if each.name == name]
                )
            case ListModels():
                return CommandReply(id, models=self.infos)
            case GetMetrics():
                return CommandReply(id, metrics=self.metrics)
            case LoadModel(path=path, name=name, defaults=defaults):
                if Path(path).is_file() and Path(path).read_bytes().startswith(b"bad"):
                    return Rejected(id, "invalid", f"{path} cannot be served.")
                info = structs.replace(INFO, model=name or Path(path).stem, defaults=defaults)
                self.infos = [*(each for each in self.infos if each.model != info.model), info]
                return CommandReply(id, models=self.infos, note="It took long." if "slow" in path else "")
            case RemoveModel(name=name):
                self.infos = [each for each in self.infos if each.model != name]
                return CommandReply(id, models=self.infos)
            case Tokenize(texts=texts):
                pieces = [bytes([byte]) for text in texts for byte in text.encode()]
                return CommandReply(id, token_ids=[list(t.encode()) for t in texts], token_bytes=pieces)
            case Detokenize(tokens=tokens):
                return CommandReply(id, token_bytes=[bytes([token % 256]) for token in tokens])
            case PutDocument(data=data):
                self._documents[key] = data
            case GetDocument():
                return CommandReply(id, data=self._documents.get(key, b""))
            case ListDocuments(prefix=prefix):
                return CommandReply(
                    id, keys=sorted(each for each in self._documents if each.startswith(prefix))
                )
            case RemoveDocument():
                return CommandReply(id, found=int(self._documents.pop(key, None) is not None))
        return CommandReply(id)

    def _running(self, command: RequestCommand) -> list[GenerateRequest]:
        """Those of its model that nobody has cancelled, and of which not all rows have ended."""
        found = [request for request in self.requests if self._left.get(request.id)]
        return [each for each in found if not command.to_model or each.to_model == command.to_model]

    def _info(self, request: GenerateRequest) -> RequestInfo:
        return RequestInfo(request.name, len(request.prompts) * request.n, 0, request.max_tokens)

    def _point(self, id: str, key: str, number: int | None, target: str) -> Event:
        turns = self.turns[key]
        if number is not None and number > len(turns):
            return Rejected(id, "not_found", f"There is no turn {number} in {key}, which has {len(turns)}.")
        self.turns[target] = turns[:number]
        self.sessions[target] = "".join(self.turns[target])
        return CommandReply(id, position=len(self.sessions[target]))


class ChatEngine(FakeEngine):
    """For chats: what the user says behind "!" decides."""

    def answer(self, request: GenerateRequest) -> list[tuple[float, Event]]:
        (prompt,) = request.prompts
        return super().answer(structs.replace(request, prompts=[str(prompt).removeprefix("User: !")]))


def key_of(command: Command) -> str:
    return getattr(command, "key", "")


def tier(key: str) -> str:
    return "L3" if key.startswith("disk") else "L2" if key.startswith("ram") else "L1"


def script(
    request: GenerateRequest, cached: list[int], target: str = "", seen: str | None = None
) -> list[tuple[float, Event]]:
    """The events that answer `request`, with their delays in seconds, in order. `seen` is echoed in place of
    the prompt.
    """
    key, first = request.id, str(request.prompts[0])
    if first.startswith("mute"):
        return []
    for reason in ("overloaded", "unavailable", "invalid"):
        if first.startswith(reason):
            return [(0, Rejected(key, reason, f"The fake engine finds this {reason}."))]
    made_by = INFO.fingerprint + (f"+{request.adapter_digest}" if request.adapter else "")
    given = [list(p.encode() if isinstance(p, str) else p) for p in request.prompts]
    ids = given if request.return_ids else []
    data = [[bytes([token % 256]) for token in p] for p in given] if request.return_bytes else []
    lengths = [len(p) for p in request.prompts]
    events: list[tuple[float, Event]] = [(0, Accepted(key, lengths, cached, target, made_by, ids, data))]
    if first.startswith("hang"):
        return events
    if first.startswith("fail"):
        return [*events, (0, Failed(key, "The fake engine failed."))]
    start = 0.7 if first.startswith("late") else math.inf if first.startswith("held") else 0.0
    pace = 0.02 if first.startswith("slow") else 0.0
    for row in range(len(request.prompts) * request.n):
        prompt = request.prompts[row // request.n] if seen is None else seen
        deltas = row_deltas(row, prompt if isinstance(prompt, str) else str(prompt), request)
        if str(prompt).removeprefix("User: ").startswith("ill"):
            deltas = [RowDelta(row, "i", 1), RowDelta(row, "", 0, "error", error="The fake engine lost it.")]
        if first.startswith("trickle"):
            deltas = deltas[:4]
        if first.startswith("flood"):
            return events + [(0.005 * i, Progress(key, [delta])) for i, delta in enumerate(deltas[:-1])]
        drawn = itertools.accumulate(delta.tokens for delta in deltas)
        events += [
            (start + pace * tokens, Progress(key, [delta]))
            for tokens, delta in zip(drawn, deltas, strict=True)
        ]
        if first.startswith("half"):
            events = [*events[:2], *((math.inf, event) for _, event in events[2:])]
        if first.startswith("broken"):
            return [*events[:3], (0.01, Failed(key, "The fake engine broke down."))]
    return events


def row_deltas(row: int, text: str, request: GenerateRequest) -> list[RowDelta]:
    """`text` cut at max_tokens and at stop strings, in pieces of `flush_tokens`."""
    strings = request.stop_strings + (request.late_stops.strings if request.late_stops else [])
    end, stop = min(((at, s) for s in strings if (at := text.find(s)) >= 0), default=(len(text), ""))
    reason = "stop" if end <= request.max_tokens else "length"
    text = text[: min(end, request.max_tokens)]
    size = request.flush_tokens or max(1, len(text))
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    last = RowDelta(row, "", 0, reason, stop=stop if reason == "stop" else "")
    return [*(RowDelta(row, piece, len(piece)) for piece in pieces), last]
