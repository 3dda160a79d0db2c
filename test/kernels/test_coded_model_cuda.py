"""Models with matrices of 8 bits on a Hopper GPU, against the numbers that these stand for in fp32."""

import pytest
import torch
from checkpoints import tiny
from cuda_gpu import needs_gpu, off, unflushed
from row_adapters import write

from bench.make_checkpoint import random_rwkv7a
from rwkv_batch.model.adapters.low_rank import low_rank
from rwkv_batch.model.adapters.parts import Scaling
from rwkv_batch.model.adapters.reader import read
from rwkv_batch.model.checkpoint import Checkpoint, from_tensors
from rwkv_batch.model.cuda.gemms import tiled_codes
from rwkv_batch.model.cuda.rwkv7 import RWKV7Cuda
from rwkv_batch.model.cuda.steps.graphs import decode_sizes, prefill_sizes
from rwkv_batch.model.quantization.quantize import quantize
from rwkv_batch.model.rwkv7 import RWKV7
from rwkv_batch.ops.low_rank import PreparedAdapter

pytestmark = [*needs_gpu, pytest.mark.usefixtures("hopper")]
LOGITS = 1e-2
LOGITS_FP8 = 0.15  # with x in fp8 too, whose numbers have four digits
STEPS = [  # lengths and slots
    ([17, 1, 15, 16], [2, 0, 3, 8]),
    ([1, 1, 1], [3, 2, 0]),
    ([63, 1], [5, 2]),
    ([1] * 5, [5, 8, 2, 0, 3]),
    ([1], [2]),
]


def unpacked(checkpoint: Checkpoint) -> Checkpoint:
    """An ordinary model of the numbers that the packed matrices stand for."""
    matrices = {name: weight.dequantize() for name, weight in checkpoint.packed.items()}
    return from_tensors("unpacked", dict(checkpoint.tensors) | matrices)


def weights(shape: dict) -> Checkpoint:
    return tiny(**shape, seed=3)


SHAPES = [
    pytest.param({"layers": 3, "width": 192, "vocab": 500}, id="3x192"),
    pytest.param({"layers": 1, "width": 64, "vocab": 300}, id="1x64"),
    pytest.param({"layers": 6, "width": 1024, "vocab": 2000}, id="6x1024"),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["int8", "fp8", "int4", "int4-128"])
@pytest.mark.parametrize("head", [False, True])
def test_logits_are_those_of_the_numbers(shape, kind, head):
    packed = quantize(weights(shape), kind, head)
    model, truth = RWKV7Cuda(packed, "cuda"), RWKV7(unpacked(packed), "cuda")
    states, wanted = model.new_states(9), truth.new_states(9)
    for lengths, slots in STEPS:
        tokens = torch.randint(1, shape["vocab"], (sum(lengths),))
        found = model.forward(tokens, lengths, slots, states)
        want = truth.forward(tokens, lengths, slots, wanted)
        assert found.shape == want.shape and off(found, want) < LOGITS


@pytest.mark.parametrize("rows", [1, 2, 4, 8, 9, 40, 130, 321])
@pytest.mark.parametrize("few_rows", [False, True])
def test_decode_of_many_rows_under_graphs(rows, few_rows):
    packed = quantize(weights({"layers": 3, "width": 192, "vocab": 500}), "int8")
    model, truth = RWKV7Cuda(packed, "cuda", few_rows=few_rows), RWKV7(unpacked(packed), "cuda")
    states, wanted = model.new_states(rows), truth.new_states(rows)
    model.capture(states, progress=False)
    for _ in range(4):
        tokens = torch.randint(1, 500, (rows,))
        found = unflushed(model, tokens, [1] * rows, range(rows), states)
        assert off(found, truth.forward(tokens, [1] * rows, range(rows), wanted)) < LOGITS


