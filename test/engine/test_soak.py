"""A crowd at the engine: random arrivals, cancellations and turns of sessions. Nothing is lost, and every
text is the one it gives alone.

Alone and in a crowd, a row's sums are taken in another order, so logits differ in their last digits. A text
may therefore part from the one it gives alone, but only at a near-tie, which is decided by the logits alone
at the first token that differs: a greedy row's two likeliest tokens are closer than `TIE`, or a seeded row's
random number draws the crowd's token from logits whose differences are off by no more than that.
"""

import gc
import random
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from ahead import LateRunner
from cuda_gpu import needs_gpu
from engine_driver import free_slots
from exact import exact
from msgspec.structs import replace

from demo.training.evaluate import samples
from rwkv_batch.engine.engine import Engine
from rwkv_batch.ops.random import random_key, uniforms
from rwkv_batch.runner import backends
from rwkv_batch.runner.cuda_runner import CUDA_MODELS
from rwkv_batch.runner.staged_runner import StagedRunner
from rwkv_batch.state.log.store import Store
from rwkv_batch.state.staged import StagedStates
from rwkv_batch.text.tokenizer import END_OF_TEXT, VOCABULARY
from rwkv_batch.wire.commands import DeleteSession
from rwkv_batch.wire.protocol import (
    Accepted,
    CommandReply,
    GenerateRequest,
    Progress,
    RowDelta,
    Sampling,
    SessionTurn,
)

pytestmark = pytest.mark.thorough

# Of differences of logits. fp16 numbers from 32 to 64 are 1/32 apart: two logits, each rounded otherwise.
TIE = {torch.float16: 0.06, torch.float32: 4e-4}
ROUNDING = 1e-6  # of sums of probabilities in fp32
NEAR_TIES = 0.05  # of all texts, at most
CROWD = b"crowd"
SEPARATOR = "\n\n"
SYSTEM = (
    "System: " + "You answer in short sentences and never forget a name. " * 8 + "\n\n"
)  # a beginning that prompts share
REMARKS = [
    "User: My name is Anna.\n\nAssistant:",
    "User: What is my name?\n\nAssistant:",
    "User: What is 7 + 5?\n\nAssistant:",
    "User: What is the capital of France?\n\nAssistant:",
    "User: I live in Paris.\n\nAssistant:",
]
SEEDED = [
    Sampling(temperature=1.0, top_p=0.9),
    Sampling(temperature=1.3, top_k=40),
    Sampling(temperature=1.0),
    Sampling(method="nucleus", temperature=1.2, top_k=30),
]
LOOSE = Sampling(
    temperature=1.5, alpha_presence=0.3, alpha_frequency=0.2, logit_bias=dict.fromkeys(range(100, 400), -2.0)
)


@dataclass(eq=False)
class Job:
    """A request, what has come of it, and for a turn the jobs of its session that its state had seen."""

    request: GenerateRequest
    cancel_at: int | None  # so many steps after it came
    came: int = 0
    text: dict[int, str] = field(default_factory=dict)
    drawn: dict[int, list[int]] = field(default_factory=dict)
    ends: dict[int, str] = field(default_factory=dict)
    cancelled: bool = False
    before: list["Job"] | None = None

    @property
    def done(self) -> bool:
        return len(self.ends) == len(self.request.prompts) * self.request.n


