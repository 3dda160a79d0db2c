"""The engine: one model, one batch, one slot per row. A step feeds every running row and draws its next token.

`Engine` is also the offline API:

    engine = Engine("rwkv7-g1-1.5b.pth")
    for result in engine.generate(["User: hi\\n\\nAssistant:"], max_tokens=100):
        print(result.text)
"""
import logging
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from rwkv_batch import checkpoint, memory
from rwkv_batch.protocol import EngineInfo, GenerateRequest, RowDelta, Sampling, TokenLogprob
from rwkv_batch.rwkv7 import RWKV7
from rwkv_batch.sampling import Sampler, logprobs
from rwkv_batch.scheduler import Scheduler
from rwkv_batch.sequence import Sequence
from rwkv_batch.tokenizer import END_OF_TEXT, Tokenizer

log = logging.getLogger(__name__)

Key = tuple[bytes, str]  # (front end, request id)
OFFLINE = b"offline"
BUNDLED = "rwkv7-demo"   # the model's name when no path is given


@dataclass(frozen=True)
class StepFailure:
    """These requests cannot go on."""

    keys: set[Key]
    message: str


@dataclass
class Result:
    """What `Engine.generate` brings for one row."""

    text: str
    tokens: int
    finish_reason: str


class Engine:
    """Continuous batching over one model.

    `model_path`: a checkpoint, or None for the bundled model. `device`: "auto", "cpu", "cuda", "cuda:1". `max_rows`:
    how many rows run at once (None: what fits). `prefill_tokens`: prompt tokens a step (None: what suits the device).
    `wkv`: "fp32" or "fp16", how the recurrent state is stored (None: fp32 on a CPU, fp16 on a GPU).
    `progress` is told (bytes read, bytes in all) while a checkpoint loads. Raises checkpoint.CheckpointError.
    """

    def __init__(self, model_path: str | Path | None = None, *, device: str = "auto", max_rows: int | None = None,
                 prefill_tokens: int | None = None, max_waiting: int = 4096, wkv: str | None = None,
                 progress: Callable[[int, int], None] | None = None) -> None:
        place = memory.device(device)
        on_gpu = place.type != "cpu"
        weights = checkpoint.load(model_path, progress) if model_path else _bundled()
        self.model = RWKV7(weights, place, torch.float16 if on_gpu else torch.float32)
        if not on_gpu:
            torch.set_num_threads(memory.threads(self.model))
        wkv_dtype = {"fp16": torch.float16, "fp32": torch.float32}[wkv or ("fp16" if on_gpu else "fp32")]
        rows = max_rows or memory.rows_that_fit(self.model, wkv_dtype)
        self.states = self.model.new_states(rows, wkv_dtype)
        self.tokenizer = Tokenizer()
        self.vocab = weights.vocab
        self.sampler = Sampler(rows, self.vocab, place)
        self.scheduler = Scheduler(rows, prefill_tokens or memory.prefill_tokens(self.model), max_waiting)
        self.info = EngineInfo(
            model=weights.name, layers=weights.layers, width=weights.width, parameters=weights.parameters,
            dtype=str(self.model.dtype).removeprefix("torch."), device=memory.describe(place), slots=rows, vocabulary=self.vocab)

    @property
    def busy(self) -> bool:
        return self.scheduler.busy

    def add(self, key: Key, request: GenerateRequest) -> tuple[list[int], list[RowDelta]]:
        """Queue a request. Returns the tokens of each prompt, and the deltas of rows that ended before they began.

        Raises ValueError, naming what this model cannot do, or scheduler.QueueFull; then nothing of it was queued.
        """
        prompts = [self._tokens(prompt, request.lead) for prompt in request.prompts]
        self.sampler.check(request.sampling)
        counts = [len(prompt) for prompt in prompts]
        seed = secrets.randbits(63) if request.sampling.seed is None else request.sampling.seed
        rows = [Sequence(key, i, prompts[i // request.n], request, seed) for i in range(len(prompts) * request.n)]
        if request.max_tokens == 0:
            return counts, [RowDelta(row.row, "", 0, "length") for row in rows]
        self.scheduler.add(rows)
        return counts, []

    def cancel(self, key: Key) -> None:
        """Drop a request's rows, waiting or running."""
        self.scheduler.drop(lambda row: row.key == key)

    def cancel_frontend(self, frontend: bytes) -> None:
        """Drop everything a front end has asked for."""
        self.scheduler.drop(lambda row: row.key[0] == frontend)

    def step(self) -> tuple[dict[Key, list[RowDelta]], StepFailure | None]:
        """Feed and draw once. Returns each request's news, and the requests that failed, whose rows are gone."""
        self._admit()
        plan = self.scheduler.plan()
        try:
            return self._run(plan), None
        except Exception as error:
            log.exception("a step of %d rows failed", len(plan))
            keys = {row.key for row, _ in plan}
            self.scheduler.drop(lambda row: row.key in keys)
            return {}, StepFailure(keys, f"The engine could not run this request ({type(error).__name__}).")

    def generate(self, prompts: Iterable[str | list[int]], *, max_tokens: int = 256, stop_ids: Iterable[int] = (END_OF_TEXT,),
                 stop_strings: Iterable[str] = (), sampling: Sampling | None = None, n: int = 1) -> list[Result]:
        """Continue every prompt, as many at a time as there are slots. Row i of the result belongs to prompt i // n."""
        request = GenerateRequest(id="generate", prompts=list(prompts), max_tokens=max_tokens, n=n, stop_ids=list(stop_ids),
                                  stop_strings=list(stop_strings), sampling=sampling or Sampling())
        key = (OFFLINE, request.id)
        _, ended = self.add(key, request)
        deltas = {delta.row: delta for delta in ended}
        while self.busy:
            news, failure = self.step()
            if failure:
                raise RuntimeError(failure.message)
            deltas.update((delta.row, delta) for delta in news.get(key, []))
        return [Result(d.text, d.tokens, d.finish_reason or "stop") for _, d in sorted(deltas.items())]

    def _tokens(self, prompt: str | list[int], lead: list[int]) -> list[int]:
        tokens = lead + (self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
        foreign = next((token for token in tokens if not 0 <= token < self.vocab), None)
        if foreign is not None:
            raise ValueError(f"The prompt holds token {foreign}; this model's tokens are 0 to {self.vocab - 1}.")
        return tokens or [END_OF_TEXT]  # an RNN needs something to start from

    def _admit(self) -> None:
        admitted = self.scheduler.admit()
        self.states.clear([row.slot for row in admitted if row.slot is not None])
        for row in admitted:
            assert row.slot is not None
            self.sampler.set_row(row.slot, row.request.sampling, row.seed, row.row)

    def _run(self, plan: list[tuple[Sequence, int]]) -> dict[Key, list[RowDelta]]:
        tokens = [token for row, count in plan for token in row.next_tokens(count)]
        slots = [row.slot for row, _ in plan if row.slot is not None]
        draws = [i for i, (row, count) in enumerate(plan) if count >= row.prompt_left]  # not those inside their prompt
        logits = self.model.forward(torch.tensor(tokens), [count for _, count in plan], slots, self.states, draws)
        for row, count in plan:
            row.fed += min(count, row.prompt_left)
        return self._draw([plan[i][0] for i in draws], logits) if draws else {}

    def _draw(self, rows: list[Sequence], logits: torch.Tensor) -> dict[Key, list[RowDelta]]:
        asking = [i for i, row in enumerate(rows) if row.request.top_logprobs is not None]
        untouched = logits[asking].clone() if asking else logits  # the sampler writes into its own
        ids = self.sampler.sample(logits, [row.slot for row in rows if row.slot is not None])
        entries: dict[int, TokenLogprob] = {}
        if asking:
            tops = [rows[i].request.top_logprobs or 0 for i in asking]
            found = logprobs(untouched, [ids[i] for i in asking], tops)
            entries = {i: self._entry(ids[i], *of) for i, of in zip(asking, found, strict=True)}
        news: dict[Key, list[RowDelta]] = {}
        for i, (row, token) in enumerate(zip(rows, ids, strict=True)):
            row.take_drawn(token, self.tokenizer.token_bytes(token), entries.get(i))
            delta = row.take_delta()
            if delta:
                news.setdefault(row.key, []).append(delta)
            if row.finish_reason:
                self.scheduler.release(row)
        return news

    def _entry(self, token: int, logprob: float, top: list[tuple[int, float]]) -> TokenLogprob:
        return TokenLogprob(self.tokenizer.token_bytes(token), logprob, [(self.tokenizer.token_bytes(t), p) for t, p in top])


def _bundled() -> checkpoint.Checkpoint:
    from demo import unpack

    return checkpoint.from_tensors(BUNDLED, unpack.tensors())
