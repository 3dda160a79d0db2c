"""Train the demo model and pack it.

python -m demo.training.train --out demo/model.safetensors              # on a GPU, about 50 minutes
python -m demo.training.train --out F --call 540                        # the same in calls of nine minutes: repeat it
torchrun --nproc-per-node 2 -m demo.training.train --out F --seconds 1500     # on two GPUs of one host
python -m demo.training.train --cpu --steps 20 --tokens 1024 --exam 5 --out F   # to try it

Whenever `--state` exists, the run goes on from there. It is removed when the model is packed. Every call ends with
the scores of a short exam (demo/training/evaluate.py).
"""

import argparse
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from demo.training import resume
from demo.training.batches import CANDIDATES, LENGTHS, Maker, TrainingBatch, from_workers, stream
from demo.training.evaluate import examine, tasks
from demo.training.example import Example
from demo.training.model import TrainingModel
from demo.training.optimize import Optimizer, Team
from demo.training.pack import pack
from demo.training.resume import TrainingProgress
from demo.training.text import training_example
from demo.training.vocabulary import SAMPLE, collect

SEED = 8
WARMUP = 300  # steps
SAVE_EVERY = 120  # seconds


def answers_loss(
    hidden: Tensor, rows: Tensor, positions: Tensor, targets: Tensor, weights: Tensor, shares: Tensor
) -> Tensor:
    """Mean cross entropy of `targets` among the candidates, whose rows of the head are given."""
    logits = hidden.index_select(0, positions) @ rows.T + shares
    losses = F.cross_entropy(logits, targets, reduction="none")
    return (losses * weights).sum() / weights.sum()


def loss_of(
    model: TrainingModel,
    tokens: Tensor,
    positions: Tensor,
    targets: Tensor,
    weights: Tensor,
    candidates: Tensor,
    shares: Tensor,
    among: Callable[..., Tensor] = answers_loss,
) -> Tensor:
    """Mean cross entropy of the answers' tokens among the candidates; see `TrainingBatch`."""
    with torch.autocast(tokens.device.type, dtype=torch.bfloat16, enabled=tokens.is_cuda):
        hidden = model.hidden(tokens)
    return among(hidden.flatten(0, 1), model.head_rows(candidates), positions, targets, weights, shares)


def learning_rate(done: float, step: int, peak: float) -> float:
    """Warm-up over the first steps, then a cosine down to a hundredth over `done` from 0 to 1."""
    return peak * min(1, (step + 1) / WARMUP) * (0.01 + 0.99 * (1 + math.cos(math.pi * min(1, done))) / 2)


class Trainer:
    """Model, optimizer, and on a GPU one captured graph for each batch length."""

    def __init__(self, model: TrainingModel, team: Team) -> None:
        self.model, self.team = model.to(team.device), team
        self.trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.optimizer = Optimizer(self.trained, team)
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, list[Tensor], Tensor]] = {}
        self.among = answers_loss
        if team.cuda:
            torch.set_float32_matmul_precision("high")  # TF32: the products with the head
            model.compile()
            self.among = torch.compile(answers_loss)

    def restore(self, steps: int, weights: dict[str, Tensor], moments: dict[str, Tensor]) -> None:
        """Go on from a saved run."""
        with torch.no_grad():
            for name, p in self.trained.items():
                p.copy_(weights[name])
        self.optimizer.restore(steps, moments)

    def arrays(self, batch: TrainingBatch) -> list[Tensor]:
        parts = (batch.tokens, batch.positions, batch.targets, batch.weights, batch.candidates, batch.shares)
        return [torch.from_numpy(x) for x in parts]

    def gradients(self, inputs: list[Tensor]) -> Tensor:
        """Add the gradients of a batch; returns its loss."""
        loss = loss_of(self.model, *inputs, among=self.among)
        loss.backward()
        return loss.detach()

    def update(self, inputs: list[Tensor]) -> Tensor:
        """One step of the optimizer, without graphs; returns the loss."""
        loss = self.gradients(inputs)
        self.optimizer.step()
        return loss

    def step(self, batch: TrainingBatch, rate: float) -> Tensor:
        """Train on one batch; the loss stays on the device."""
        self.optimizer.rate.fill_(rate)
        arrays = self.arrays(batch)
        if not self.team.cuda:
            return self.update(arrays)
        if batch.length not in self.graphs:
            return self.first(batch.length, arrays)
        graph, inputs, loss = self.graphs[batch.length]
        for kept, new in zip(inputs, arrays, strict=True):
            kept.copy_(new.pin_memory(), non_blocking=True)
        graph.replay()
        result = loss.clone()  # the optimizer's graph uses the same memory
        self.optimizer.step()
        return result

    def first(self, length: int, arrays: list[Tensor]) -> Tensor:
        """Run a batch as it is, then capture the same for the next batches of this length."""
        inputs = [x.cuda() for x in arrays]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            result = self.gradients(inputs).clone()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with self.team.capture(graph, self.optimizer.pool):
            loss = self.gradients(inputs)
        self.graphs[length] = graph, inputs, loss
        self.optimizer.step()
        return result


@dataclass(frozen=True)
class TrainingTask:
    """What is trained, on which text, and what becomes of it.

    known: the ids with rows of their own, or where there are none yet None. model: for these ids. finish: writes the
    result. exam: examples of each task, by which a call is judged.
    """

    known: np.ndarray | None
    model: Callable[[np.ndarray], TrainingModel]
    make: Maker
    finish: Callable[[TrainingModel, np.ndarray, Path], None]
    exam: Callable[[int], dict[str, list[Example]]]
    candidates: int = CANDIDATES  # ids that compete for each next token


