"""Train the demo model and pack it.

python -m demo.train --out demo/model.safetensors             # on a GPU
python -m demo.train --cpu --steps 20 --tokens 768 --out F    # to try it
"""

import argparse
import math
import os
import time
from pathlib import Path

import numpy as np
import torch
from pyrwkv_tokenizer import RWKVTokenizer
from torch import Tensor
from torch.nn import functional as F

from demo.batches import LENGTHS, TrainingBatch, from_workers, stream
from demo.model import TrainingModel
from demo.pack import pack
from demo.vocabulary import SIZE, collect

SEED = 7
WARMUP = 300


def loss_of(
    model: TrainingModel, unknown: int, tokens: Tensor, positions: Tensor, targets: Tensor, weights: Tensor
) -> Tensor:
    """Mean cross entropy of the answers' tokens.

    The shared row is that of `unknown` ids, so it counts that many times.
    """
    with torch.autocast(tokens.device.type, dtype=torch.bfloat16, enabled=tokens.is_cuda):
        hidden = model.hidden(tokens)
    logits = model.head(hidden.flatten(0, 1)[positions])
    offset = torch.zeros(logits.shape[-1], device=logits.device)
    offset[-1] += math.log(unknown)
    losses = F.cross_entropy(logits + offset, targets, reduction="none")
    return (losses * weights).sum() / weights.sum()


def learning_rate(done: float, step: int, peak: float) -> float:
    """Warm-up over the first steps, then a cosine down to a hundredth over `done` from 0 to 1."""
    return peak * min(1, (step + 1) / WARMUP) * (0.01 + 0.99 * (1 + math.cos(math.pi * min(1, done))) / 2)


class Trainer:
    """Model, optimizer, and on a GPU one captured graph for each batch length."""

    def __init__(self, model: TrainingModel, unknown: int, device: str) -> None:
        self.model, self.unknown, self.device = model.to(device), unknown, device
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

    def arrays(self, batch: TrainingBatch) -> list[Tensor]:
        return [torch.from_numpy(x) for x in (batch.tokens, batch.positions, batch.targets, batch.weights)]

    def update(self, inputs: list[Tensor]) -> Tensor:
        """One step of the optimizer; returns the loss."""
        loss = loss_of(self.model, self.unknown, *inputs)
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
        with torch.cuda.graph(graph):
            loss = self.update(inputs)
        self.graphs[length] = graph, inputs, loss
        return result


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(SEED)
    device = "cpu" if args.cpu else "cuda"
    began = time.monotonic()
    known = collect(RWKVTokenizer(), SEED, 2000 if args.cpu else 120_000)
    print(f"{len(known)} known ids after {time.monotonic() - began:.0f} s", flush=True)
    batches = (
        stream(known, SEED, args.tokens)
        if args.cpu
        else from_workers(max(1, (os.cpu_count() or 2) - 2), known, SEED, args.tokens)
    )
    trainer = Trainer(TrainingModel(len(known)), SIZE - len(known), device)
    began, seen = time.monotonic(), 0
    shown: list[Tensor] = []

    def report(step: int) -> None:
        loss, spent = float(torch.stack(shown).mean()), time.monotonic() - began
        print(f"step {step} loss {loss:.5f} tokens {seen / 1e6:.1f}M time {spent:.1f} s", flush=True)

    for step in range(args.steps):
        done = max(step / args.steps, (time.monotonic() - began) / args.seconds)
        if done >= 1:
            break
        batch = next(batches)
        shown.append(trainer.step(batch, learning_rate(done, step, args.rate)).clone())
        seen += batch.tokens.size
        if (step + 1) % args.every == 0:
            report(step + 1)
            shown.clear()
    if shown:
        report(step)
    pack(
        {name: tensor.detach().float().cpu() for name, tensor in trainer.model.state_dict().items()},
        np.asarray(known),
        args.out,
    )
    print(f"packed {args.out} ({args.out.stat().st_size / 1e6:.1f} MB)", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="where the packed model goes")
    parser.add_argument("--cpu", action="store_true", help="train on the CPU (slow; for a try)")
    parser.add_argument("--steps", type=int, default=1_000_000, help="stop after this many steps")
    parser.add_argument("--seconds", type=float, default=505, help="stop after this long")
    parser.add_argument(
        "--tokens",
        type=int,
        default=24576,
        help=f"tokens in a batch, padding included; at least {LENGTHS[-1]}",
    )
    parser.add_argument("--rate", type=float, default=2.5e-3, help="peak learning rate")
    parser.add_argument("--every", type=int, default=200, help="steps between two lines of the report")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
