"""Adapters of rows: which are loaded, which host memory holds, and which have a slot on the device.

An adapter is read on a thread of its own and stays in host memory, those used last up to a limit; the others
are read from their files again when a row needs them. A row waits until its adapter has a slot on the device
(`Adapters.has_slot` is what the scheduler asks). A slot that running rows need is never given to another
adapter; of the others that whose adapter has been used least recently is.

A start state that scales what rows read out of their states is an adapter of the rows that begin in it.
"""

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar
from weakref import WeakValueDictionary

from rwkv_batch.config import EngineConfig
from rwkv_batch.engine.rows.parts import EngineParts
from rwkv_batch.engine.rows.rows import Refusal, could_not_run, refusal_of_file
from rwkv_batch.engine.scheduling.row import Row, RowAdapter
from rwkv_batch.model.adapters import reader
from rwkv_batch.model.adapters.low_rank import low_rank
from rwkv_batch.model.adapters.parts import Scaling
from rwkv_batch.model.files import CheckpointError
from rwkv_batch.ops.host_memory import pins
from rwkv_batch.ops.low_rank import LowRankAdapter, readout_adapter, scaled, scaled_digest
from rwkv_batch.runner.protocol import NO_ADAPTER
from rwkv_batch.state.jobs import JobThread
from rwkv_batch.state.starts.contents import Offsets, StoredStart
from rwkv_batch.wire.protocol import AdapterInfo, GenerateRequest

MOST_SCALES = 1 << 14  # of adapters that are remembered, beside those in use

T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(eq=False, kw_only=True)
class WeightedAdapter(RowAdapter):
    """An adapter with what a slot on the device gets of it."""

    weights: LowRankAdapter | None  # None: host memory had no room for it; it is read again when it is needed


@dataclass(eq=False, kw_only=True)
class LoadedAdapter(WeightedAdapter):
    """An adapter that requests may name, or that rows still run with."""

    path: Path
    scaling: Scaling | None
    rank: int
    of: "LoadedAdapter | None" = None  # of which it is, scaled; requests may name that
    scale: float = 1.0
    created: float = field(default_factory=time.time)  # seconds since 1970

    @property
    def info(self) -> AdapterInfo:
        return AdapterInfo(self.name, self.digest, self.rank, self.created, str(self.path))


Loaded = Callable[[LoadedAdapter | None, Exception | None], None]


