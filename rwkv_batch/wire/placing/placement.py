"""Which engine of a host gets a request. Pure: no sockets, no clock.

Turns of a session, nodes of a tree and responses go to one engine, which all front ends know (homes.py). It
is noted at the first of them: the engine with the fewest sessions of late. While that one is dead, another
one follows from the session's root, so that all front ends choose the same. A prompt whose beginning has been
sent to an engine goes there, unless that one has much more to do; anything else goes where there is the least
to do. The rows of a large request are spread.

A front end knows what it has sent and what has ended. An engine's reports say what all have sent, so the
difference is what the others have: it is counted until the next report.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from heapq import heapify, heapreplace
from typing import NamedTuple

from rwkv_batch.wire.placing.homes import Homes
from rwkv_batch.wire.protocol import GenerateRequest, SessionTurn, owned, owner_and_name

TOKENS_OF_ROW = 64  # prompt tokens that cost an engine as much as a row
CHARACTERS = 4  # of a token, about
BEGINNINGS = (256, 1024, 4096, 16384)  # characters of prompts that are remembered
REMEMBERED = 8192  # beginnings
BUSIER = 0.25  # of an engine's slots: so many more rows than another has are much more
SWAMPED = 64  # rows, and an engine's slots: one with so many more to do gets no new sessions
TAGGED, TAG = "response:resp_", 8  # keys of responses; those that belong together have the same digits there


class NoEngine(LookupError):
    """No engine is ready."""


class Placed(NamedTuple):
    """What one engine gets of a request: rows by their numbers, which belong to these prompts."""

    engine: int
    prompts: list[int]
    rows: list[int]
    ticket: "Ticket"


@dataclass(eq=False)
class Ticket:
    """What a share adds to its engine's work, until it has ended."""

    engine: int
    rows: int
    tokens: int  # of prompts that are not read
    session: tuple[str, str] | None = None  # model and root, of a turn


@dataclass
class _Work:
    """An engine, as a front end knows it."""

    models: dict[str, int] = field(default_factory=dict)  # slots by name; empty: it is not ready
    rows: int = 0  # of this front end
    tokens: int = 0
    other_rows: int = 0  # of the others, when the engine last reported
    other_tokens: int = 0
    tickets: set[Ticket] = field(default_factory=set)

    @property
    def slots(self) -> int:
        return max(self.models.values(), default=1)

    @property
    def load(self) -> float:
        """In rows for each slot."""
        tokens = self.tokens + self.other_tokens
        return (self.rows + self.other_rows + tokens / TOKENS_OF_ROW) / self.slots

    @property
    def room(self) -> int:
        """Slots that are free."""
        return self.slots - self.rows - self.other_rows

    @property
    def order(self) -> tuple[bool, float]:
        """The engine that is first in it gets the next row."""
        return self.room <= 0, self.load