class Crowd:
    """Drives one engine by one thread, as its service does."""

    def __init__(self, rows: int, l1: int, store: Path, **options) -> None:
        self.woken = threading.Event()
        self.rows, self.slots = rows, rows + l1
        self.engine = Engine(
            max_rows=rows, l1=l1, l2=4, prefix_cache_mb=64, store=Store(store), wake=self.woken.set, **options
        )
        self.ids = {
            self.engine.tokenizer.token_bytes(token): token for token in range(VOCABULARY)
        }  # END_OF_TEXT has none
        self.jobs: dict[str, Job] = {}
        self.sessions: dict[str, list[Job]] = {}  # turns that are stored, in order
        self.replies: list[CommandReply] = []
        self.steps = 0
        self.fullest = 0

    def step(self) -> None:
        """One step of the engine, or a wait until it has something to do."""
        if not self.engine.busy:
            assert self.woken.wait(120), "the engine waits for nothing"
        self.woken.clear()
        self.steps += 1
        for (_, name), event in self.engine.step():
            if isinstance(event, Progress):
                self.take(self.jobs[name], event.rows)
            elif isinstance(event, CommandReply):
                self.replies.append(event)
            else:
                assert isinstance(event, Accepted), event
        self.fullest = max(self.fullest, len(self.engine.scheduler.running))

    def take(self, job: Job, deltas: list[RowDelta]) -> None:
        for delta in deltas:
            assert delta.row not in job.ends, "text after the end"
            job.text[delta.row] = job.text.get(delta.row, "") + delta.text
            job.drawn.setdefault(delta.row, []).extend(self.ids[entry.token] for entry in delta.logprobs)
            if delta.finish_reason:
                job.ends[delta.row] = delta.finish_reason
        turn = job.request.turn
        if turn and job.done:
            stored = self.sessions.setdefault(turn.target, [])
            job.before = list(stored)
            stored.append(job)

    def add(self, job: Job) -> Job:
        job.came = self.steps
        self.jobs[job.request.id] = job
        self.engine.add((CROWD, job.request.id), job.request)
        return job

    def run(self, jobs: list[Job], rng: random.Random) -> None:
        """Let them come in bursts, cancel those that are to be, and wait for the rest."""
        waiting, here = list(reversed(jobs)), []
        while waiting or here:
            room = 2 * self.rows - sum(len(job.request.prompts) * job.request.n for job in here)
            for _ in range(min(rng.choice([0, 0, 1, 2, max(1, self.rows // 4)]), room, len(waiting))):
                here.append(self.add(waiting.pop()))
            for job in here:
                if job.cancel_at is not None and self.steps - job.came >= job.cancel_at and not job.done:
                    self.engine.cancel((CROWD, job.request.id))
                    job.cancelled = True
            here = [job for job in here if not job.done and not job.cancelled]
            if here or self.engine.busy:
                self.step()
        scheduler = self.engine.scheduler
        while self.engine.busy or scheduler.waiting or scheduler.running or scheduler.queues:
            self.step()

    def alone(self, request: GenerateRequest) -> Job:
        """Run a request with no other beside it."""
        job = self.add(Job(request, None))
        while not job.done:
            self.step()
        return job

    def forget(self) -> None:
        """Delete every session, and let go what the sampler keeps of the last row of each slot."""
        for name in self.sessions:
            self.engine.command((CROWD, name), DeleteSession(id=name, key=name))
        while len(self.replies) < len(self.sessions):
            self.step()
        for slot in range(self.slots):
            self.engine.runner.sampler.begin(slot, Sampling(), 0, 0)


def some_jobs(count: int, sessions: int, rng: random.Random) -> list[Job]:
    """Half of them plain prompts, half turns; greedy, seeded, and some that nothing is known of but that they
    end.
    """
    prompts = [sample.prompt for sample in samples()]
    jobs = []
    for number in range(count):
        kind = rng.random()
        sampling = Sampling(temperature=0)
        if kind > 0.5:
            base = SEEDED[number % len(SEEDED)]
            sampling = replace(base, seed=rng.randrange(1 << 60))
        turn, n, texts = None, 1, [rng.choice(prompts)]
        if number % 2:
            session = f"s{rng.randrange(sessions)}"
            texts, turn = (
                [rng.choice(REMARKS)],
                SessionTurn(source=session, target=session, separator=SEPARATOR),
            )
        else:
            n = rng.choice([1, 1, 1, 3])
            texts = [rng.choice(["", "", SYSTEM]) + rng.choice(prompts) for _ in range(rng.choice([1, 1, 2]))]
            if kind < 0.05:
                sampling = LOOSE
        request = GenerateRequest(
            id=f"job{number}",
            prompts=texts,
            n=n,
            max_tokens=rng.choice([3, 8, 16, 24]),
            sampling=sampling,
            turn=turn,
            stop_ids=rng.choice([[], [END_OF_TEXT], [END_OF_TEXT, 24281]]),
            flush_tokens=rng.choice([0, 1, 5]),
            top_logprobs=0,
            stop_strings=["Paris", " is"]
            if turn is None and sampling.temperature <= 0 and rng.random() < 0.3
            else [],
        )
        jobs.append(Job(request, rng.randrange(25) if rng.random() < 0.15 else None))
    return jobs


def prompts_of(crowd: Crowd, job: Job) -> list[list[int]]:
    """What the state of each prompt's rows had seen when their first token was drawn."""
    encode = crowd.engine.tokenizer.encode
    if job.before is None:
        return [encode(prompt) for prompt in job.request.prompts]
    tokens: list[int] = []
    for turn in job.before:
        tokens += encode((SEPARATOR if tokens else "") + turn.request.prompts[0]) + turn.drawn[0]
    return [tokens + encode((SEPARATOR if tokens else "") + job.request.prompts[0])]


def check(crowd: Crowd, jobs: list[Job]) -> Counter:
    """Compare all that ended with what they give alone; returns how many there were of what."""
    count: Counter[str] = Counter()
    for job in jobs:
        count["cancelled"] += not job.done
        assert job.done or job.cancelled
        if job.done and job.request.sampling is not LOOSE:
            count["turns on turns"] += bool(job.before)
            compare(crowd, job, count)
    return count


def compare(crowd: Crowd, job: Job, count: Counter) -> None:
    prompts = prompts_of(crowd, job)
    alone = crowd.alone(
        replace(
            job.request,
            id=f"{job.request.id} alone",
            prompts=prompts,
            turn=None,
            flush_tokens=0,
            prefix_cache=False,
        )
    )
    for row, text in job.text.items():
        count["texts"] += 1
        if (alone.text[row], alone.ends[row]) == (text, job.ends[row]):
            continue
        count["near-ties"] += 1
        together, apart = job.drawn[row], alone.drawn[row]
        first = next(
            (i for i, (a, b) in enumerate(zip(together, apart, strict=False)) if a != b),
            min(len(together), len(apart)),
        )
        fed, drawn = (
            prompts[row // job.request.n] + together[:first],
            together[first : first + 1] or job.request.stop_ids,
        )
        assert near_tie(crowd.engine, fed, drawn, job.request, row, first), (
            f"{job.request.id}, row {row}: {text!r} in the crowd, {alone.text[row]!r} alone"
        )


def near_tie(
    engine: Engine, fed: list[int], drawn: list[int], request: GenerateRequest, row: int, position: int
) -> bool:
    """Whether the logits after `fed` let that row just as well have `drawn`, or one of them, as what it draws
    alone.
    """
    runner, sampling = engine.runner, request.sampling
    model = runner.model
    if isinstance(runner, StagedRunner):  # under --gpu-stages; it has no states but its own
        model = CUDA_MODELS[model.checkpoint.family](model.checkpoint, runner.device)
    held = engine.runner.states
    of_stage = held.parts[0] if isinstance(held, StagedStates) else held
    states = model.new_states(1, of_stage.wkv.dtype)
    logits = model.forward(torch.tensor(fed), [len(fed)], [0], states)[0, :VOCABULARY]
    if sampling.temperature <= 0:
        likeliest = logits.double().log_softmax(0).topk(2).values
        return float(likeliest[0] - likeliest[1]) < TIE[model.dtype]
    number = float(uniforms(np.array([random_key(sampling.seed, row)]), np.array([position], np.uint64))[0])
    ranges = [drawing(token, logits.double().cpu().numpy(), sampling, TIE[model.dtype]) for token in drawn]
    return any(low - ROUNDING <= number <= high + ROUNDING for low, high in ranges)


def drawing(token: int, logits: np.ndarray, sampling: Sampling, tie: float) -> tuple[float, float]:
    """The least and the greatest random number that draws the token, if differences of logits may be off by
    `tie`.
    """
    ids = np.arange(len(logits))
    low = exact(logits + tie * (ids >= token), sampling)[:token].sum()
    high = exact(logits + tie * (ids <= token), sampling)[: token + 1].sum()
    return float(low), float(high)


def soak(crowd: Crowd, count: int, sessions: int, seed: int) -> Counter:
    print(f"seed {seed}")  # which a failure shows
    rng = random.Random(seed)
    jobs = some_jobs(count, sessions, rng)
    crowd.run(jobs, rng)
    assert (
        not crowd.engine.scheduler.queues
        and not crowd.engine.scheduler.waiting
        and not crowd.engine.scheduler.running
    )
    found = check(crowd, jobs)
    crowd.forget()
    assert free_slots(crowd.engine.scheduler) == crowd.slots, "slots are lost"
    assert found["near-ties"] <= NEAR_TIES * found["texts"], found
    crowd.engine.close()
    return found


def test_a_small_crowd_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config):
    """Whose steps are queued ahead, or under --stages pass through those."""
    if not pytestconfig.getoption("--stages"):
        monkeypatch.setattr(backends, "TorchRunner", LateRunner)
    crowd = Crowd(6, 2, tmp_path / "sessions.db", device="cpu", prefill_tokens=48)
    found = soak(crowd, 40, 8, seed=random.randrange(1 << 30))
    assert found["texts"] > 30 and found["turns on turns"] > 2 and crowd.fullest == 6


@needs_gpu[0]
@needs_gpu[1]
def test_a_thousand_at_320_rows_on_a_gpu(tmp_path: Path):
    gc.collect()  # what other tests in this process have left
    crowd = Crowd(320, 16, tmp_path / "sessions.db", device="cuda", prefill_tokens=1024)
    crowd.forget()
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    found = soak(crowd, 1000, 60, seed=random.randrange(1 << 30))
    assert (
        found["texts"] > 800
        and found["cancelled"] > 30
        and found["turns on turns"] > 200
        and crowd.fullest > 250
    )
    torch.cuda.synchronize()
    # Less where an engine of another test in this process has ended meanwhile.
    assert torch.cuda.memory_allocated() <= held
    print(dict(found), f"{crowd.steps} steps")
