"""The engine: one model, one batch, one slot per sequence.

A step feeds every running sequence and draws its next token.

`Engine` is also the offline API:

    engine = Engine("rwkv7-g1-1.5b.pth")
    for result in engine.generate(["User: hi\\n\\nAssistant:"], max_tokens=100):
        print(result.text)
"""

import secrets
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

from rwkv_batch.config import EngineConfig
from rwkv_batch.engine import memory
from rwkv_batch.engine.admission import Admission
from rwkv_batch.engine.beginnings import Beginnings, StartStateMissing
from rwkv_batch.engine.commands.dispatch import Commands
from rwkv_batch.engine.commands.requests import RequestCommands
from rwkv_batch.engine.constraints.compiling import CompiledGrammar, GrammarQueue
from rwkv_batch.engine.constraints.masks import MaskMaker
from rwkv_batch.engine.failures import failing
from rwkv_batch.engine.landing import Landing
from rwkv_batch.engine.memory import WHOLE, MemoryShare
from rwkv_batch.engine.mixed_turns import MixedTurns
from rwkv_batch.engine.offline import check_call, whole_rows
from rwkv_batch.engine.rollouts import Rollouts, share_prompts
from rwkv_batch.engine.row_adapters.adapters import AdapterMissing, Adapters
from rwkv_batch.engine.scheduling.counts import EngineCounts
from rwkv_batch.engine.scheduling.pace import Pace
from rwkv_batch.engine.scheduling.prompts import PromptEncoder
from rwkv_batch.engine.scheduling.scheduler import QueueFull, Scheduler
from rwkv_batch.engine.scheduling.sequence import FINALIZING, Outbox, RequestKey, Sequence, rows_of
from rwkv_batch.engine.scheduling.steps import StepInFlight, batch_of
from rwkv_batch.engine.scheduling.turns import Turns
from rwkv_batch.engine.startup import LoadedModel, describe, load_model, open_store, pools
from rwkv_batch.model import checkpoint
from rwkv_batch.ops import device as devices
from rwkv_batch.sampling.params import check, drawable
from rwkv_batch.state.entries import StoreError
from rwkv_batch.state.log.store import Store
from rwkv_batch.state.prefix_cache import PrefixCache
from rwkv_batch.text.tokenizer import END_OF_TEXT, tokenizer_of
from rwkv_batch.wire.commands import EngineCommand
from rwkv_batch.wire.protocol import (
    Failed,
    GenerateRequest,
    Grammar,
    MixturePart,
    Progress,
    Rejected,
    RowDelta,
    Sampling,
)

OFFLINE = b"offline"