class Placement:
    """One for each front end. `place`, `home`, `serves` and `lost` are for one caller at a time.

    The other methods may be called from any thread, and count from the next call of those on.
    """

    def __init__(self, engines: int, homes: Homes | None = None) -> None:
        """`homes`: what the front ends of the host share; None: there is no other one."""
        self._engines = [_Work() for _ in range(engines)]
        self._homes = homes or Homes(engines)
        self._sessions: dict[tuple[str, str], list[Ticket]] = {}  # turns under way
        self._beginnings: OrderedDict[tuple[str, str, int, int], int] = OrderedDict()  # where they were sent
        self._news: deque[Callable[[], None]] = deque()

    def serves(self, engine: int, models: Mapping[str, int]) -> None:
        """It is ready and has these models, each with so many slots."""
        self._engines[engine].models = dict(models)

    def lost(self, engine: int) -> None:
        """It has died; what it had to do has gone with it."""
        self._catch_up()
        for ticket in self._engines[engine].tickets:
            ticket.rows = ticket.tokens = 0
        self._engines[engine] = _Work()
        for session, tickets in [*self._sessions.items()]:
            left = [ticket for ticket in tickets if ticket.engine != engine]
            self._put_session(session, left)
        for key in [key for key, where in self._beginnings.items() if where == engine]:
            del self._beginnings[key]

    def ready(self, model: str = "") -> list[int]:
        """The engines that are ready and have the model; if none has it, all that are ready."""
        alive = [number for number, engine in enumerate(self._engines) if engine.models]
        having = [number for number in alive if model in self._engines[number].models]
        return having or alive

    def home(self, model: str, key: str) -> int:
        """The engine of a session or document. Raises NoEngine."""
        self._catch_up()
        return self._home((model, root_of(key)), self._ready(model))

    def place(self, request: GenerateRequest) -> list[Placed]:
        """Where the request goes; its work is counted from now on. Raises NoEngine."""
        self._catch_up()
        engines = self._ready(request.to_model)
        count = len(request.prompts) * request.n
        if request.turn:
            session = request.to_model, root_of(key_of(request.turn))
            engine = self._home(session, engines)
            return [self._share(engine, request, range(len(request.prompts)), range(count), session)]
        if count == 1:
            return [self._share(self._single(request, engines), request, range(1), range(1))]
        return self._spread(request, engines)

    def read(self, ticket: Ticket) -> None:
        """Its prompts have been read."""
        self._news.append(partial(self._read, ticket))

    def ended(self, ticket: Ticket, rows: int) -> None:
        """Note that so many of its rows have ended."""
        self._news.append(partial(self._ended, ticket, rows))

    def over(self, ticket: Ticket) -> None:
        """All of it has ended, however. More than once is the same."""
        self._news.append(partial(self._over, ticket))

    def reported(self, engine: int, rows: int, tokens: int) -> None:
        """What an engine has to do for all front ends. Its report takes the place of the one before."""
        self._news.append(partial(self._reported, engine, rows, tokens))

    def loads(self) -> list[float]:
        """Of each engine, in rows for each slot."""
        self._catch_up()
        return [engine.load for engine in self._engines]

    def _ready(self, model: str) -> list[int]:
        if engines := self.ready(model):
            return engines
        raise NoEngine

    def _home(self, session: tuple[str, str], engines: list[int]) -> int:
        """Where turns of it are under way, or the engine that is noted; by rendezvous hashing if that has
        died.
        """
        for ticket in self._sessions.get(session, ()):
            return ticket.engine
        _, root = session
        home = self._homes.find(root)
        if home is None:
            home = self._homes.give(root, partial(self._with_fewest, engines, root))
        return home if home in engines else max(engines, key=lambda engine: _score(root, engine))

    def _with_fewest(self, engines: list[int], root: str, sessions: list[int]) -> int:
        """The engine with the fewest sessions for each slot. Of several, the one with the least to do.

        `sessions`: how many each has.
        """
        least = min(self._engines[number].load for number in engines)

        def swamped(number: int) -> bool:
            engine = self._engines[number]
            return engine.load - least > max(1.0, SWAMPED / engine.slots)

        def order(number: int) -> tuple[float, float, bytes]:
            engine = self._engines[number]
            return sessions[number] / engine.slots, engine.load, _score(root, number)

        return min((number for number in engines if not swamped(number)), key=order)

    def _single(self, request: GenerateRequest, engines: list[int]) -> int:
        least = min(engines, key=lambda number: self._engines[number].order)
        if not request.prefix_cache:
            return least
        keys, found = _beginnings(request), least
        for key in reversed(keys):  # the longest that is known
            where = self._beginnings.get(key)
            if where in engines:
                found = least if self._much_busier(where, least) else where
                break
        for key in keys:
            self._beginnings[key] = found
            self._beginnings.move_to_end(key)
        while len(self._beginnings) > REMEMBERED:
            self._beginnings.popitem(last=False)
        return found

    def _much_busier(self, one: int, other: int) -> bool:
        busy, free = self._engines[one], self._engines[other]
        return busy.load > free.load + BUSIER or (free.room > 0 and busy.room <= 0)

    def _spread(self, request: GenerateRequest, engines: list[int]) -> list[Placed]:
        """By what the engines have free: prompt by prompt, or the rows of each of a few prompts."""
        prompts, n = range(len(request.prompts)), request.n
        if n == 1 or len(prompts) >= 2 * len(engines):
            sizes = [n + tokens_of(prompt) / TOKENS_OF_ROW for prompt in request.prompts]
            return [
                self._share(engine, request, mine, [p * n + i for p in mine for i in range(n)])
                for engine, mine in self._divide(engines, n, sizes)
            ]
        return [
            self._share(engine, request, prompts, [p * n + i for p in prompts for i in mine])
            for engine, mine in self._divide(engines, len(prompts), [len(prompts)] * n)
        ]

    def _divide(self, engines: list[int], rows: int, sizes: Iterable[float]) -> list[tuple[int, list[int]]]:
        """Engines with the numbers of the pieces that they get. Each piece has so many rows; a size is these
        with their prompts.
        """
        work = [(number, self._engines[number]) for number in engines]
        heap = [(each.room < rows, each.load, number, each.room) for number, each in work]
        heapify(heap)
        found: dict[int, list[int]] = {}
        for piece, size in enumerate(sizes):
            _, load, number, room = heap[0]
            found.setdefault(number, []).append(piece)
            load, room = load + size / self._engines[number].slots, room - rows
            heapreplace(heap, (room < rows, load, number, room))
        return sorted(found.items())

    def _share(
        self,
        engine: int,
        request: GenerateRequest,
        prompts: list[int] | range,
        rows: list[int] | range,
        session: tuple[str, str] | None = None,
    ) -> Placed:
        tokens = sum(tokens_of(request.prompts[prompt]) for prompt in prompts)
        ticket = Ticket(engine, len(rows), tokens, session)
        self._engines[engine].rows += ticket.rows
        self._engines[engine].tokens += ticket.tokens
        self._engines[engine].tickets.add(ticket)
        if session:
            self._sessions.setdefault(session, []).append(ticket)
        return Placed(engine, list(prompts), list(rows), ticket)

    def _catch_up(self) -> None:
        while self._news:
            self._news.popleft()()

    def _read(self, ticket: Ticket) -> None:
        if ticket.rows:
            self._engines[ticket.engine].tokens -= ticket.tokens
            ticket.tokens = 0

    def _ended(self, ticket: Ticket, rows: int) -> None:
        if ticket.rows:
            self._engines[ticket.engine].rows -= rows
            ticket.rows -= rows
            if not ticket.rows:
                self._leave(ticket)

    def _over(self, ticket: Ticket) -> None:
        self._ended(ticket, ticket.rows)

    def _leave(self, ticket: Ticket) -> None:
        self._engines[ticket.engine].tokens -= ticket.tokens
        self._engines[ticket.engine].tickets.discard(ticket)
        ticket.tokens = 0
        if ticket.session:
            tickets = self._sessions.get(ticket.session, [])
            self._put_session(ticket.session, [each for each in tickets if each is not ticket])

    def _put_session(self, session: tuple[str, str], tickets: list[Ticket]) -> None:
        self._sessions.pop(session, None)
        if tickets:
            self._sessions[session] = tickets

    def _reported(self, engine: int, rows: int, tokens: int) -> None:
        work = self._engines[engine]
        work.other_rows = max(0, rows - work.rows)
        work.other_tokens = max(0, tokens - work.tokens)


