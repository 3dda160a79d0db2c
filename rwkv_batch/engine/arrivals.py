"""Where other servers change the database, too: what has arrived waits here until it has been looked up.

A request of a session, or a command about one, needs what that is now. To ask a database on another machine
takes longer than a step may wait. So it is asked beside the steps, for all that has arrived together, and the
request goes on when the answer is there. Where the database is a file nothing waits.
"""

from collections.abc import Callable
from functools import partial

from rwkv_batch.state.log.protocol import Wanted
from rwkv_batch.state.starts.start_states import KEY
from rwkv_batch.wire.commands import (
    DeleteSession,
    DescribeStartState,
    EngineCommand,
    ExportSession,
    ForkSession,
    ImportSession,
    ListStartStates,
    PutStartState,
    RemoveStartStates,
    RewindSession,
    SessionHistory,
)
from rwkv_batch.wire.protocol import GenerateRequest, RequestKey
from state_pool import StatePool

Arrival = GenerateRequest | EngineCommand


class Arrivals:
    """For the engine's thread. `go_on` gets what has been looked up; `fail` what has not, with the reason."""

    def __init__(
        self,
        pool: StatePool,
        go_on: Callable[[RequestKey, Arrival], None],
        fail: Callable[[RequestKey, Arrival, str], None],
    ) -> None:
        self._pool, self._go_on, self._fail = pool, go_on, fail
        self._waiting: dict[RequestKey, Arrival] = {}

    @property
    def waiting(self) -> bool:
        return bool(self._waiting)

    @property
    def requests(self) -> list[GenerateRequest]:
        """Of what waits, the requests that generate."""
        return [arrival for arrival in self._waiting.values() if isinstance(arrival, GenerateRequest)]

    def put(self, key: RequestKey, arrival: Arrival) -> bool:
        """Look up what it needs; False if that is nothing, or takes no time."""
        if not self._pool.store.remote:
            return False
        wanted = needed(arrival)
        if not wanted:
            return False
        self._waiting[key] = arrival
        self._pool.refresh(wanted, partial(self._refreshed, key))
        return True

    def drop(self, unwanted: Callable[[RequestKey], bool]) -> None:
        """Forget those of which this is true."""
        for key in [key for key in self._waiting if unwanted(key)]:
            del self._waiting[key]

    def _refreshed(self, key: RequestKey, error: str | None) -> None:
        arrival = self._waiting.pop(key, None)
        if arrival is None:  # dropped meanwhile
            return
        if error:
            self._fail(key, arrival, error)
        else:
            self._go_on(key, arrival)


def needed(arrival: Arrival) -> Wanted:
    """What the engine is going to ask of the database for it."""
    match arrival:
        case GenerateRequest(turn=turn):
            names = [arrival.start_state, *(part.start_state for part in arrival.mixture or ())]
            starts = [KEY + name for name in names if name]
            found = Wanted(keys=starts, documents=starts)
            if turn:
                found.keys += filter(None, (turn.source, turn.target))
                found.prefixes += [f"{turn.branch}:"] if turn.branch is not None else []
                found.requests += [turn.request] if turn.request else []
            return found
        case ForkSession(key=key, target=target):
            return Wanted(keys=[key, target])
        case DeleteSession(key=key, prefix=prefix):
            return Wanted(keys=[key], prefixes=[f"{key}:"] if prefix else [])
        case RewindSession() | SessionHistory() | ExportSession() | ImportSession():
            return Wanted(keys=[arrival.key])
        case PutStartState(key=name) | DescribeStartState(key=name):
            return Wanted(keys=[KEY + name], documents=[KEY + name])
        case ListStartStates(name=name) | RemoveStartStates(name=name):
            if name is None:
                return Wanted(prefixes=[KEY])
            return Wanted(keys=[KEY + name], documents=[KEY + name])
    return Wanted()
