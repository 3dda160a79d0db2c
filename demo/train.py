"""Train the demo model and pack it.

python -m demo.train --out demo/model.safetensors              # on a GPU, about 50 minutes
python -m demo.train --out F --call 540                        # the same in calls of nine minutes: repeat it
python -m demo.train --cpu --steps 20 --tokens 1024 --out F    # to try it

Whenever `--state` exists, the run goes on from there. It is removed when the model is packed.
"""

import argparse
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from demo import resume
from demo.batches import LENGTHS, TrainingBatch, from_workers, stream
from demo.model import TrainingModel
from demo.pack import pack
from demo.resume import TrainingProgress
from demo.vocabulary import SAMPLE, collect

SEED = 8
WARMUP = 300  # steps
SAVE_EVERY = 120  # seconds


def loss_of(
    model: TrainingModel,
    tokens: Tensor,
    positions: Tensor,
    targets: Tensor,
    weights: Tensor,
    candidates: Tensor,
    shares: Tensor,
) -> Tensor:
    """Mean cross entropy of the answers' tokens among the candidates; see `TrainingBatch`."""
    with torch.autocast(tokens.device.type, dtype=torch.bfloat16, enabled=tokens.is_cuda):
        hidden = model.hidden(tokens)
    logits = hidden.flatten(0, 1)[positions] @ model.head_rows(candidates).T + shares
    losses = F.cross_entropy(logits, targets, reduction="none")
    return (losses * weights).sum() / weights.sum()


def learning_rate(done: float, step: int, peak: float) -> float:
    """Warm-up over the first steps, then a cosine down to a hundredth over `done` from 0 to 1."""
    return peak * min(1, (step + 1) / WARMUP) * (0.01 + 0.99 * (1 + math.cos(math.pi * min(1, done))) / 2)


class Trainer:
    """Model, optimizer, and on a GPU one captured graph for each batch length."""

    def __init__(self, model: TrainingModel, device: str) -> None:
        self.model, self.device = model.to(device), device
        self.rate = torch.tensor(0.0, device=device)
        matrices = [p for p in model.parameters() if p.dim() == 2 and min(p.shape) > 8]
        others = [p for p in model.parameters() if not (p.dim() == 2 and min(p.shape) > 8)]
        groups = [{"params": matrices, "weight_decay": 0.02}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(
            groups,
            lr=self.rate,
            betas=(0.9, 0.99),
            eps=1e-10,
            capturable=device == "cuda",
            foreach=device == "cuda",
        )
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, list[Tensor], Tensor]] = {}
        self.pool = torch.cuda.graph_pool_handle() if device == "cuda" else None  # graphs never overlap

    def restore(self, steps: int, weights: dict[str, Tensor], moments: dict[str, Tensor]) -> None:
        """Go on from a saved run."""
        self.model.load_state_dict(weights)
        for name, p in self.model.named_parameters():
            count = torch.tensor(float(steps), device=self.device if self.device == "cuda" else "cpu")
            square = moments[name].to(self.device)
            self.optimizer.state[p] = {"step": count, "exp_avg": torch.zeros_like(p), "exp_avg_sq": square}

    def arrays(self, batch: TrainingBatch) -> list[Tensor]:
        parts = (batch.tokens, batch.positions, batch.targets, batch.weights, batch.candidates, batch.shares)
        return [torch.from_numpy(x) for x in parts]

    def update(self, inputs: list[Tensor]) -> Tensor:
        """One step of the optimizer; returns the loss."""
        loss = loss_of(self.model, *inputs)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        return loss.detach()

    def step(self, batch: TrainingBatch, rate: float) -> Tensor:
        """Train on one batch; the loss stays on the device."""
        self.rate.fill_(rate)
        arrays = self.arrays(batch)
        if self.device == "cpu":
            return self.update(arrays)
        if batch.length not in self.graphs:
            return self.first(batch.length, arrays)
        graph, inputs, loss = self.graphs[batch.length]
        for kept, new in zip(inputs, arrays, strict=True):
            kept.copy_(new.pin_memory(), non_blocking=True)
        graph.replay()
        return loss

    def first(self, length: int, arrays: list[Tensor]) -> Tensor:
        """Run a step as it is, then capture the same for the next batches of this length."""
        inputs = [x.cuda() for x in arrays]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            result = self.update(inputs).clone()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            loss = self.update(inputs)
        self.graphs[length] = graph, inputs, loss
        return result