def root_of(key: str) -> str:
    """What sessions have in common that belong together: nodes of a tree, and responses of one chat."""
    owner, name = owner_and_name(key)
    root = name[: len(TAGGED) + TAG] if name.startswith(TAGGED) else name.partition(":")[0]
    return owned(owner, root)


def key_of(turn: SessionTurn) -> str:
    """The session of a turn."""
    return turn.target or turn.branch or turn.source or ""


def tokens_of(prompt: str | list[int]) -> int:
    """About how many tokens a prompt has."""
    return len(prompt) // CHARACTERS + 1 if isinstance(prompt, str) else len(prompt)


def _score(root: str, engine: int) -> bytes:
    return blake2b(f"{engine} {root}".encode(errors="surrogatepass"), digest_size=8).digest()


def _beginnings(request: GenerateRequest) -> list[tuple[str, str, int, int]]:
    """Of its prompt, the shortest first."""
    (prompt,), unit = request.prompts, CHARACTERS if isinstance(request.prompts[0], list) else 1
    kind = request.to_model, f"{request.adapter} {request.start_state}"
    sizes = [size // unit for size in BEGINNINGS if size // unit <= len(prompt)]
    return [(*kind, size, hash(prompt[:size] if unit == 1 else tuple(prompt[:size]))) for size in sizes]
