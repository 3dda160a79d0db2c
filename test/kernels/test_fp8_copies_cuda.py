"""`--activations fp8` on a Hopper GPU: many rows by copies of int8 and int4 in fp8, few rows as without."""

import pytest
import torch
from changing_driver import ChangingDriver
from checkpoints import tiny, write_pth
from cuda_gpu import needs_gpu, off, poisoned, time_nothing, unflushed
from models_driver import WEIGHTS
from row_adapters import write

from bench.make_checkpoint import random_rwkv7a
from rwkv_batch.model.adapters.low_rank import low_rank
from rwkv_batch.model.adapters.parts import Scaling
from rwkv_batch.model.adapters.reader import read
from rwkv_batch.model.checkpoint import Checkpoint, from_tensors
from rwkv_batch.model.cuda.gemms import tiled_codes
from rwkv_batch.model.cuda.gemms.method import GemmCall
from rwkv_batch.model.cuda.rwkv7 import RWKV7Cuda
from rwkv_batch.model.cuda.steps.graphs import decode_sizes, prefill_sizes
from rwkv_batch.model.quantization.quantize import quantize
from rwkv_batch.model.rwkv7 import RWKV7
from rwkv_batch.ops.cuda.buffers import Buffers
from rwkv_batch.ops.low_rank import PreparedAdapter
from rwkv_batch.ops.weights.channels import Fp8BothWeight, Fp8Weight
from rwkv_batch.wire.commands import LoadModel
from rwkv_batch.wire.protocol import CommandReply

pytestmark = [*needs_gpu, pytest.mark.usefixtures("hopper")]
LOGITS_FP8 = 0.15  # as of a model in fp8
CODED = ["int8", "int4", "int4-128"]
METHODS = ["fp8", "fp8/128", "fp8lt0"]
LARGE = ("in", "out", "key", "value")


def unpacked(checkpoint: Checkpoint) -> Checkpoint:
    """An ordinary model of the numbers that the packed matrices stand for."""
    matrices = {name: weight.dequantize() for name, weight in checkpoint.packed.items()}
    return from_tensors("unpacked", dict(checkpoint.tensors) | matrices)


def choose(model: RWKV7Cuda, method: str, sizes: list[int]) -> None:
    """That method for all matrices of a layer, for each of these numbers of tokens that can have it."""
    for tokens in sizes:
        if all(method in model.gemms.candidates(kind, tokens) for kind in LARGE):
            chosen = dict.fromkeys((f"{kind} {tokens}" for kind in LARGE), method)
            whole = {f"{kind}_split {tokens}": "whole" for kind in ("out", "value")}
            model.autotuner.chosen |= chosen | whole


@pytest.mark.parametrize("kind", CODED)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("rows", [68, 132, 320, 960])
def test_a_product_is_that_of_the_copy_and_of_inputs_in_fp8(kind, method, rows):
    packed = quantize(tiny(layers=2, width=256, vocab=500, seed=3), kind)
    model = RWKV7Cuda(packed, "cuda", fp8_copies=True)
    layer, scratch = model.weights.layers[1], Buffers(model.weights.buffer_shape, rows, {})
    for of, name, w in (("key", "ffn.key", layer.key), ("value", "ffn.value", layer.value)):
        weight = packed.packed[f"blocks.1.{name}.weight"]
        x = torch.randn(rows, w.shape[1], device="cuda").half()
        y = poisoned(rows, w.shape[0])
        assert method in model.gemms.candidates(of, rows)
        model.gemms.find(of, method).run(GemmCall(w, x, y, scratch))
        numbers = Fp8Weight.pack(weight.dequantize()).dequantize().double()
        # Sums of fp8 have fewer digits than fp32, and an input halfway between two codes may be either.
        assert off(y, Fp8BothWeight.rounded(x.float().cpu()).double() @ numbers.T) < 4e-3


@pytest.mark.parametrize("kind", CODED)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("few_rows", [False, True])
def test_logits_of_many_rows_are_as_near_as_those_of_a_model_in_fp8(kind, method, few_rows):
    packed = quantize(tiny(layers=3, width=256, vocab=500, seed=3), kind)
    model = RWKV7Cuda(packed, "cuda", few_rows=few_rows, fp8_copies=True)
    truth = RWKV7(unpacked(packed), "cuda")
    choose(model, method, [*prefill_sizes(512), *decode_sizes(200)])
    assert {model.methods(200)[kind] for kind in LARGE} == {method}
    states, wanted = model.new_states(200), truth.new_states(200)
    for lengths, slots in [([100, 200], [3, 5]), ([1] * 200, range(200)), ([1] * 200, range(200))]:
        tokens = torch.randint(1, 500, (sum(lengths),))
        found = model.forward(tokens, lengths, slots, states)
        error = off(found, truth.forward(tokens, lengths, slots, wanted))
        assert 5e-3 < error < LOGITS_FP8, "and that is no product in fp16"


