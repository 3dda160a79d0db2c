"""The engine: one model, one batch, one slot per row. A step feeds every running row and draws its next
token.

`Engine` is also the offline API:

    engine = Engine("rwkv7-g1-1.5b.pth")
    for result in engine.generate(["User: hi\\n\\nAssistant:"], max_tokens=100):
        print(result.text)
"""

import logging
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import torch

from rwkv_batch.engine import memory, runner
from rwkv_batch.engine.scheduler import QueueFull, Scheduler
from rwkv_batch.engine.sequence import Sequence
from rwkv_batch.engine.turns import Sessions
from rwkv_batch.model import checkpoint
from rwkv_batch.model.rwkv7 import RWKV7
from rwkv_batch.sampling.params import check
from rwkv_batch.state.prefix_cache import PrefixCache
from rwkv_batch.state.store import Store
from rwkv_batch.text.tokenizer import END_OF_TEXT, Tokenizer
from rwkv_batch.wire.protocol import (
    Accepted,
    EngineInfo,
    Event,
    Failed,
    GenerateRequest,
    Progress,
    Rejected,
    RowDelta,
    Sampling,
    SessionCommand,
    TokenLogprob,
)
from state_pool import StatePool

log = logging.getLogger(__name__)

Key = tuple[bytes, str]  # (front end, request id)
OFFLINE = b"offline"
BUNDLED = "rwkv7-demo"  # the model's name when no path is given


@dataclass
class Result:
    """What `Engine.generate` brings for one row."""

    text: str
    tokens: int
    finish_reason: str


@dataclass(frozen=True)
class _Flight:
    """A step under way."""

    fed: list[Sequence]  # all rows that it feeds
    rows: list[Sequence]  # those that draw
    asking: list[int]  # the places, among them, of those that want logprobs
    draws: runner.Draws