def begin(
    args: argparse.Namespace, task: TrainingTask
) -> tuple[TrainingProgress, dict[str, Tensor], dict[str, Tensor]]:
    """A new run (without weights and moments), or the one that was cut off."""
    if args.state.exists():
        progress, weights, moments = resume.load(args.state)
        print(f"going on after step {progress.steps}, {progress.seconds:.0f} s", flush=True)
        return progress, weights, moments
    known = task.known
    if known is None:
        began = time.monotonic()
        workers = 1 if args.cpu else os.cpu_count() or 1
        known = collect(SEED, sample=2000 if args.cpu else SAMPLE, workers=workers)
        print(f"{len(known)} known ids after {time.monotonic() - began:.0f} s", flush=True)
    return TrainingProgress(0, 0.0, 0, known), {}, {}


def batches_of(
    args: argparse.Namespace, task: TrainingTask, progress: TrainingProgress
) -> Iterator[TrainingBatch]:
    """Text that no earlier call and no other process has seen."""
    seed = SEED + 100 * progress.calls + 10 * Team.my_rank()
    if args.cpu:
        return stream(progress.known, seed, args.tokens, task.make, task.candidates)
    workers = max(1, (os.cpu_count() or 2) // Team.processes() - 2)
    return from_workers(workers, progress.known, seed, args.tokens, task.make, task.candidates)


def train(args: argparse.Namespace, task: TrainingTask) -> None:
    """Train until `--seconds` or `--steps` are reached, or until this call's time is over."""
    torch.manual_seed(SEED)
    called = time.monotonic()
    before, weights, moments = begin(args, task)
    batches = batches_of(args, task, before)  # the workers are forked before the GPU is touched
    team = Team(cuda=not args.cpu)
    trainer = Trainer(task.model(before.known), team)
    if weights:
        trainer.restore(before.steps, weights, moments)
    began = saved = shown_at = time.monotonic()
    step, seen, shown = before.steps, 0, list[Tensor]()
    done, over = 0.0, False

    def spent() -> float:
        return before.seconds + time.monotonic() - began

    def report() -> None:
        loss = float(torch.stack(shown).mean())
        speed = len(shown) / (time.monotonic() - shown_at)
        print(
            f"step {step} loss {loss:.5f} tokens {seen / 1e6:.1f}M time {spent():.0f} s, {speed:.1f} steps/s",
            flush=True,
        )

    def save() -> None:
        progress = TrainingProgress(step, spent(), before.calls + 1, before.known)
        resume.save(args.state, progress, trainer.trained, trainer.optimizer.moments())

    while True:
        if (step - before.steps) % team.interval == 0:
            passed = max(step / args.steps, spent() / args.seconds)
            done, late = team.agree(
                passed, float(time.monotonic() - called > args.call and step > before.steps)
            )
            over = bool(late)
        if done >= 1 or over:
            break
        batch = next(batches)
        shown.append(trainer.step(batch, learning_rate(done, step, args.rate)))
        seen += batch.tokens.size * team.size
        step += 1
        if team.first and step % args.every == 0:
            report()
            shown.clear()
            shown_at = time.monotonic()
        if team.first and time.monotonic() - saved > SAVE_EVERY:
            save()
            saved = time.monotonic()
    if team.first:
        if shown:
            report()
        if over:
            save()
            print(f"cut off after {args.call:.0f} s; the same command goes on from {args.state}", flush=True)
        else:
            task.finish(trainer.model, before.known, args.out)
            args.state.unlink(missing_ok=True)
            print(f"wrote {args.out}: {args.out.stat().st_size} bytes", flush=True)
        with torch.compiler.set_stance("force_eager"):  # its batches have many shapes
            scores = examine(trainer.model, task.exam(args.exam) if args.exam else {})
        for name, result in scores.items():
            print(f"{name}: {result}", flush=True)
    team.leave()


def finish(model: TrainingModel, known: np.ndarray, out: Path) -> None:
    pack({name: p.detach().float().cpu() for name, p in model.state_dict().items()}, known, out)


def arguments(description: str | None, seconds: float, rate: float) -> argparse.ArgumentParser:
    """The options of every training, with these defaults."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="where the result goes")
    add("--state", type=Path, help="what a run that is cut off goes on from; default: OUT.state")
    add("--cpu", action="store_true", help="train on the CPU (slow; for a try)")
    add("--steps", type=int, default=1_000_000, help="stop after this many steps")
    add("--seconds", type=float, default=seconds, help="stop after this long, all calls together")
    add("--call", type=float, default=math.inf, help="end this call after so many seconds")
    tokens = f"tokens in a batch of one GPU, padding included; at least {LENGTHS[-1]}"
    add("--tokens", type=int, default=24576, help=tokens)
    add("--rate", type=float, default=rate, help="peak learning rate")
    add("--every", type=int, default=200, help="steps between two lines of the report")
    add("--exam", type=int, default=200, help="examples of each task in the exam of a call")
    return parser


def main() -> None:
    args = arguments(__doc__, seconds=2900, rate=2e-3).parse_args()
    args.state = args.state or args.out.with_suffix(".state")
    train(args, TrainingTask(None, TrainingModel, training_example, finish, tasks))


if __name__ == "__main__":
    main()