@pytest.mark.parametrize("rows", [1, 2, 4, 8])
@pytest.mark.parametrize(
    ("kind", "method"), [("value", "sparse"), ("value_split", "sparse/8"), ("value", "coded")]
)
def test_few_rows_by_either_method(rows, kind, method):
    """Without the weights of inactive hidden units, and with them."""
    packed = quantize(weights({"layers": 3, "width": 192, "vocab": 500}), "int8")
    model, truth = RWKV7Cuda(packed, "cuda", few_rows=True), RWKV7(unpacked(packed), "cuda")
    model.autotuner.chosen |= {f"value_split {rows}": "whole", f"layers {rows}": "separate"}
    model.autotuner.chosen[f"{kind} {rows}"] = method
    assert model.methods(rows)[kind] == method
    states, wanted = model.new_states(rows), truth.new_states(rows)
    for _ in range(3):
        tokens = torch.randint(1, 500, (rows,))
        found = model.forward(tokens, [1] * rows, range(rows), states)
        assert off(found, truth.forward(tokens, [1] * rows, range(rows), wanted)) < LOGITS


@pytest.mark.parametrize("rows", [1, 8, 16, 40, 64])
@pytest.mark.parametrize("kind", ["int8", "fp8", "int4"])
def test_partial_sums_that_norms_add_up(kind, rows):
    packed = quantize(weights({"layers": 3, "width": 1024, "vocab": 500}), kind)
    model, truth = RWKV7Cuda(packed, "cuda"), RWKV7(unpacked(packed), "cuda")
    for split in ("out_split", "value_split"):
        model.autotuner.chosen[f"{split} {rows}"] = "partial sums"
    model.autotuner.chosen[f"layers {rows}"] = "separate"
    assert model.methods(rows)["value_split"] == "partial sums"
    states, wanted = model.new_states(rows), truth.new_states(rows)
    for _ in range(3):
        tokens = torch.randint(1, 500, (rows,))
        found = model.forward(tokens, [1] * rows, range(rows), states)
        assert off(found, truth.forward(tokens, [1] * rows, range(rows), wanted)) < LOGITS


@pytest.mark.parametrize("kind", ["int8", "int4", "int4-128"])
@pytest.mark.parametrize("few_rows", [False, True])
def test_many_rows(kind, few_rows):
    """By the kernels for hundreds of rows, of prompts and decode steps."""
    packed = quantize(weights({"layers": 3, "width": 192, "vocab": 500}), kind, True)
    model, truth = RWKV7Cuda(packed, "cuda", few_rows=few_rows), RWKV7(unpacked(packed), "cuda")
    kinds = ("in", "out", "key", "value", "head")
    model.autotuner.chosen |= {f"{of} {tokens}": "many" for of in kinds for tokens in (260, 300)}
    assert model.methods(300)["key"] == model.methods(300)["value"] == "many"
    states, wanted = model.new_states(260), truth.new_states(260)
    for lengths, slots in [([100, 200], [3, 5]), ([1] * 260, range(260)), ([1] * 260, range(260))]:
        tokens = torch.randint(1, 500, (sum(lengths),))
        found = model.forward(tokens, lengths, slots, states)
        assert off(found, truth.forward(tokens, lengths, slots, wanted)) < LOGITS


@pytest.mark.parametrize("method", ["fp8", "fp8/128", "fp8lt0"])
def test_many_rows_with_fp8_on_both_sides(method):
    """Of decode steps and prompts, against the model whose x stays as it is."""
    packed = quantize(weights({"layers": 3, "width": 256, "vocab": 500}), "fp8")
    model, truth = RWKV7Cuda(packed, "cuda"), RWKV7(unpacked(packed), "cuda")
    for tokens in (200, 300):
        choose(model, method, tokens)
    states, wanted = model.new_states(200), truth.new_states(200)
    for lengths, slots in [([100, 200], [3, 5]), ([1] * 200, range(200)), ([1] * 200, range(200))]:
        tokens = torch.randint(1, 500, (sum(lengths),))
        found = model.forward(tokens, lengths, slots, states)
        assert off(found, truth.forward(tokens, lengths, slots, wanted)) < LOGITS_FP8


def choose(model: RWKV7Cuda, method: str, tokens: int) -> None:
    """That method of fp8 for all matrices of a layer that it can run, for so many tokens."""
    kinds = (kind for kind in ("in", "out", "key", "value") if method in model.gemms.candidates(kind, tokens))
    model.autotuner.chosen |= {f"{kind} {tokens}": method for kind in kinds}