class Engine:
    """Continuous batching over one model.

    `model_path`: a checkpoint, its file, or None for the bundled model. `device`: "auto", "cpu", "cuda",
    "cuda:1". `max_rows`: how many rows run at once (None: what fits). `prefill_tokens`: prompt tokens a step
    (None: what suits the device). `wkv`: "fp32" or "fp16", how the recurrent state is stored (None: fp32 on a
    CPU, fp16 on a GPU). `l1`, `l2`, `store`, `durable`: see StatePool. `progress` is told (bytes read, bytes
    in all) while a checkpoint loads; `wake` is called, from any thread, when `busy` may have become true by
    itself. Raises checkpoint.CheckpointError, memory.DeviceError.
    """

    def __init__(
        self,
        model_path: str | Path | checkpoint.Checkpoint | None = None,
        *,
        device: str = "auto",
        max_rows: int | None = None,
        prefill_tokens: int | None = None,
        max_waiting: int = 4096,
        wkv: str | None = None,
        prefix_cache_mb: int = 0,
        l1: int = 0,
        l2: int = 0,
        store: Store | None = None,
        durable: bool = True,
        progress: Callable[[int, int], None] | None = None,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        place = memory.device(device)
        on_gpu = place.type != "cpu"
        if isinstance(model_path, checkpoint.Checkpoint):
            weights = model_path
        else:
            weights = checkpoint.load(model_path, progress) if model_path else _bundled()
        with memory.enough(f"the weights of {weights.name}", place):
            self.model = RWKV7(weights, place, torch.float16 if on_gpu else torch.float32)
        if not on_gpu:
            torch.set_num_threads(memory.threads(self.model))
        wkv_dtype = {"fp16": torch.float16, "fp32": torch.float32}[wkv or ("fp16" if on_gpu else "fp32")]
        self.vocab = weights.vocab
        budget = prefill_tokens or memory.prefill_tokens(self.model)
        rows = memory.rows_that_fit(self.model, wkv_dtype, max_rows, l1, budget)
        self.tokenizer = Tokenizer()
        with memory.enough(f"{rows} rows and {l1} idle sessions", place):
            self.states = self.model.new_states(rows + l1, wkv_dtype)
            self.steps = runner.of(self.model, self.states)
            self.sampler = self.steps.sampler
            self.model.capture(self.states)
            memory.rehearse(self.model, self.states, rows, budget)
        self.scheduler = Scheduler(rows, budget, max_waiting, slots=rows + l1)
        self.prefixes = PrefixCache(prefix_cache_mb << 20)
        self.pool = StatePool(
            self.states,
            weights.fingerprint,
            l1=l1,
            l2=l2,
            store=store,
            durable=durable,
            wake=wake,
            settle=self.steps.settle,
        )
        self.sessions = Sessions(
            self.pool, self.scheduler, self.tokenizer, self._turn_tokens, self._clear, self._emit
        )
        self._events: list[tuple[Key, Event]] = []
        self._flights: deque[_Flight] = deque()  # steps whose draws are not known yet, oldest first
        self.info = EngineInfo(
            model=weights.name,
            layers=weights.layers,
            width=weights.width,
            parameters=weights.parameters,
            dtype=str(self.model.dtype).removeprefix("torch."),
            device=memory.describe(place),
            slots=rows,
            vocabulary=self.vocab,
        )

    @property
    def busy(self) -> bool:
        """Whether `step` would do something. False: nothing to do, or everything waits for the state pool,
        which then calls `wake`.
        """
        return (
            bool(self._events)
            or self.scheduler.runnable
            or any(row.waits for flight in self._flights for row in flight.rows)
        )

    def add(self, key: Key, request: GenerateRequest) -> None:
        """Queue a request. What becomes of it is told by the events that `step` returns, beginning with
        Accepted or Rejected.
        """
        try:
            self._add(key, request)
        except QueueFull as full:
            self._emit(key, Rejected(request.id, "overloaded", f"The server is busy: {full}."))
        except ValueError as error:
            self._emit(key, Rejected(request.id, "invalid", str(error)))

    def command(self, key: Key, command: SessionCommand) -> None:
        """Do something with stored states; `step` returns the answer, at once or later."""
        self.sessions.command(key, command)

    def cancel(self, key: Key) -> None:
        """Drop a request's rows, waiting or running."""
        self._drop(lambda row: row.key == key)

    def cancel_frontend(self, frontend: bytes) -> None:
        """Drop everything a front end has asked for."""
        self._drop(lambda row: row.key[0] == frontend)

    def step(self) -> list[tuple[Key, Event]]:
        """Feed every running row and draw its next token, once. Returns what the front ends are to hear.

        On a GPU what they hear is what the step before has drawn."""
        self.sessions.poll()
        self._admit()
        plan = self.scheduler.plan()
        launched = False
        with self._answering([row for row, _ in plan]):
            if plan:
                self._launch(plan)
                launched = True
        # The device runs this step while its predecessor's text is made and delivered.
        while len(self._flights) > (launched and self.steps.stops_ahead > 0):
            self._land()
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """Store what is not stored yet."""
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
    ) -> list[Result]:
        """Continue every prompt, as many at a time as there are slots. Row i of the result belongs to prompt
        i // n.

        Raises ValueError, naming what the model cannot do.
        """
        request = GenerateRequest(
            id="generate",
            prompts=list(prompts),
            max_tokens=max_tokens,
            n=n,
            stop_ids=list(stop_ids),
            stop_strings=list(stop_strings),
            sampling=sampling or Sampling(),
        )
        self._add((OFFLINE, request.id), request)
        results: dict[int, Result] = {}
        try:
            while self.busy:
                for _, event in self.step():
                    if isinstance(event, Failed):
                        raise RuntimeError(event.message)
                    if isinstance(event, Progress):
                        results |= {
                            d.row: Result(d.text, d.tokens, d.finish_reason or "stop") for d in event.rows
                        }
        finally:
            self.cancel(
                (OFFLINE, request.id)
            )  # after an interrupt, rows of this call must not answer the next one
        return [result for _, result in sorted(results.items())]

    def _add(self, key: Key, request: GenerateRequest) -> None:
        """Raises ValueError or QueueFull; then nothing of the request was queued."""
        check(request.sampling, self.vocab)
        turn, target = request.turn, None
        if turn:
            if len(request.prompts) != 1 or request.n != 1:
                raise ValueError(f"A turn has one prompt, not {len(request.prompts)} times {request.n}.")
            if turn.required and not self.sessions.expects(turn):
                self._emit(key, Rejected(request.id, "not_found", f"There is no session {turn.source}."))
                return
            prompts = [self._turn_tokens(request, self.sessions.expects(turn))]
            target = self.sessions.target(turn)
        else:
            prompts = [self._tokens(prompt, request.lead) for prompt in request.prompts]
        seed = secrets.randbits(63) if request.sampling.seed is None else request.sampling.seed
        rows = [
            Sequence(key, i, prompts[i // request.n], request, seed, target)
            for i in range(len(prompts) * request.n)
        ]
        if request.max_tokens > 0 or turn:
            self.scheduler.add(rows)
        cached = [self._cached(row)[0] for row in rows[:: request.n]]
        self._emit(
            key,
            Accepted(
                request.id, [len(prompt) for prompt in prompts], cached if any(cached) else [], target or ""
            ),
        )
        if request.max_tokens == 0 and not turn:
            self._emit(key, Progress(request.id, [RowDelta(row.row, "", 0, "length") for row in rows]))

    def _turn_tokens(self, request: GenerateRequest, continued: bool) -> list[int]:
        prompt, seam = request.prompts[0], request.turn.seam if request.turn else ""
        if continued and isinstance(prompt, str) and not prompt.startswith(seam):
            prompt = seam + prompt
        return self._tokens(prompt, request.lead)

    def _tokens(self, prompt: str | list[int], lead: list[int]) -> list[int]:
        tokens = lead + (self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
        if tokens and not 0 <= min(tokens) <= max(tokens) < self.vocab:
            foreign = next(token for token in tokens if not 0 <= token < self.vocab)
            raise ValueError(
                f"The prompt holds token {foreign}; this model's tokens are 0 to {self.vocab - 1}."
            )
        return tokens or [END_OF_TEXT]  # an RNN needs something to start from

    def _emit(self, key: Key, event: Event) -> None:
        self._events.append((key, event))

    def _drop(self, unwanted: Callable[[Sequence], bool]) -> None:
        for row in self.scheduler.drop(unwanted):
            self.sessions.abandon(row)

    def _admit(self) -> None:
        fresh = []
        for row in self.scheduler.admit():
            assert row.slot is not None
            if self.sessions.begin(row, row.request.turn) if row.request.turn else self._start(row):
                fresh.append(row.slot)
            if row.slot is not None:  # otherwise its session has gone
                self.steps.begin(row.slot, row.request.sampling, row.seed, row.row, row.request.stop_ids)
                row.foreseen = len(row.request.stop_ids) <= self.steps.stops_ahead and not self._needs_source(
                    row
                )
        self.states.clear(fresh)

    @staticmethod
    def _needs_source(row: Sequence) -> bool:
        """Whether its state could be brought back only from a session that is not the row's to keep: a stop
        string is found when the token after it may have been fed already, and by then somebody may have
        changed or deleted that session.
        """
        turn = row.request.turn
        return turn is not None and bool(row.request.stop_strings) and turn.source not in (None, row.target)

    def _start(self, row: Sequence) -> bool:
        """Whether the row begins with the zero state; otherwise its slot gets that of the longest known
        beginning of the prompt.
        """
        assert row.slot is not None
        row.fed, state = self._cached(row)
        if state is not None:
            self.states.memory[row.slot].copy_(state, non_blocking=True)
        if row.request.prefix_cache:
            row.cuts = self.prefixes.cuts(row.prompt, row.fed)
            self.prefixes.remember(row.prompt)
        return state is None

    def _cached(self, row: Sequence) -> tuple[int, torch.Tensor | None]:
        hit = self.prefixes.longest(row.prompt) if row.request.prefix_cache and not row.request.turn else None
        return cast(tuple[int, torch.Tensor], hit) if hit else (0, None)

    def _clear(self, slot: int) -> None:
        self.steps.settle([slot])
        self.states.clear([slot])

    def _launch(self, plan: list[tuple[Sequence, int]]) -> None:
        """Run or queue a step."""
        tokens = [token for row, count in plan for token in row.next_tokens(count)]
        slots = [row.slot for row, _ in plan if row.slot is not None]
        places = [
            i for i, (row, count) in enumerate(plan) if count >= row.prompt_left and not row.closing
        ]  # not those inside their prompt
        rows = [plan[i][0] for i in places]
        tops = {
            i: row.request.top_logprobs for i, row in enumerate(rows) if row.request.top_logprobs is not None
        }
        draws = self.steps.run(tokens, [count for _, count in plan], slots, places, tops)
        for row, count in plan:
            cut = row.cuts[0] if row.cuts else None
            row.took(count)
            if row.fed == cut and row.slot is not None:
                self.pool.copy_out(row.slot, partial(self.prefixes.put, row.prompt[:cut]))
        for row in rows:
            row.flying += 1
        for row in [row for row, _ in plan if row.closing]:
            self.sessions.closed(row)
        self._flights.append(_Flight([row for row, _ in plan], rows, list(tops), draws))

    def _land(self) -> None:
        """Take what the oldest step under way has drawn to its rows, and their news to the readers."""
        flight = self._flights.popleft()
        with self._answering(
            [row for row in flight.fed if row.slot is not None]
        ):  # the others have been answered, or soon will be
            ids = flight.draws.wait()
            entries = self._entries(flight, ids)
            news: dict[Key, list[RowDelta]] = {}
            for i, (row, token) in enumerate(zip(flight.rows, ids, strict=True)):
                row.flying -= 1
                if not row.waits:  # ended by the draw before, or dropped meanwhile
                    continue
                row.take_drawn(token, self.tokenizer.token_bytes(token), entries.get(i))
                delta = row.take_delta()
                if row.finish_reason and row.request.turn:
                    assert delta
                    self.sessions.end(row, delta)
                    continue
                if delta:
                    news.setdefault(row.key, []).append(delta)
                if row.finish_reason:
                    self.scheduler.release(row)
            for key, deltas in news.items():
                self._emit(key, Progress(key[1], deltas))

    def _entries(self, flight: "_Flight", ids: list[int]) -> dict[int, TokenLogprob]:
        """Logprobs for the rows that want them, by their place."""
        found = flight.draws.logprobs() if flight.asking else []
        return {i: self._entry(ids[i], *of) for i, of in zip(flight.asking, found, strict=True)}

    @contextmanager
    def _answering(self, rows: Iterable[Sequence]) -> Iterator[None]:
        """What goes wrong inside is the end of the requests of these rows, and of nothing else."""
        try:
            yield
        except Exception as error:
            log.exception("a step failed")
            for key in {row.key for row in rows}:
                self.cancel(key)
                self._emit(
                    key, Failed(key[1], f"The engine could not run this request ({type(error).__name__}).")
                )

    def _entry(self, token: int, logprob: float, top: list[tuple[int, float]]) -> TokenLogprob:
        return TokenLogprob(
            self.tokenizer.token_bytes(token), logprob, [(self.tokenizer.token_bytes(t), p) for t, p in top]
        )


def _bundled() -> checkpoint.Checkpoint:
    from demo import unpack

    return checkpoint.from_tensors(BUNDLED, unpack.tensors())