def begin(args: argparse.Namespace) -> tuple[TrainingProgress, dict[str, Tensor], dict[str, Tensor]]:
    """A new run (without weights and moments), or the one that was cut off."""
    if args.state.exists():
        progress, weights, moments = resume.load(args.state)
        print(f"going on after step {progress.steps}, {progress.seconds:.0f} s", flush=True)
        return progress, weights, moments
    began = time.monotonic()
    known = collect(SEED, sample=2000 if args.cpu else SAMPLE)
    print(f"{len(known)} known ids after {time.monotonic() - began:.0f} s", flush=True)
    return TrainingProgress(0, 0.0, 0, known), {}, {}


def batches_of(args: argparse.Namespace, progress: TrainingProgress) -> Iterator[TrainingBatch]:
    """Text that no earlier call has seen."""
    seed = SEED + 100 * progress.calls
    if args.cpu:
        return stream(progress.known, seed, args.tokens)
    return from_workers(max(1, (os.cpu_count() or 2) - 2), progress.known, seed, args.tokens)


def train(args: argparse.Namespace) -> None:
    """Train until `--seconds` or `--steps` are reached, or until this call's time is over."""
    torch.manual_seed(SEED)
    device = "cpu" if args.cpu else "cuda"
    called = time.monotonic()
    before, weights, moments = begin(args)
    batches = batches_of(args, before)  # the workers are forked before the GPU is touched
    trainer = Trainer(TrainingModel(before.known), device)
    if weights:
        trainer.restore(before.steps, weights, moments)
    began = saved = shown_at = time.monotonic()
    step, seen, shown = before.steps, 0, list[Tensor]()

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
        resume.save(args.state, progress, trainer.model, trainer.optimizer)

    while (done := max(step / args.steps, spent() / args.seconds)) < 1:
        batch = next(batches)
        shown.append(trainer.step(batch, learning_rate(done, step, args.rate)).clone())
        seen += batch.tokens.size
        step += 1
        if step % args.every == 0:
            report()
            shown.clear()
            shown_at = time.monotonic()
        over = time.monotonic() - called > args.call
        if over or time.monotonic() - saved > SAVE_EVERY:
            save()
            saved = time.monotonic()
        if over:
            print(f"cut off after {args.call:.0f} s; the same command goes on from {args.state}", flush=True)
            return
    if shown:
        report()
    state = {name: tensor.detach().float().cpu() for name, tensor in trainer.model.state_dict().items()}
    pack(state, before.known, args.out)
    args.state.unlink(missing_ok=True)
    print(f"packed {args.out} ({args.out.stat().st_size / 1e6:.1f} MB)", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="where the packed model goes")
    parser.add_argument(
        "--state", type=Path, help="what a run that is cut off goes on from; default: OUT.state"
    )
    parser.add_argument("--cpu", action="store_true", help="train on the CPU (slow; for a try)")
    parser.add_argument("--steps", type=int, default=1_000_000, help="stop after this many steps")
    parser.add_argument(
        "--seconds", type=float, default=3000, help="stop after this long, all calls together"
    )
    parser.add_argument("--call", type=float, default=math.inf, help="end this call after so many seconds")
    parser.add_argument(
        "--tokens",
        type=int,
        default=24576,
        help=f"tokens in a batch, padding included; at least {LENGTHS[-1]}",
    )
    parser.add_argument("--rate", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--every", type=int, default=200, help="steps between two lines of the report")
    args = parser.parse_args()
    args.state = args.state or args.out.with_suffix(".state")
    train(args)


if __name__ == "__main__":
    main()
