"""The engine: one model, one batch, one slot per row.

A step feeds every running row and draws its next token.

`Engine` is also the offline API:

    with Engine("rwkv7-g1-1.5b.pth") as engine:
        for result in engine.generate(["User: hi\\n\\nAssistant:"], max_tokens=100):
            print(result.text)
"""

import logging
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from threading import Lock
from typing import Any, Self, Unpack

from rwkv_batch.config import EngineConfig
from rwkv_batch.engine import memory
from rwkv_batch.engine.arrivals import Arrival, Arrivals
from rwkv_batch.engine.commands.dispatch import Commands
from rwkv_batch.engine.constraints.compiling import CompiledGrammar, GrammarQueue
from rwkv_batch.engine.constraints.masks import MaskMaker
from rwkv_batch.engine.loop import StepLoop
from rwkv_batch.engine.memory import WHOLE, MemoryShare
from rwkv_batch.engine.offline import Options, request_of, whole_rows
from rwkv_batch.engine.rows.adapters import Adapters
from rwkv_batch.engine.rows.beginnings import Beginnings
from rwkv_batch.engine.rows.making import RowMaker
from rwkv_batch.engine.rows.parts import EngineParts
from rwkv_batch.engine.rows.rows import Refusal, Rows, could_not_run, failure
from rwkv_batch.engine.rows.stored_turns import Turns
from rwkv_batch.engine.scheduling.counts import EngineCounts
from rwkv_batch.engine.scheduling.prompts import PromptEncoder
from rwkv_batch.engine.scheduling.row import Outbox
from rwkv_batch.engine.scheduling.scheduler import QueueFull, Scheduler
from rwkv_batch.engine.speculation.drafting import drafting_of
from rwkv_batch.engine.startup import describe, open_store, state_pool
from rwkv_batch.model import checkpoint
from rwkv_batch.ops import device as devices
from rwkv_batch.runner.loading import LoadedModel, load_model
from rwkv_batch.runner.protocol import Runner
from rwkv_batch.runner.speculation.draft_loading import load_draft
from rwkv_batch.state.entries import StoreError
from rwkv_batch.state.log.protocol import SessionStore
from rwkv_batch.state.starts.prefix_cache import PrefixCache
from rwkv_batch.text.tokenizer import Tokenizer, tokenizer_of
from rwkv_batch.wire.commands import EngineCommand, PauseRequest, StopRequest
from rwkv_batch.wire.protocol import GenerateRequest, Progress, RequestKey, RowDelta
from state_pool import StatePool

OFFLINE = b"offline"

log = logging.getLogger(__name__)