class Engine:
    """Continuous batching over one model.

    `model`: a checkpoint or its file, or what `load_model` has made of it; None: the configuration's,
    otherwise the bundled model. `options` are fields of EngineConfig, which explains them; a whole `config`
    can be given instead. `store`: the database, in place of the configuration's. `share`: its part of the
    memory. `progress` is called with (bytes read, bytes in all) while a checkpoint loads; `wake` is called,
    from any thread, when `busy` may have become true by itself. Raises checkpoint.CheckpointError,
    device.DeviceError, entries.StoreError.
    """

    def __init__(
        self,
        model: str | Path | checkpoint.Checkpoint | LoadedModel | None = None,
        *,
        config: EngineConfig | None = None,
        store: Store | None = None,
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
            self._allocate(loaded, config, share, wake)
            self._open(store)
            on_error.pop_all()

    def _allocate(
        self, loaded: LoadedModel, config: EngineConfig, share: MemoryShare, wake: Callable[[], None]
    ) -> None:
        self.weights, self.runner, self.vocab = loaded.weights, loaded.runner, loaded.weights.vocab
        budget = memory.prompt_tokens(self.runner, config, share)
        rows, l1 = memory.rows_and_idle_slots(self.runner, config, budget, share)
        with devices.out_of_memory_as_error(f"{rows} rows and {l1} idle sessions", self.runner.device):
            self.runner.allocate(rows, l1, budget, config.capture_late)
        self.step_bytes = memory.step_bytes(self.runner, rows, l1, budget)
        self.tokenizer = tokenizer_of(self.vocab)
        self.scheduler = Scheduler(rows, budget, config.max_waiting, slots=rows + l1)
        rate = memory.prefill_rate(self.runner, budget)
        free, spare = self.scheduler.free, self.scheduler.spare
        self._new_pool = pools(loaded, config, share, l1, rate, wake=wake, free=free, spare=spare)
        self._prefixes = PrefixCache(config.prefix_cache_mb << 20)
        self.prompts = PromptEncoder(self.tokenizer, self.vocab)
        self.outbox: Outbox = []
        self.counts, self.weight_bytes = EngineCounts(), loaded.device_bytes
        parts = self.weights, self.runner, self.scheduler
        self.adapters = Adapters(*parts, config, self.outbox, partial(self.cancel, reason="error"), wake)
        self.grammars = GrammarQueue(self.vocab, config.max_waiting * self.tokenizer.has_texts, wake)
        self.masks = MaskMaker(self.vocab, wake)
        self._in_flight: deque[StepInFlight] = deque()  # oldest first
        self._pace = Pace(self.runner.most_steps)
        self._queued = 0  # of them, those that `land` leaves
        self._generating = Lock()
        self.info = describe(loaded, rows)

    def attach(self, store: Store | None) -> None:
        """Keep sessions and start states in this database from now on.

        There must be none yet, and no request under way that needs them.
        """
        self.pool.close()
        self.counts.of_pools += self.pool.counted
        self._open(store)

    def _open(self, store: Store | None) -> None:
        self.pool, states = self._new_pool(store), self.runner.states
        self.adapters.attach(self.pool)
        self.beginnings = Beginnings(self._prefixes, self.pool)
        parts = self.tokenizer, self.prompts, self.beginnings.begin, states
        self.turns = Turns(self.pool, self.scheduler, *parts, self.outbox, self.counts)
        common = self.pool, self.scheduler, self.turns, self.outbox
        self.mixed_turns = MixedTurns(*common, self.beginnings, states, partial(self._drop, reason="error"))
        self.rollouts = Rollouts(states, self.pool.copies)
        begins = self.adapters, self.masks, self.beginnings, self.rollouts, self.mixed_turns
        ends = self.outbox, self.cancel, self.counts
        taken = self.scheduler, self.mixed_turns, self.masks, self.tokenizer
        self.landing = Landing(*taken, *ends)
        self.admission = Admission(self.scheduler, self.runner, *begins, *ends)
        self._failing = partial(failing, self.turns, self.cancel, self.outbox)
        self.requests = RequestCommands(*common, self._drop, self.info.fingerprint, self.counts)
        self.commands = Commands(*common, self.requests, self.adapters, self.tokenizer, self.weights)

    @property
    def busy(self) -> bool:
        """Whether `step` would do something. After False, `wake` is called when that changes by itself."""
        awaited = any(seq.generating for step in self._in_flight for seq in step.drawing)
        return bool(self.outbox) or self.scheduler.runnable or awaited or self.grammars.ready

    @property
    def drained(self) -> bool:
        """Whether everything that was asked for has ended. Steps that nobody waits for may be in flight."""
        waits = self.scheduler.waiting or self.scheduler.running or self.scheduler.queues
        return not (waits or self.grammars.waiting or self.busy)

    def add(self, key: RequestKey, request: GenerateRequest) -> None:
        """Queue a request. `step` returns its events, of which the first is Accepted or Rejected."""
        if not self.grammars.put(key, request):
            self._add_or_reject(key, request)

    def _add_or_reject(
        self, key: RequestKey, request: GenerateRequest, compiled: CompiledGrammar | None = None
    ) -> None:
        try:
            self._add(key, request, compiled)
        except QueueFull as full:
            self._reject(key, "overloaded", f"The server is busy: {full}.")
        except ValueError as error:
            reason = "not_found" if isinstance(error, StartStateMissing | AdapterMissing) else "invalid"
            self._reject(key, reason, error)
        except StoreError as error:
            self.counts.requests["failed"] += 1
            self.outbox.append((key, Failed(request.id, str(error))))

    def command(self, key: RequestKey, command: EngineCommand) -> None:
        """Do something with stored states or with requests; `step` returns the answer, at once or later."""
        try:
            self.commands.run(key, command)
        except StoreError as error:
            self.outbox.append((key, Failed(command.id, str(error))))

    def cancel(self, key: RequestKey, reason: str = "abort") -> None:
        """Drop a request's sequences, waiting or running. reason: for the metrics."""
        self.grammars.drop(lambda waiting: waiting == key)
        self._drop(lambda seq: seq.key == key, reason)

    def cancel_frontend(self, frontend: bytes) -> None:
        """Drop everything a front end has asked for."""
        self.grammars.drop(lambda waiting: waiting[0] == frontend)
        self._drop(lambda seq: seq.key[0] == frontend)

    def step(self) -> Outbox:
        """Feed every running sequence and draw its next token, once. Returns the events for front ends.

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
        self.admission.admit()
        plan = self.scheduler.plan()
        self._queued = 0
        with self._failing([seq for seq, _ in plan]):
            if plan:
                self._launch(plan)
                self._queued = 1 if self.runner.run_ahead_stop_ids else 0
        return self._events()

    def land(self) -> Outbox:
        """The second half: wait for what has been drawn. Returns the events that come of it.

        The device runs this step meanwhile, if the draws are those of the step before.
        """
        while len(self._in_flight) > self._queued:
            self._land()
        self.requests.poll()
        if self._in_flight and self._in_flight[0].draw:  # now what its rows have drawn before is known
            with self._failing((step := self._in_flight.pop()).fed):
                step.draw_under(self.masks)
                self._in_flight.append(step)
        self.pool.poll()  # the last deltas of turns that were committed meanwhile leave with this step
        return self._events()

    def settle(self) -> Outbox:
        """Wait until nothing is in flight: behind the end of the last row there may be a step without it."""
        self._queued = 0
        return self.land()

    def collect(self) -> Outbox:
        """Events that are ready, where the step is another engine's."""
        self.pool.poll()
        self.adapters.poll()
        return self._events()

    def _events(self) -> Outbox:
        events = self.outbox.copy()
        self.outbox.clear()
        return events

    def close(self) -> None:
        """Store what is not stored yet."""
        self.grammars.close()
        self.masks.close()
        self.adapters.close()
        self.pool.close()

    def generate(
        self,
        prompts: Iterable[str | list[int]],
        *,
        max_tokens: int = 256,
        stop_ids: Iterable[int] = (END_OF_TEXT,),
        stop_strings: Iterable[str] = (),
        sampling: Sampling | None = None,
        n: int = 1,
        start_state: str = "",
        mixture: Iterable[MixturePart] = (),
        adapter: str = "",
        grammar: Grammar | None = None,
        progress: bool = False,
    ) -> list[RowDelta]:
        """Continue any number of prompts, as many at a time as there are slots; the whole text of each row.

        Row i belongs to prompt i // n. progress: with a bar of the rows that have ended. Calls of several
        threads run one after the other. Raises ValueError, naming what the model cannot do.
        """
        check_call(prompts, stop_strings, n)
        request = GenerateRequest(
            id="generate",
            prompts=list(prompts),
            max_tokens=max_tokens,
            n=n,
            stop_ids=list(stop_ids),
            stop_strings=list(stop_strings),
            sampling=sampling or Sampling(),
            start_state=start_state,
            mixture=list(mixture),
            adapter=adapter,
            grammar=grammar,
        )
        if not request.prompts:
            return []
        self.prompts.check(request)
        key = OFFLINE, request.id
        with self._generating:
            compiled = self.grammars.compile(key, request) if grammar else None
            self._add(key, compiled.request if compiled else request, compiled)
            try:
                steps = (self.step() for _ in iter(lambda: self.busy or self.masks.wait(), False))
                return whole_rows(steps, n * len(request.prompts), progress)
            finally:  # after an interrupt, rows of this call must not answer the next one
                self.cancel(key)

    def _add(self, key: RequestKey, request: GenerateRequest, compiled: CompiledGrammar | None) -> None:
        """Raises ValueError or QueueFull; then nothing of the request was queued."""
        check(request.sampling, drawable(self.vocab))
        self.requests.check(request)
        self.beginnings.check(request)
        self.prompts.check(request)
        turn, target, continued = request.turn, None, False
        if turn:
            continued = self.turns.has_source(turn)
            if turn.required and not continued:
                return self._reject(key, "not_found", f"There is no session {turn.source}.")
            prompts = [self.prompts.encode_turn(request, continued)]
            target = self.turns.choose_target(turn)
        else:
            prompts = [self.prompts.encode(prompt, request.prefix_ids) for prompt in request.prompts]
        seed = secrets.randbits(63) if request.sampling.seed is None else request.sampling.seed
        rows = rows_of(request, key, prompts, seed, target, self.tokenizer)
        self.adapters.for_rows(request, rows)
        if turn and (refusal := self.turns.refusal(turn, rows[0].adapter)):
            return self._reject(key, "conflict", refusal)
        share_prompts(rows, request.n)
        leading = [row for row in rows if row.leads]
        if request.grammar:
            if compiled is None:
                raise QueueFull("too many grammars wait to be compiled")
            for row in leading:
                row.bind(compiled.constraint())
        goes_on = turn and (continued or rows[0].start_state)
        cached = [0 if goes_on else self.beginnings.cached_tokens(row) for row in leading[:: request.n]]
        runs = request.max_tokens > 0 or turn or request.prompt_logprobs is not None
        if runs:
            self.scheduler.add(rows, limited=key[0] != OFFLINE)
        self.counts.accept(rows, prompts, cached)
        made_by = self.info.fingerprint + (f"+{rows[0].adapter.digest}" if rows[0].adapter else "")
        self.outbox.append((key, self.prompts.accepted(request, prompts, cached, target, made_by)))
        if not runs:
            ended = [RowDelta(row.row, "", 0, "length") for row in leading]
            self.outbox.append((key, Progress(request.id, ended)))
            self.counts.drop(leading, "length")

    def _reject(self, key: RequestKey, reason: str, why: object) -> None:
        self.counts.requests[reason] += 1
        self.outbox.append((key, Rejected(key[1], reason, str(why), getattr(why, "field", ""))))

    def _drop(self, unwanted: Callable[[Sequence], bool], reason: str = "abort") -> None:
        doomed = [seq for seq in self.scheduler.sequences() if unwanted(seq)]
        self.counts.drop([seq for seq in doomed if not self.turns.ended(seq)], reason)
        for seq in self.scheduler.drop(unwanted):
            self.turns.abandon(seq)

    def _launch(self, plan: list[tuple[Sequence, int]]) -> None:
        """Run or queue a step."""
        self.turns.save()
        finalizing = [seq for seq, count in plan if seq.state is FINALIZING and seq.tokens_left == count]
        batch, drawing = batch_of(plan, self.adapters.slots_of(seq for seq, _ in plan))
        if (steps := self._pace.steps_of(batch, drawing, self.scheduler.running.values())) > 1:
            batch = replace(batch, steps=steps)
        bound = any(seq.constraint for seq in drawing)
        draws, draw = (None, self.runner.feed(batch)) if bound else (self.runner.run(batch), None)
        marks = self.counts.launch(plan, batch, drawing)
        scored = [(plan[i][0], row) for i, row in batch.scored.items()]
        for seq, count in plan:
            cut = seq.cuts[0] if seq.cuts else None
            seq.advance(count * steps)
            if cut is not None and seq.fed == cut and seq.slot is not None:
                self.beginnings.keep(seq, cut)
                self.rollouts.reached(seq)
        for seq in drawing:
            seq.in_flight += steps
        if finalizing:
            self.turns.finalize(finalizing)
        self._in_flight.append(
            StepInFlight(
                [seq for seq, _ in plan], drawing, list(batch.top_logprobs), marks, scored, draws, draw
            )
        )

    def _land(self) -> None:
        """Give the draws of the oldest step in flight to its sequences, and emit their deltas."""
        step = self._in_flight.popleft()
        # The others have been answered, or will be by the state pool.
        with self._failing([seq for seq in step.fed if seq.slot is not None]):
            draws = step.draw_under(self.masks)
            self._pace.wait()
            ids = draws.wait()
            self._pace.land(step.marks.steps)
            self.landing.take(step, ids)
