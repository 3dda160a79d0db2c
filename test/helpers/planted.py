"""Bugs as somebody might make them, each of which the simulation has to find."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any
from unittest import mock

from msgspec.structs import replace

from rwkv_batch.engine.scheduling.scheduler import Scheduler
from rwkv_batch.state.entries import ANY, Done, Head, Operation, PutSession, Removed, SessionAt
from rwkv_batch.state.jobs import Report
from rwkv_batch.state.log.protocol import Committed, Outcome
from rwkv_batch.state.log.store import Store
from rwkv_batch.state.log.writer import Writer
from rwkv_batch.state.pool.tiers import Tiers
from state_pool import StatePool


@contextmanager
def unlock_left_out() -> Iterator[None]:
    """The next turn of a session does not begin where one was dropped that waited."""
    drop = Scheduler.drop

    def without_unlock(scheduler: Scheduler, unwanted: Callable[[Any], bool]) -> Any:
        with mock.patch.object(Scheduler, "unlock", lambda self, session: None):
            return drop(scheduler, unwanted)

    with mock.patch.object(Scheduler, "drop", without_unlock):
        yield


@contextmanager
def slot_freed_twice() -> Iterator[None]:
    """Now and then."""
    free, calls = Scheduler.free, count(1)

    def twice(scheduler: Scheduler, *slots: int) -> None:
        free(scheduler, *slots, *(slots if next(calls) % 20 == 0 else ()))

    with mock.patch.object(Scheduler, "free", twice):
        yield


@contextmanager
def commit_reported_early() -> Iterator[None]:
    """Before it is on the disk."""
    commit_queue = Store.commit_queue

    def opened(store: Store, report: Report, renewed: Callable[[], None]) -> Writer:
        writer = commit_queue(store, report, renewed)
        put = writer.put

        def reported(operations: Sequence[Operation], committed: Committed, retry: bool = False) -> None:
            report(partial(committed, Removed(), None))
            put(operations, lambda removed, error: None, retry)

        writer.put = reported  # type: ignore[method-assign]
        return writer

    with mock.patch.object(Store, "commit_queue", opened):
        yield


@contextmanager
def stale_state_after_rewind() -> Iterator[None]:
    """The state of the end that a session had is taken for that of the turn to which it went back."""
    point, begin, stale = StatePool.point, Tiers.begin, dict[int, int]()

    def pointed(pool: StatePool, at: SessionAt, head: Head, done: Done) -> None:
        stale[head.turn] = at.turn
        point(pool, at, head, done)

    def begun(tiers: Tiers, turn: int, last: bool) -> Any:
        found = begin(tiers, stale[turn], last) if turn in stale else None
        return begin(tiers, turn, last) if found is None else found

    with mock.patch.object(StatePool, "point", pointed), mock.patch.object(Tiers, "begin", begun):
        yield


@contextmanager
def head_not_compared() -> Iterator[None]:
    """A turn is stored behind any end of its session."""
    commit = Store.commit

    def any_end(store: Store, groups: Sequence[Sequence[Operation]]) -> list[Outcome]:
        return commit(
            store,
            [
                [replace(each, follows=ANY) if isinstance(each, PutSession) else each for each in group]
                for group in groups
            ],
        )

    with mock.patch.object(Store, "commit", any_end):
        yield


BUGS = (
    unlock_left_out,
    slot_freed_twice,
    commit_reported_early,
    stale_state_after_rewind,
    head_not_compared,
)