class Engine:
    """Continuous batching over one model.

    `model`: a checkpoint or its file, or what `load_model` has made of it; None: the configuration's,
    otherwise the bundled model. `options` are fields of EngineConfig, which explains them; a whole `config`
    can be given instead. `store`: the database, in place of the configuration's. `share`: its part of the
    memory. `progress` is called with (bytes read, bytes in all) while a checkpoint loads; `wake` is called,
    from any thread, when `busy` may have become true by itself. Raises checkpoint.CheckpointError,
    device.DeviceError, entries.StoreError.

    With `with` it is closed at the end. One that is dropped is closed by a thread of its own, if the process
    goes on for so long.
    """

    def __init__(
        self,
        model: str | Path | checkpoint.Checkpoint | LoadedModel | None = None,
        *,
        config: EngineConfig | None = None,
        store: SessionStore | None = None,
        share: MemoryShare = WHOLE,
        progress: Callable[[int, int], None] | None = None,
        wake: Callable[[], None] = lambda: None,
        **options: Any,
    ) -> None:
        if config and options:
            raise TypeError(f"Engine() takes config or its fields, not both: {', '.join(options)}")
        config = config or EngineConfig(**options)
        with ExitStack() as on_error:
            # first, as a database that is in use is known at once
            if store is None and (store := open_store(config, share)):
                on_error.callback(store.close)
            loaded = model if isinstance(model, LoadedModel) else load_model(model, config, progress)
            self._begin(loaded, config, store, share, wake)
            on_error.pop_all()

    def _begin(
        self,
        loaded: LoadedModel,
        config: EngineConfig,
        store: SessionStore | None,
        share: MemoryShare,
        wake: Callable[[], None],
    ) -> None:
        weights, runner, draft_model = loaded.weights, loaded.runner, load_draft(loaded, config)
        budget = memory.prompt_tokens(runner, config, share)
        rows, l1 = memory.rows_and_idle_slots(runner, config, budget, share)
        with devices.out_of_memory_as_error(f"{rows} rows and {l1} idle sessions", runner.device):
            runner.allocate(rows, l1, budget, config.capture_late)
        self.step_bytes, self.weight_bytes = memory.step_bytes(runner, rows, l1, budget), loaded.device_bytes
        scheduler, counts = Scheduler(rows, budget, config.max_waiting, slots=rows + l1), EngineCounts()
        tokenizer = tokenizer_of(weights.vocab)
        self.parts = EngineParts(
            weights=weights,
            runner=runner,
            tokenizer=tokenizer,
            prompts=PromptEncoder(tokenizer, weights.vocab),
            scheduler=scheduler,
            counts=counts,
            rows=Rows(scheduler, counts),
            pool=state_pool(loaded, config, share, l1, store, scheduler, wake),
        )
        self.adapters = Adapters(self.parts, config, wake)
        self.grammars = GrammarQueue(weights.vocab, config.max_waiting * tokenizer.has_texts, wake)
        self.masks = MaskMaker(weights.vocab, wake)
        beginnings = Beginnings(PrefixCache(config.prefix_cache_mb << 20), self.parts.pool)
        turns = Turns(self.parts, beginnings)
        self._maker = RowMaker(self.parts, beginnings, turns, self.adapters)
        drafting = drafting_of(self.parts, config, self.masks, draft_model)
        self._loop = StepLoop(self.parts, turns, self.adapters, self.masks, drafting)
        self._generating = Lock()
        self.info = describe(loaded, scheduler, self.pool.options.replay_rate)
        self.commands = Commands(self.parts, turns, self.adapters, self._unqueued)
        self._arrivals = Arrivals(self.parts.pool, self._arrived, self._end)
        self._deferred: list[tuple[RequestKey, StopRequest | PauseRequest]] = []  # until there are rows
        # Its threads do not know it, but they keep the pool, and with it the states.
        self._dropped = weakref.finalize(self, _close_soon, self.adapters, self.pool)
        self._dropped.atexit = False  # threads end with the process

    @property
    def tokenizer(self) -> Tokenizer:
        return self.parts.tokenizer

    @property
    def runner(self) -> Runner:
        return self.parts.runner

    @property
    def scheduler(self) -> Scheduler:
        return self.parts.scheduler

    @property
    def counts(self) -> EngineCounts:
        return self.parts.counts

    @property
    def pool(self) -> StatePool:
        return self.parts.pool

    def attach(self, store: SessionStore | None) -> None:
        """Keep sessions and start states in this database from now on.

        There must be none yet, and no request under way that needs them.
        """
        self.pool.attach(store)
        self.adapters.attach()

    @property
    def busy(self) -> bool:
        """Whether `step` would do something. After False, `wake` is called when that changes by itself."""
        waits = self.parts.rows.pending or self.scheduler.runnable
        return waits or self._loop.awaited or self.grammars.ready

    def waited(self, now: float) -> float:
        """Seconds for which rows have needed a step, and none has ended; now: of time.monotonic."""
        return self.counts.waited(self.scheduler.need_steps(), now)

    @property
    def drained(self) -> bool:
        """Whether everything that was asked for has ended. Steps that nobody waits for may be in flight."""
        waits = self.scheduler.waiting or self.scheduler.running or self.scheduler.queues
        comes = self.grammars.waiting or self._arrivals.waiting or self._deferred
        return not (waits or comes or self.busy)

    def add(self, key: RequestKey, request: GenerateRequest) -> None:
        """Queue a request. `step` returns its events, of which the first is Accepted or Rejected."""
        if not self._arrivals.put(key, request):
            self._arrived(key, request)

    def _add_or_reject(
        self, key: RequestKey, request: GenerateRequest, compiled: CompiledGrammar | None = None
    ) -> None:
        try:
            return self._add(key, request, compiled)
        except StoreError as error:
            return self._end(key, request, error)
        except QueueFull as full:
            why = Refusal("overloaded", f"The server is busy: {full}.")
        except Refusal as refusal:
            why = refusal
        except ValueError as error:
            why = Refusal("invalid", str(error), getattr(error, "field", ""))
        except Exception as error:
            log.exception("a request could not be queued")
            self.counts.requests["failed"] += 1
            return self.parts.rows.fail(key, could_not_run(error))  # with what is queued of it
        self.counts.requests[why.reason] += 1
        self.parts.rows.emit(key, failure(request.id, why))

    def command(self, key: RequestKey, command: EngineCommand) -> None:
        """Do something with stored states or with requests; `step` returns the answer, at once or later."""
        if isinstance(command, StopRequest | PauseRequest) and self._comes(command):
            self._deferred.append((key, command))
        elif not self._arrivals.put(key, command):
            self._arrived(key, command)

    def _unqueued(self) -> list[GenerateRequest]:
        """Requests that are looked up in the database, or whose grammars are compiled: they have no rows."""
        return self._arrivals.requests + self.grammars.requests

    def _comes(self, command: StopRequest | PauseRequest) -> bool:
        return any(request.name == command.name for request in self._unqueued())

    def _run_deferred(self) -> None:
        """Stop and pause what has rows now, or has ended before."""
        if not self._deferred:
            return
        deferred, self._deferred = self._deferred, []
        for key, command in deferred:
            self.command(key, command)

    def _arrived(self, key: RequestKey, arrival: Arrival) -> None:
        """What it needs is known."""
        try:
            if not isinstance(arrival, GenerateRequest):
                self.commands.run(key, arrival)
            elif not self.grammars.put(key, arrival):
                self._add_or_reject(key, arrival)
        except (Refusal, StoreError) as error:
            self._end(key, arrival, error)
        except Exception as error:
            log.exception("a request or command failed")
            self._end(key, arrival, could_not_run(error))
        if isinstance(arrival, GenerateRequest):
            self._run_deferred()

    def _end(self, key: RequestKey, arrival: Arrival, error: str | Exception) -> None:
        """It ends with the error, such as that the database cannot be read."""
        if isinstance(arrival, GenerateRequest):
            self.counts.requests["failed"] += 1
        self.parts.rows.emit(key, failure(arrival.id, error))
        self._run_deferred()

    def cancel(self, key: RequestKey) -> None:
        """Drop a request's rows, waiting or running."""
        self._arrivals.drop(lambda waiting: waiting == key)
        self.grammars.drop(lambda waiting: waiting == key)
        self.parts.rows.drop(lambda row: row.key == key)
        self._run_deferred()

    def stores(self, key: RequestKey) -> bool:
        """Whether it is a turn that is being stored, so that a last event of it comes also if cancelled."""
        return self._loop.stores(key)

    def cancel_frontend(self, frontend: bytes) -> None:
        """Drop everything a front end has asked for."""
        self._arrivals.drop(lambda waiting: waiting[0] == frontend)
        self.grammars.drop(lambda waiting: waiting[0] == frontend)
        self.parts.rows.drop(lambda row: row.key[0] == frontend)
        self._deferred = [(key, command) for key, command in self._deferred if key[0] != frontend]
        self._run_deferred()

    def step(self) -> Outbox:
        """Feed every running row and draw its next token, once. Returns the events for front ends.

        Where steps are queued ahead, the events are those of the step before.
        """
        return [*self.launch(), *self.land()]

    def launch(self) -> Outbox:
        """The first half of a step: have the device begin with it. Returns the events that are ready.

        These need not wait for the device, as `land` does.
        """
        self.pool.poll()
        self.adapters.poll()
        for compiled in self.grammars.take():
            self._add_or_reject(compiled.key, compiled.request, compiled)
        self._run_deferred()
        self._loop.launch()
        return self.parts.rows.take()

    def land(self) -> Outbox:
        """The second half: wait for what has been drawn. Returns the events that come of it.

        The device runs this step meanwhile, if the draws are those of the step before.
        """
        self._loop.land()
        self.commands.requests.poll()
        self.pool.poll()  # the last deltas of turns that were committed meanwhile leave with this step
        return self.parts.rows.take()

    def settle(self) -> Outbox:
        """Wait until nothing is in flight: behind the end of the last row there may be a step without it."""
        self._loop.settle()
        return self.parts.rows.take()

    def collect(self) -> Outbox:
        """Events that are ready, where the step is another engine's."""
        self.pool.poll()
        self.adapters.poll()
        return self.parts.rows.take()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Store what is not stored yet, and end all threads. Idempotent."""
        self._dropped.detach()
        self.grammars.close()
        self.masks.close()
        self.adapters.close()
        self.pool.close()

    def generate(
        self, prompts: Iterable[str | list[int]], *, progress: bool = False, **options: Unpack[Options]
    ) -> list[RowDelta]:
        """Continue any number of prompts, as many at a time as there are slots; the whole text of each row.

        Row i belongs to prompt i // n. progress: with a bar of the rows that have ended. Calls of several
        threads run one after the other. Raises ValueError, naming what the model cannot do, and TypeError.
        """
        request = request_of(prompts, options)
        if not request.prompts:
            return []
        self.parts.prompts.check(request)
        key = OFFLINE, request.id
        with self._generating:
            compiled = self.grammars.compile(key, request) if request.grammar else None
            self._add(key, compiled.request if compiled else request, compiled)
            try:
                steps = (self.step() for _ in iter(lambda: self.busy or self.masks.wait(), False))
                return whole_rows(steps, request.n * len(request.prompts), progress)
            finally:  # after an interrupt, rows of this call must not answer the next one
                self.cancel(key)

    def _add(self, key: RequestKey, request: GenerateRequest, compiled: CompiledGrammar | None) -> None:
        """Raises ValueError, Refusal, QueueFull or StoreError; then nothing of the request was queued."""
        self.commands.requests.check(request)
        rows = self._maker.rows_of(request, key)
        leading = [row for row in rows if row.leads]
        if request.grammar:
            if compiled is None:
                raise QueueFull("too many grammars wait to be compiled")
            for row in leading:
                row.draws.constraint = compiled.constraint()
        firsts, life = leading[:: request.n], leading[0].life
        prompts, cached = [row.prompt for row in firsts], [row.life.cached_tokens(row) for row in firsts]
        runs = request.max_tokens > 0 or life.keeps_state or request.prompt_logprobs is not None
        if runs:
            self.scheduler.add(rows, limited=key[0] != OFFLINE)
        self.counts.accept(rows, prompts, cached)
        made_by = self.info.fingerprint + (f"+{life.adapter.digest}" if life.adapter else "")
        self.parts.rows.emit(key, self.parts.prompts.accepted(request, prompts, cached, life.target, made_by))
        if not runs:
            for row in leading:
                self.parts.rows.answer(row, "length")
            ended = [RowDelta(row.number, "", 0, "length") for row in leading]
            self.parts.rows.emit(key, Progress(request.id, ended))


def _close_soon(adapters: Adapters, pool: StatePool) -> None:
    """Of an engine that nobody has any more: this thread may hold any lock, and waits for nothing."""
    pool.close_soon(adapters.close)
