"""Engines over a model that is a hash, with the real rows, scheduler, pool, store and threads, in one World.

Several engines share a database, which a process of its own writes to, as on a host with several devices.
"""

import errno
import os
import sqlite3
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

from checkpoints import tiny
from hashed_model import HashRunner
from simulated_network import Network
from turn_taking import World

from rwkv_batch.engine import Engine, memory
from rwkv_batch.runner.loading import LoadedModel
from rwkv_batch.state import images
from rwkv_batch.state.entries import Operation, StoreError
from rwkv_batch.state.host import link, service
from rwkv_batch.state.host.service import HostWriter
from rwkv_batch.state.host.store import HostStore
from rwkv_batch.state.log.protocol import Outcome, SessionStore
from rwkv_batch.state.log.store import Store
from rwkv_batch.state.pool import savepoints
from rwkv_batch.state.sql import tables
from rwkv_batch.wire.protocol import Cancel, Event, GenerateRequest

WEIGHTS = tiny(layers=1, width=64, vocab=65536)
ADDRESS = "ipc://database"
FRONTEND = b"client"


@dataclass(frozen=True)
class Shape:
    """What a server is like."""

    engines: int
    database: str  # "memory", "file" or "shared"
    late: bool
    options: dict[str, Any]
    replay_rate: float
    save_after: int

    @classmethod
    def drawn(cls, draw: Random) -> "Shape":
        database = draw.choice(("memory", "file", "file", "shared", "shared", "shared"))
        return cls(
            engines=draw.choice((1, 2, 2, 3)) if database == "shared" else 1,
            database=database,
            late=draw.random() < 0.7,
            options={
                "max_rows": draw.choice((1, 2, 3, 5)),
                "l1": draw.choice((0, 1, 2, 4, 8)),
                "l2": draw.choice((0, 1, 2, 8)),
                "prefix_cache_mb": draw.choice((0, 1)),
                "prefill_tokens": draw.choice((3, 8, 32)),
                "replay_tokens": draw.choice((1, 20, 8192)),
                "durable": True,
            },
            replay_rate=draw.choice((1e-9, 1e18)),
            save_after=draw.choice((1, 2, 4, 8)),
        )


@dataclass(eq=False)
class SimulatedEngine:
    """One engine process."""

    name: str
    inbox: deque[Any] = field(default_factory=deque)
    awake: bool = False
    stopping: bool = False
    serves: bool = False
    ended: bool = False
    lives: int = 0  # how often it was started
    engine: Engine | None = None


