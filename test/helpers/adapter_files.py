"""Adapters as their trainers write them, of small random numbers; and how tests merge and run them."""

import pytest
import torch

from rwkv_batch.model.adapters.merge import merge
from rwkv_batch.model.adapters.parts import Scaling
from rwkv_batch.model.adapters.reader import read
from rwkv_batch.model.files import CheckpointError
from rwkv_batch.model.rwkv7 import RWKV7

LAYERS, WIDTH, VOCAB = 2, 128, 320
MATRICES = [f"att.{name}" for name in ("receptance", "key", "value", "output")] + ["ffn.key", "ffn.value"]
PREFIXES = [f"blocks.{layer}.{name}" for layer in range(LAYERS) for name in MATRICES]
FACTOR = 1.5
TOKENS = torch.randint(1, VOCAB, (12,), generator=torch.Generator().manual_seed(0))
SCALED = ("lora", "dora", "miss")  # the kinds whose change is multiplied with a factor


class Draw:
    """Numbers of an adapter, of about the size that training leaves."""

    def __init__(self, seed=0):
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape, std=0.05):
        return torch.randn(*shape, generator=self.generator) * std


def made(base, matrix, prefixes=(*PREFIXES, "head"), seed=0):
    """An adapter's file, of what `matrix(draw, out, in)` gives for each matrix by suffix."""
    draw = Draw(seed)
    return {
        f"{prefix}.{suffix}": tensor
        for prefix in prefixes
        for suffix, tensor in matrix(draw, *base[f"{prefix}.weight"].shape).items()
    }


def lora(draw, out, inputs, rank=4):
    return {"lora_A": draw(rank, inputs), "lora_B": draw(out, rank, std=0.5)}


def dora(draw, out, inputs):
    return lora(draw, out, inputs) | {"lora_M": 1 + draw(1, inputs, std=0.3)}


def bone(suffix):
    return lambda draw, out, inputs: {suffix: draw(inputs // 16, 16, 16)}


def disha(draw, out, inputs, rank=24):  # 24 does not divide 128: the last run is cut short
    return {"disha": draw(rank, out)}


def miss(draw, out, inputs, rank=12):
    return {"weight.D": draw(out, rank)}


MAKERS = {
    "lora": lora,
    "dora": dora,
    "bone": bone("bone"),
    "disha-3d": bone("disha"),
    "disha-2d": disha,
    "miss": miss,
}


def off(x, reference):
    return float((x.double() - reference.double()).norm() / reference.double().norm())


def logits_of(weights, model=RWKV7):
    model = model(weights)
    return model.forward(TOKENS, [len(TOKENS)], [0], model.new_states(1))[0]


def adapted(checkpoint, file, factor=FACTOR, **options):
    return merge(checkpoint, read(file, checkpoint, **options), None if factor is None else Scaling(factor))


def refusal(action) -> str:
    with pytest.raises(CheckpointError) as caught:
        action()
    message = str(caught.value)
    assert "\n" not in message and message.endswith(".") and ". " not in message.replace("e.g. ", "")
    return message