@pytest.mark.parametrize("method", ["fp8", "fp8/128", "fp8lt0"])
@pytest.mark.parametrize("rows", [66, 200, 961])
@pytest.mark.parametrize("kind", ["rwkv7", "rwkv7a"])
def test_inputs_that_norms_make_fp8_change_nothing(method, rows, kind, monkeypatch):
    """To the bit, of decode steps, with padding too, and of prompts. A DeepEmbed reads one of them itself."""
    plain = weights({"layers": 3, "width": 1024, "vocab": 500})
    packed = quantize(plain if kind == "rwkv7" else from_tensors("7a", random_rwkv7a(2, 128, 500)), "fp8")
    prompts, decoded, found = torch.randint(1, 500, (300,)), torch.randint(1, 500, (2, rows)), []
    for by_norms in (True, False):
        if not by_norms:
            monkeypatch.setattr(tiled_codes.Fp8, "reads_fp8", False)
        model = RWKV7Cuda(packed, "cuda")
        for tokens in (*prefill_sizes(512), *decode_sizes(rows)):
            choose(model, method, tokens)
        states = model.new_states(rows)
        found.append([model.forward(prompts, [100, 200], [3, 5], states)])
        for tokens in (decoded[0], decoded[1, 1:]):
            found[-1].append(model.forward(tokens, [1] * len(tokens), range(len(tokens)), states))
        found[-1] += [states.shift, states.wkv]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_model_with_deep_embed():
    plain = from_tensors("7a", random_rwkv7a(2, 128, 300))
    packed = quantize(plain, "int8")
    model, truth = RWKV7Cuda(packed, "cuda", few_rows=True), RWKV7(unpacked(packed), "cuda")
    states, wanted = model.new_states(1), truth.new_states(1)
    for length in (40, 1, 1):  # of one token inactive units are skipped
        tokens = torch.randint(1, 300, (length,))
        found = model.forward(tokens, [length], [0], states)
        assert off(found, truth.forward(tokens, [length], [0], wanted)) < LOGITS


@pytest.mark.parametrize(("kind", "most"), [("int8", LOGITS), ("fp8", LOGITS_FP8)])
def test_adapters_of_rows_lie_on_top(kind, most, tmp_path):
    plain = weights({"layers": 2, "width": 128, "vocab": 400})
    packed = quantize(plain, kind)
    adapter = read(write(tmp_path, plain, "lora", 1), plain)
    model, truth = RWKV7Cuda(packed, "cuda", few_rows=True), RWKV7(unpacked(packed), "cuda")
    model.add_adapters(1, 32, 512)
    if kind == "fp8":
        for tokens in (2, 3, 34):
            choose(model, "fp8", tokens)
    model.adapters.load(0, low_rank(adapter, plain, Scaling(1.0), 32, torch.float16, pinned=True))
    small = low_rank(adapter, plain, Scaling(1.0), 32, torch.float32)
    truth.adapters = [PreparedAdapter.on(small, 128, 512, truth.device, truth.dtype)]
    states, wanted, of_rows = model.new_states(3), truth.new_states(3), [0, -1, 0]
    for lengths in ([20, 5, 9], [1, 1, 1], [1, 1]):  # of two tokens inactive units are skipped
        tokens, slots, having = (
            torch.randint(1, 400, (sum(lengths),)),
            range(len(lengths)),
            of_rows[: len(lengths)],
        )
        found = model.forward(tokens, lengths, slots, states, adapters=having)
        assert off(found, truth.forward(tokens, lengths, slots, wanted, adapters=having)) < most


@pytest.mark.parametrize("kind", ["int8", "fp8", "int4", "int4-128"])
def test_a_batch_invariant_row_is_the_same_beside_any_others(kind):
    packed = quantize(weights({"layers": 3, "width": 192, "vocab": 500}), kind)
    model = RWKV7Cuda(packed, "cuda", invariant=True)
    prompt = torch.randint(1, 500, (70,))
    states = model.new_states(1, torch.float32)
    for piece in prompt.split(33):
        alone = model.forward(piece, [len(piece)], [0], states)
    states = model.new_states(200, torch.float32)
    tokens = torch.cat([torch.randint(1, 500, (199,)), prompt])
    together = model.forward(tokens, [*[1] * 199, 70], range(200), states)
    assert torch.equal(together[199], alone[0])