class Server:
    """Engines, and the process of their database."""

    def __init__(self, world: World, shape: Shape, folder: Path) -> None:
        self.world, self.shape, self._folder = world, shape, folder
        self.network = Network(world)
        self.engines = [SimulatedEngine(f"engine {number}") for number in range(shape.engines)]
        self.answers: dict[str, list[Event]] = {}  # by the ids of requests
        self.disk_is_full = False
        self._stores: dict[str, SessionStore] = {}  # by process, of those that run
        self._control, self._stop = self.network.pipe()
        if shape.database == "shared":
            self.start_database(first=True)
        for each in self.engines:
            self.start(each)

    @contextmanager
    def patched(self) -> Iterator[None]:
        """What the product asks of the machine it asks of this one."""
        commit = Store.commit

        def commit_if_there_is_room(store: Store, groups: Sequence[Sequence[Operation]]) -> list[Outcome]:
            if self.disk_is_full:
                raise StoreError("The disk is full.")
            return commit(store, groups)

        def sync(descriptor: int) -> None:
            self.world.pause()
            if self.disk_is_full:
                raise OSError(errno.ENOSPC, "No space left on device")

        with ExitStack() as patches:
            for owner, name, value in (
                (link, "zmq", self.network.zmq),
                (link, "socket", self.network.socket),
                (service, "zmq", self.network.zmq),
                (Store, "commit", commit_if_there_is_room),
                (os, "fsync", sync),
                (os, "fdatasync", sync),
                (memory, "prefill_rate", lambda runner, tokens: self.shape.replay_rate),
                (savepoints, "WORTHWHILE", 0.0),
                (savepoints, "LEAST_TOKENS", self.shape.save_after),
            ):
                patches.enter_context(mock.patch.object(owner, name, value))
            yield

    # Processes

    def start(self, each: SimulatedEngine) -> None:
        each.inbox.clear()
        each.lives += 1
        each.serves, each.ended, each.stopping, each.awake = False, False, False, False
        self.world.start("main", lambda: self._serve(each), each.name)

    def kill(self, each: SimulatedEngine) -> None:
        """kill -9."""
        each.ended, each.serves = True, False
        self.world.kill(each.name)
        self._forget(each.name)

    def start_database(self, first: bool) -> None:
        self._control.readable = False
        self.world.start("main", lambda: self._write(first), "database")

    def kill_database(self) -> None:
        """kill -9 of the process that writes."""
        self.network.dies(ADDRESS)
        self.world.kill("database")
        self._forget("database")

    def stop(self) -> None:
        """End all that run, as the supervisor does: the database last."""
        for each in self.engines:
            each.stopping = True
        self.world.wait(lambda: all(each.ended for each in self.engines))
        self._stop.send(b"x")
        self.world.wait(lambda: "database" not in self._stores)

    def left_turns(self) -> list[int]:
        """Turns in the file to which no session leads."""
        with closing(sqlite3.connect(self._folder / "sessions.db")) as database:
            return tables.unused_turns(database)

    def send(self, each: SimulatedEngine, message: Any) -> None:
        each.inbox.append(message)

    def _forget(self, process: str) -> None:
        """What the system does when a process has died: its files are closed."""
        if store := self._stores.pop(process, None):
            with suppress(Exception):
                if isinstance(store, Store):
                    store.close()

    def _write(self, first: bool) -> None:
        store = Store(self._folder / "sessions.db", serves_others=True)
        self._stores["database"] = store
        if first:
            store.forget_processes()
            if store.images_folder:
                images.sweep(store.images_folder, store.image_turns)
        HostWriter(store, ADDRESS).run(self._control)  # type: ignore[arg-type]
        self.network.dies(ADDRESS)
        store.close()
        del self._stores["database"]

    def _serve(self, each: SimulatedEngine) -> None:
        world = self.world
        while True:  # the supervisor starts it again
            try:
                engine = each.engine = self._engine(each)
                break
            except StoreError:
                self._forget(each.name)
                world.sleep(0.1)
        each.serves = True
        while not each.stopping:
            world.wait(lambda: bool(each.inbox or each.awake or each.stopping or engine.busy))
            each.awake = False
            while each.inbox:
                self._receive(engine, each.inbox.popleft())
            self._answer(engine.launch())
            world.pause()
            self._answer(engine.land())
        engine.close()
        self._answer(engine.collect())
        self._stores.pop(each.name, None)
        each.serves, each.ended = False, True

    def _engine(self, each: SimulatedEngine) -> Engine:
        shape, store = self.shape, None
        if shape.database != "memory":
            path = self._folder / "sessions.db"
            store = HostStore(path, ADDRESS) if shape.database == "shared" else Store(path)
            self._stores[each.name] = store

        def wake() -> None:
            each.awake = True
            self.world.pause()

        runner = HashRunner(WEIGHTS, shape.late, most_steps=4)
        loaded = LoadedModel(WEIGHTS, runner, "hashed", 0)
        return Engine(loaded, store=store, wake=wake, device="cpu", **shape.options)

    def _receive(self, engine: Engine, message: Any) -> None:
        key = (FRONTEND, message.id)
        match message:
            case GenerateRequest():
                engine.add(key, message)
            case Cancel():
                engine.cancel(key)
            case _:
                engine.command(key, message)

    def _answer(self, outbox: list[tuple[Any, Event]]) -> None:
        for (_, identity), event in outbox:
            self.answers.setdefault(identity, []).append(event)
