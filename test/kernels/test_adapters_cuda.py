"""Adapters on a CUDA GPU in fp16, against the reference on the CPU in fp32."""

import pytest
import torch
from adapter_files import (
    FACTOR,
    LAYERS,
    MAKERS,
    SCALED,
    TOKENS,
    VOCAB,
    WIDTH,
    adapted,
    logits_of,
    made,
    mixed,
    mole,
)
from checkpoints import write_pth
from cuda_gpu import needs_gpu, off

from bench.make_checkpoint import random_checkpoint
from rwkv_batch.model.checkpoint import from_tensors
from rwkv_batch.model.cuda.rwkv7 import RWKV7Cuda
from rwkv_batch.model.rwkv7 import RWKV7

pytestmark = needs_gpu
TOLERANCE = 1e-2


@pytest.fixture(scope="module")
def base():
    return {name: tensor.float() for name, tensor in random_checkpoint(LAYERS, WIDTH, VOCAB).items()}


@pytest.fixture(scope="module")
def checkpoint(base):
    return from_tensors("base", base)


@pytest.mark.parametrize("kind", MAKERS)
def test_a_merged_adapter_through_the_kernels(kind, base, checkpoint, tmp_path):
    file = write_pth(tmp_path / "a.pth", made(base, MAKERS[kind]))
    merged = adapted(checkpoint, file, FACTOR if kind in SCALED else None)
    model = RWKV7Cuda(merged, "cuda")
    logits = model.forward(TOKENS, [len(TOKENS)], [0], model.new_states(1))[0]
    assert off(logits.cpu(), logits_of(merged)) < TOLERANCE


@pytest.mark.parametrize("rule", ["topk0", "shared"])
@pytest.mark.parametrize("kind", ["lora", "bone"])
def test_experts_through_torch_operations(kind, rule, checkpoint, tmp_path):
    file = write_pth(tmp_path / "a.pth", mole(kind, 4, 2))
    merged = mixed(checkpoint, file, rule, None if kind == "bone" else FACTOR)
    model = RWKV7(merged, "cuda", torch.float16)
    logits = model.forward(TOKENS, [len(TOKENS)], [0], model.new_states(1))[0]
    assert off(logits.cpu(), logits_of(merged)) < TOLERANCE
