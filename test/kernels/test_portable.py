"""The kernels for AMD GPUs, built for the NVIDIA GPU of this machine, beside those for NVIDIA GPUs."""

import random

import pytest
import torch
from cuda_gpu import clear_choice, needs_gpu, off

from demo.training.evaluate import SEED, TASKS
from rwkv_batch.bundled import unpack
from rwkv_batch.engine.engine import Engine
from rwkv_batch.model.checkpoint import from_tensors
from rwkv_batch.model.cuda.rwkv7 import RWKV7Cuda
from rwkv_batch.ops.cuda import build
from rwkv_batch.ops.device import DeviceError
from rwkv_batch.runner.torch_runner import TorchRunner
from rwkv_batch.text.tokenizer import END_OF_TEXT, Tokenizer

ROWS, STEPS = 60, 80
LOGITS = 1e-2  # relative error allowed


@needs_gpu[0]
@needs_gpu[1]
@pytest.mark.skipif(torch.version.hip is not None, reason="needs an NVIDIA GPU")
@pytest.mark.many_launches
@pytest.mark.parametrize("wkv", [torch.float16, torch.float32])
@pytest.mark.parametrize("target", sorted(build.TILES))
def test_greedy_text_is_the_same_up_to_near_ties(wkv, target):
    """Prompts of the bundled model, and what the CUDA build makes of them, read by both a token a step."""
    checkpoint, rng, encode = from_tensors("demo", unpack.tensors()), random.Random(SEED), Tokenizer().encode
    names = [build.architecture(0), build.portable_architecture(0, target)]
    if names[0].startswith(build.PORTABLE):
        pytest.skip("under --portable there is no other build to compare with")
    models = [RWKV7Cuda(checkpoint, "cuda", name) for name in names]
    states = [model.new_states(ROWS, wkv) for model in models]
    tasks = list(TASKS.values())
    prompts = [[END_OF_TEXT, *encode(tasks[i % len(tasks)](rng).prompt)] for i in range(ROWS)]
    tokens, counts = [token for prompt in prompts for token in prompt], [len(prompt) for prompt in prompts]
    sure = 0
    for _ in range(STEPS):
        fed = torch.tensor(tokens)
        ours, portable = (m.forward(fed, counts, range(ROWS), s) for m, s in zip(models, states, strict=True))
        assert off(portable, ours) < LOGITS
        clear = clear_choice(ours, LOGITS)
        assert torch.equal(ours[clear].argmax(1), portable[clear].argmax(1))
        sure += int(clear.sum())
        tokens, counts = ours.argmax(1).tolist(), [1] * ROWS
    assert sure > ROWS * STEPS / 2


def test_a_cpu_does_not_run_them():
    with pytest.raises(DeviceError, match=r"--backend portable needs an NVIDIA GPU; use --backend auto$"):
        Engine(device="cpu", backend="portable")


@needs_gpu[0]
@needs_gpu[1]
def test_torch_operations_may_be_asked_for_on_a_gpu():
    engine = Engine(device="cuda", backend="torch", max_rows=4)
    assert isinstance(engine.runner, TorchRunner)
    assert engine.generate(["User: What is the capital of France?\n\nAssistant:"], max_tokens=4)
    engine.close()