class Adapters:
    """Methods are for the engine's thread; `poll` runs what loading has to report. `wake`: as of Engine."""

    def __init__(self, parts: EngineParts, config: EngineConfig, wake: Callable[[], None]) -> None:
        self._parts, self._wake = parts, wake
        self._most_rank, self._limit = config.max_adapter_rank, config.adapter_cache_mb << 20
        self._adapters: dict[str, LoadedAdapter] = {}
        self._loading: set[str] = set()  # names
        self._reading: set[LoadedAdapter] = set()  # again
        self._held: OrderedDict[LoadedAdapter, None] = (
            OrderedDict()
        )  # in host memory, least recently used first
        # Whose adapter each slot has, the least recently used first.
        self._slots: OrderedDict[int, WeightedAdapter | None] = OrderedDict.fromkeys(
            range(config.max_adapters)
        )
        self._of_starts: WeakValueDictionary[str, WeightedAdapter] = WeakValueDictionary()  # by digest
        self._of_scales: WeakValueDictionary[str, LoadedAdapter] = WeakValueDictionary()  # likewise
        self._scales: OrderedDict[str, int] = OrderedDict()  # their models by digest, the oldest first
        self._numbers: dict[str, int] = {}  # by digest; they rise
        self._callbacks: deque[Callable[[], None]] = deque()
        self._thread: JobThread | None = None  # from the first adapter on

    def attach(self) -> None:
        """The pool has another database."""
        for adapter in [*self._adapters.values(), *self._of_scales.values()]:
            adapter.model = self._parts.pool.adapted.of(adapter.digest)

    def find(self, request: GenerateRequest) -> LoadedAdapter | None:
        """The adapter that a request names, in its scale.

        Raises Refusal, also where it is not what it was, or no turn could be kept.
        """
        if not request.adapter:
            return None
        found = self._adapters.get(request.adapter)
        if found is None:
            loaded = f"loaded are {', '.join(sorted(self._adapters))}" if self._adapters else "none is loaded"
            raise Refusal("not_found", f"There is no adapter {request.adapter[:200]}; {loaded}.")
        chosen = found if request.adapter_scale == 1 else self._scaled(found, request.adapter_scale)
        if request.adapter_digest not in ("", found.digest, chosen.digest):
            raise Refusal(
                "not_found", f"The adapter {found.name} is not what it was when this request began."
            )
        return chosen

    def of(self, request: GenerateRequest, start_state: str) -> RowAdapter | None:
        """That of the rows of a request that begin in a state. Raises Refusal."""
        named, start = self.find(request), self._parts.pool.starts.find(start_state)
        return self._of_start(start, start.offsets, named) if start and start.offsets else named

    def no_offsets(self) -> str | None:
        """Why start states may not scale what rows read out of their states; None: they may."""
        if self._parts.weights.family == "rwkv6":
            return "which only RWKV-7 can run; give a state without it"
        if not self._slots:
            return "which takes the place of an adapter; start the server with --max-adapters 1 or more"
        return None

    def infos(self, name: str | None) -> list[AdapterInfo]:
        """All that are loaded, or that of the name."""
        return [a.info for key, a in sorted(self._adapters.items()) if name in (None, key)]

    def load(self, name: str, path: Path, scaling: Scaling | None, done: Loaded) -> None:
        """Read an adapter from a file. `done` gets it inside a later `poll`, or an error.

        Raises Refusal, which the error may be too.
        """
        if not self._slots:
            raise Refusal("invalid", "The server has no room for adapters; start it with --max-adapters.")
        if name in self._adapters or name in self._loading:
            raise Refusal("exists", f"The adapter {name} is loaded already; unload it first.")
        self._loading.add(name)

        models = self._parts.pool.adapted

        def read() -> LoadedAdapter:
            weights = self._read(path, scaling)
            model = models.add(weights.digest)
            return LoadedAdapter(
                name=name,
                digest=weights.digest,
                number=0,
                model=model,
                path=path,
                scaling=scaling,
                rank=weights.rank,
                weights=weights,
            )

        def loaded(adapter: LoadedAdapter | None, error: Exception | None) -> None:
            self._loading.discard(name)
            if adapter is not None:
                if models is not self._parts.pool.adapted:  # there is another database since
                    adapter.model = self._parts.pool.adapted.of(adapter.digest)
                adapter.number = self._number(adapter.digest)
                self._adapters[name] = adapter
                self._hold(adapter)
            done(adapter, refusal_of_file(error) if isinstance(error, CheckpointError) else error)

        self._run(read, loaded)

    def remove(self, name: str) -> int:
        """Forget the adapter of that name; rows that have it go on. Returns how many there were."""
        adapter = self._adapters.pop(name, None)
        if adapter is None:
            return 0
        for other in [each for each in self._held if each.of is adapter]:
            del self._held[other]  # rows that run with it hold it, too
        self._held.pop(adapter, None)
        if all(row.life.adapter is not adapter for row in self._parts.scheduler.rows()):
            adapter.weights = None
            if adapter.slot is not None:
                self._slots[adapter.slot] = None
                adapter.slot = None
        return 1

    @property
    def most(self) -> int:
        """How many run at once."""
        return len(self._slots)

    def has_slot(self, row: Row) -> bool:
        """Whether the row's adapter is on the device, brought there if no running row needs a slot."""
        adapter = row.life.adapter
        if not isinstance(adapter, WeightedAdapter):
            return True
        if adapter.slot is None and not self._give_slot(adapter):
            return False
        assert adapter.slot is not None
        self._slots.move_to_end(adapter.slot)
        return True

    def slots_of(self, rows: Iterable[Row]) -> list[int]:
        """The slots of their adapters; empty if none has one."""
        adapters = [row.life.adapter for row in rows]
        if not any(adapters):
            return []
        return [NO_ADAPTER if a is None or a.slot is None else a.slot for a in adapters]

    def poll(self) -> None:
        """Run the callbacks of what has been read."""
        while self._callbacks:
            self._callbacks.popleft()()
            self._parts.scheduler.retry()

    def close(self) -> None:
        if self._thread:
            self._thread.close()

    def _of_start(self, start: StoredStart, offsets: Offsets, named: LoadedAdapter | None) -> WeightedAdapter:
        """What a start state changes at every token. Raises Refusal."""
        if named:
            raise Refusal(
                "invalid",
                f"The start state {start.name} has a time_offset, beside which no adapter of a request can "
                "run; merge the adapter into the model, as `adapter_filename` of /loadmodel does.",
            )
        if reason := self.no_offsets():
            raise Refusal("invalid", f"The start state {start.name} has a time_offset, {reason}.")
        digest, model = offsets.digest, start.session.head.model
        found = self._of_starts.get(digest)
        if found is None or found.model != model:
            on_gpu = pins(self._parts.runner.device)
            found = WeightedAdapter(
                name=start.name,
                digest=digest,
                number=self._number(digest),
                model=model,
                weights=readout_adapter(digest, offsets.numbers, self._parts.runner.dtype, on_gpu),
            )
            self._of_starts[digest] = found
        return found

    def _scaled(self, adapter: LoadedAdapter, scale: float) -> LoadedAdapter:
        """An adapter of its own, whose weights are made when a row needs them."""
        digest = scaled_digest(adapter.digest, scale)
        found = self._of_scales.get(digest)
        if found is None or found.of is not adapter:
            model = self._parts.pool.adapted.of(digest)
            found = replace(
                adapter,
                digest=digest,
                number=self._number(digest),
                model=model,
                slot=None,
                weights=None,
                of=adapter,
                scale=scale,
            )
            self._of_scales[digest] = found
            self._scales[digest] = model
            self._forget_scale()
        return found

    def _forget_scale(self) -> None:
        """Clients choose scales, so one is forgotten for a new one; if it comes again, it is new itself."""
        if len(self._scales) > MOST_SCALES:
            digest, model = self._scales.popitem(last=False)
            if digest in self._of_scales:  # rows have it
                self._scales[digest] = model
            else:
                del self._numbers[digest]
                self._parts.pool.adapted.forget(model)

    def _number(self, digest: str) -> int:
        """That of an adapter, which no other has or had."""
        if digest not in self._numbers:
            self._numbers[digest] = next(reversed(self._numbers.values()), -1) + 1
        return self._numbers[digest]

    def _give_slot(self, adapter: WeightedAdapter) -> bool:
        if adapter.weights is None:
            assert isinstance(adapter, LoadedAdapter)
            self._read_again(adapter)
            return False
        used = {row.life.adapter for row in self._parts.scheduler.running.values()}
        free = next((slot for slot, owner in self._slots.items() if owner is None or owner not in used), None)
        if free is None:
            return False
        if owner := self._slots[free]:
            owner.slot = None
            self._slots[free] = None
        try:
            self._parts.runner.load_adapter(free, adapter.weights)
        except Exception as error:  # not at once: the scheduler goes through what waits
            log.exception("an adapter could not be brought to the device")
            self._report(partial(self._fail, adapter, could_not_run(error)))
            return False
        self._slots[free], adapter.slot = adapter, free
        if isinstance(adapter, LoadedAdapter) and adapter in self._held:
            self._held.move_to_end(adapter)
        return True

    def _read_again(self, adapter: LoadedAdapter) -> None:
        if adapter in self._reading:
            return
        self._reading.add(adapter)

        source, width = adapter.of or adapter, self._parts.weights.width

        def read() -> LowRankAdapter:
            weights = source.weights or self._read(source.path, source.scaling)
            if weights.digest != source.digest:
                raise CheckpointError(f"{source.path} has changed since it was loaded; load it again.")
            if source is adapter:
                return weights
            made = scaled(weights, adapter.scale, width, 4 * width)
            if not made.numbers.isfinite().all():
                kind = str(made.numbers.dtype).removeprefix("torch.")
                raise CheckpointError(f"{adapter.scale} times its numbers is more than {kind} can hold.")
            return made

        def done(weights: LowRankAdapter | None, error: Exception | None) -> None:
            self._reading.discard(adapter)
            if weights is None:
                self._fail(adapter, f"The adapter {adapter.name} could not be read again: {error}")
                return
            adapter.weights = weights
            self._hold(adapter)

        self._run(read, done)

    def _fail(self, adapter: WeightedAdapter, message: str) -> None:
        """What waits for it."""
        for key in {row.key for row in self._parts.scheduler.rows() if row.life.adapter is adapter}:
            self._parts.rows.fail(key, message)

    def _hold(self, adapter: LoadedAdapter) -> None:
        """It is in host memory; others leave that if there is no room for all."""
        self._held[adapter] = None
        size = sum(a.weights.nbytes for a in self._held if a.weights)
        for other in [*self._held]:
            if size <= self._limit or other is adapter:
                break
            size -= other.weights.nbytes if other.weights else 0
            other.weights = None
            del self._held[other]

    def _read(self, path: Path, scaling: Scaling | None) -> LowRankAdapter:
        """On the thread. Raises CheckpointError."""
        runner = self._parts.runner
        adapter = reader.read(path, self._parts.weights)
        return low_rank(
            adapter, self._parts.weights, scaling, self._most_rank, runner.dtype, pins(runner.device)
        )

    def _run(self, work: Callable[[], T], done: Callable[[T | None, Exception | None], None]) -> None:
        """Work on the thread, then `done` inside `poll`."""
        if self._thread is None:
            try:
                self._thread = JobThread("adapters", self._report, CheckpointError)
            except RuntimeError:
                why = Refusal("unavailable", "No thread can be started to read the adapter; try again later.")
                return self._report(partial(done, None, why))
        self._thread.put(work, done)

    def _report(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)
        self._wake()