@pytest.mark.parametrize("kind", CODED)
def test_few_rows_are_the_same_to_the_bit_as_without(kind):
    packed = quantize(tiny(layers=3, width=256, vocab=500, seed=3), kind)
    models = [RWKV7Cuda(packed, "cuda", fp8_copies=copies) for copies in (False, True)]
    states = [model.new_states(64) for model in models]
    for model in models:
        model.autotuner.chosen.clear()
    for rows in (1, 2, 8, 40, 64, 64):
        tokens, found = torch.randint(1, 500, (rows,)), []
        for model, of in zip(models, states, strict=True):
            found.append(model.forward(tokens, [1] * rows, range(rows), of))
        assert torch.equal(*found)
    assert torch.equal(*(of.wkv for of in states))


@pytest.mark.parametrize("kind", CODED)
@pytest.mark.parametrize("rows", [66, 96, 130, 321])
def test_timed_steps(kind, rows):
    """By whatever methods are the fastest, some of which read fp8 and some not."""
    packed = quantize(tiny(layers=3, width=256, vocab=500, seed=3), kind)
    model, truth = RWKV7Cuda(packed, "cuda", fp8_copies=True), RWKV7(unpacked(packed), "cuda")
    states, wanted = model.new_states(rows), truth.new_states(rows)
    model.tuner.measure([rows], progress=False)
    for _ in range(3):
        tokens = torch.randint(1, 500, (rows,))
        found = unflushed(model, tokens, [1] * rows, range(rows), states)
        assert off(found, truth.forward(tokens, [1] * rows, range(rows), wanted)) < LOGITS_FP8


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["rwkv7", "rwkv7a"])
def test_inputs_that_norms_make_fp8_change_nothing(method, kind, monkeypatch):
    plain = tiny(layers=3, width=256, vocab=500, seed=3)
    packed = quantize(plain if kind == "rwkv7" else from_tensors("7a", random_rwkv7a(2, 128, 500)), "int4")
    prompts, decoded, found = torch.randint(1, 500, (300,)), torch.randint(1, 500, (200,)), []
    for by_norms in (True, False):
        if not by_norms:
            monkeypatch.setattr(tiled_codes.Fp8, "reads_fp8", False)
        model = RWKV7Cuda(packed, "cuda", fp8_copies=True)
        choose(model, method, [*prefill_sizes(512), *decode_sizes(200)])
        states = model.new_states(200)
        found.append([model.forward(prompts, [100, 200], [3, 5], states)])
        found[-1].append(model.forward(decoded, [1] * 200, range(200), states))
        found[-1] += [states.shift, states.wkv]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_adapters_of_rows_lie_on_top(tmp_path):
    plain = tiny(layers=2, width=128, vocab=400, seed=3)
    packed = quantize(plain, "int4")
    adapter = read(write(tmp_path, plain, "lora", 1), plain)
    model, truth = RWKV7Cuda(packed, "cuda", fp8_copies=True), RWKV7(unpacked(packed), "cuda")
    model.add_adapters(1, 32, 512)
    choose(model, "fp8", [*prefill_sizes(512), *decode_sizes(70)])
    model.adapters.load(0, low_rank(adapter, plain, Scaling(1.0), 32, torch.float16, pinned=True))
    small = low_rank(adapter, plain, Scaling(1.0), 32, torch.float32)
    truth.adapters = [PreparedAdapter.on(small, 128, 512, truth.device, truth.dtype)]
    states, wanted = model.new_states(70), truth.new_states(70)
    for lengths in ([60, 30, 45], [1] * 70):
        tokens, slots = torch.randint(1, 400, (sum(lengths),)), range(len(lengths))
        having = [-(row % 2) for row in slots]
        found = model.forward(tokens, lengths, slots, states, adapters=having)
        assert off(found, truth.forward(tokens, lengths, slots, wanted, adapters=having)) < LOGITS_FP8


def test_a_model_that_is_loaded_later_has_it_where_its_format_takes_it(tmp_path, monkeypatch):
    time_nothing(monkeypatch)
    plain = write_pth(tmp_path / "plain.pth", dict(WEIGHTS["two"].tensors))
    driver = ChangingDriver("one", folder=tmp_path, device="cuda", weights="int4", activations="fp8")
    for weights, copies in (("", True), ("fp16", False)):
        reply = driver.change(LoadModel(f"l{weights}", str(plain), "two", weights=weights))
        assert isinstance(reply, CommandReply)
        driver.finish(driver.add("two"))
        driver.settle()
        model = driver.models.member("two").engine.runner.model
        assert model.weights.buffer_shape.fp8 == copies
    driver.models.close()
