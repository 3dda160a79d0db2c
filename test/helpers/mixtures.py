"""Mixtures of start states of the tiny model, and what they say, computed one token at a time."""

from pathlib import Path

import torch
from engine_driver import WEIGHTS, Driver

from rwkv_batch.model.checkpoint import from_tensors
from rwkv_batch.model.rwkv7 import RWKV7
from rwkv_batch.wire.commands import PutStartState
from rwkv_batch.wire.protocol import MixturePart


def numbers(seed: int) -> dict[str, torch.Tensor]:
    """A start state."""
    draw = torch.Generator().manual_seed(seed)
    return {f"blocks.{i}.att.time_state": torch.randn(2, 64, 64, generator=draw) for i in range(2)}


def add_start_states(driver: Driver, folder: Path) -> None:
    """Three, called s1 to s3."""
    for seed in (1, 2, 3):
        torch.save(numbers(seed), folder / f"{seed}.pth")
        driver.ask(PutStartState(f"put {seed}", f"s{seed}", str(folder / f"{seed}.pth"), "vk", b""))


def model(seed: int | None) -> RWKV7:
    return RWKV7(from_tensors("m", WEIGHTS.tensors | (numbers(seed) if seed else {})))


def greedy(weights: dict[int | None, float], prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    """The likeliest tokens under a mixture, and their log probabilities, in fp64."""
    models = [(model(seed), weight) for seed, weight in weights.items()]
    states = [one.new_states(1) for one, _ in models]
    total, fed = sum(weights.values()), list(prompt)
    drawn: list[int] = []
    logprobs: list[float] = []
    while len(drawn) < count:
        mixed = torch.zeros(400, dtype=torch.float64)
        for (one, weight), state in zip(models, states, strict=True):
            logits = one.forward(torch.tensor(fed), [len(fed)], [0], state)[0].double()
            mixed += weight / total * logits
        drawn.append(int(mixed.argmax()))
        logprobs.append(float(mixed.log_softmax(0).max()))
        fed = drawn[-1:]
    return drawn, logprobs


def parts(weights: dict[int | None, float]) -> list[MixturePart]:
    return [MixturePart(f"s{seed}" if seed else "", weight) for seed, weight in weights.items()]
