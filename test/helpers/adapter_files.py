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
EXPERT_SHAPES = {"key": (4 * WIDTH, WIDTH), "value": (WIDTH, 4 * WIDTH)}  # [out, in]
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


def bone_expert(draw, inputs):
    return {"bone_expert_0": draw(inputs // 16, 16, 16, std=0.1)}


def lora_expert(draw, out, inputs):
    return {"lora_A_expert_0": draw(4, inputs, std=0.1), "lora_B_expert_0": draw(out, 4, std=0.5)}


def mole(kind, count, active, bias=False):
    """A file with experts of that kind in every layer."""
    draw, tensors = Draw(), {}
    for layer in range(LAYERS):
        ffn = f"blocks.{layer}.ffn."
        tensors[ffn + "moe_info"] = torch.tensor([float(count), float(active)])
        tensors[ffn + "router.linear.weight"] = draw(count - 1, WIDTH, std=0.3)
        if bias:
            tensors[ffn + "router.linear.bias"] = draw(count - 1, std=0.5)
        for expert in range(count):
            for name, (out, inputs) in EXPERT_SHAPES.items():
                own = bone_expert(draw, inputs) if kind == "bone" else lora_expert(draw, out, inputs)
                tensors |= {f"{ffn}expert_{expert}.{name}.{suffix}": t for suffix, t in own.items()}
    return tensors


def off(x, reference):
    return float((x.double() - reference.double()).norm() / reference.double().norm())


def logits_of(weights, model=RWKV7):
    model = model(weights)
    return model.forward(TOKENS, [len(TOKENS)], [0], model.new_states(1))[0]


def adapted(checkpoint, file, factor=FACTOR, **options):
    return merge(checkpoint, read(file, checkpoint, **options), None if factor is None else Scaling(factor))


def mixed(checkpoint, file, rule, factor=FACTOR):
    return merge(checkpoint, read(file, checkpoint), None if factor is None else Scaling(factor), rule)


def refusal(action) -> str:
    with pytest.raises(CheckpointError) as caught:
        action()
    message = str(caught.value)
    assert "\n" not in message and message.endswith(".") and ". " not in message.replace("e.g. ", "")
    return message
