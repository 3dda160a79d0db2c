"""Models with matrices of codes in blocks, as every GPU but a Hopper has them, against the numbers in fp32.

On a Hopper GPU they are asked for here; --portable has them anyway.
"""

import pytest
import torch
from checkpoints import tiny
from cuda_gpu import needs_gpu, off, unflushed
from row_adapters import write

from bench.make_checkpoint import random_rwkv7a
from rwkv_batch.engine.engine import Engine
from rwkv_batch.model.adapters.low_rank import low_rank
from rwkv_batch.model.adapters.parts import Scaling
from rwkv_batch.model.adapters.reader import read
from rwkv_batch.model.checkpoint import Checkpoint, from_tensors
from rwkv_batch.model.cuda.gemms.block_codes import CODES, DECODED
from rwkv_batch.model.cuda.packed import blocks, packing
from rwkv_batch.model.cuda.packed.blocks import BlockMatrix
from rwkv_batch.model.cuda.rwkv7 import RWKV7Cuda
from rwkv_batch.model.quantization.quantize import quantize
from rwkv_batch.model.rwkv7 import RWKV7
from rwkv_batch.ops.cuda.special.codes import most_warp_rows
from rwkv_batch.ops.low_rank import PreparedAdapter

pytestmark = needs_gpu
LOGITS = 1e-2
KINDS = ["int8", "fp8", "fp6", "fp5", "int4", "int4-128", "nf4"]
STEPS = [  # lengths and slots
    ([17, 1, 15, 16], [2, 0, 3, 8]),
    ([1, 1, 1], [3, 2, 0]),
    ([63, 1], [5, 2]),
    ([1] * 5, [5, 8, 2, 0, 3]),
    ([1], [2]),
]
SHAPE = {"layers": 3, "width": 192, "vocab": 500}


@pytest.fixture(autouse=True)
def in_blocks(monkeypatch):
    monkeypatch.setattr(packing, "in_tiles", lambda weights, architecture: False)


def unpacked(checkpoint: Checkpoint) -> Checkpoint:
    """An ordinary model of the numbers that the packed matrices stand for."""
    matrices = {name: weight.dequantize() for name, weight in checkpoint.packed.items()}
    return from_tensors("unpacked", dict(checkpoint.tensors) | matrices)


def models(kind: str, head: bool | None = None, shape: dict = SHAPE, **options) -> tuple[RWKV7Cuda, RWKV7]:
    packed = quantize(tiny(**shape, seed=3), kind, head)
    model = RWKV7Cuda(packed, "cuda", **options)
    assert isinstance(model.weights.layers[0].output, BlockMatrix)
    return model, RWKV7(unpacked(packed), "cuda")


CASES = [
    *(pytest.param(SHAPE, kind, id=f"3x192-{kind}") for kind in KINDS),
    *(pytest.param({"layers": 1, "width": 64, "vocab": 300}, kind, id=f"1x64-{kind}") for kind in KINDS),
    *(
        pytest.param({"layers": 6, "width": 1024, "vocab": 2000}, kind, id=f"6x1024-{kind}")
        for kind in ("int8", "fp6", "int4")
    ),
]


@pytest.mark.parametrize(("shape", "kind"), CASES)
@pytest.mark.parametrize("head", [False, True])
def test_logits_are_those_of_the_numbers(shape, kind, head):
    model, truth = models(kind, head, shape)
    states, wanted = model.new_states(9), truth.new_states(9)
    for lengths, slots in STEPS:
        tokens = torch.randint(1, shape["vocab"], (sum(lengths),))
        found = model.forward(tokens, lengths, slots, states)
        want = truth.forward(tokens, lengths, slots, wanted)
        assert found.shape == want.shape and off(found, want) < LOGITS


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", [*CODES, DECODED])
def test_every_method(kind, method, monkeypatch):
    """Where a matrix is decoded, by parts."""
    method = "codes32" if CODES.get(method, 0) > most_warp_rows(kind) else method
    monkeypatch.setattr(blocks, "DECODED_BYTES", 1 << 17)
    model, truth = models(kind, True)
    every = {f"{of} {size}": method for of in ("in", "out", "key", "value", "head") for size in range(1, 321)}
    model.autotuner.chosen |= every
    states, wanted = model.new_states(200), truth.new_states(200)
    for lengths, slots in [
        ([100, 120], [3, 5]),
        *[([1] * rows, range(rows)) for rows in (1, 8, 16, 24, 200)],
    ]:
        tokens = torch.randint(1, 500, (sum(lengths),))
        found = model.forward(tokens, lengths, slots, states)
        assert off(found, truth.forward(tokens, lengths, slots, wanted)) < LOGITS


@pytest.mark.parametrize("kind", ["int8", "nf4"])
@pytest.mark.parametrize("rows", [1, 9, 40, 130, 321])
def test_decode_of_many_rows_under_graphs(kind, rows):
    model, truth = models(kind)
    states, wanted = model.new_states(rows), truth.new_states(rows)
    model.capture(states, progress=False)
    for _ in range(4):
        tokens = torch.randint(1, 500, (rows,))
        found = unflushed(model, tokens, [1] * rows, range(rows), states)
        assert off(found, truth.forward(tokens, [1] * rows, range(rows), wanted)) < LOGITS


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_model_with_deep_embed(kind):
    packed = quantize(from_tensors("7a", random_rwkv7a(2, 128, 300)), kind)
    model, truth = RWKV7Cuda(packed, "cuda"), RWKV7(unpacked(packed), "cuda")
    states, wanted = model.new_states(2), truth.new_states(2)
    for lengths in ([40, 3], [1, 1]):
        tokens = torch.randint(1, 300, (sum(lengths),))
        found = model.forward(tokens, lengths, [0, 1], states)
        assert off(found, truth.forward(tokens, lengths, [0, 1], wanted)) < LOGITS


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_adapters_of_rows_lie_on_top(tmp_path, kind):
    plain = tiny(layers=2, width=128, vocab=400, seed=3)
    packed = quantize(plain, kind)
    adapter = read(write(tmp_path, plain, "lora", 1), plain)
    model, truth = RWKV7Cuda(packed, "cuda"), RWKV7(unpacked(packed), "cuda")
    model.add_adapters(1, 32, 512)
    model.adapters.load(0, low_rank(adapter, plain, Scaling(1.0), 32, torch.float16, pinned=True))
    small = low_rank(adapter, plain, Scaling(1.0), 32, torch.float32)
    truth.adapters = [PreparedAdapter.on(small, 128, 512, truth.device, truth.dtype)]
    states, wanted, of_rows = model.new_states(3), truth.new_states(3), [0, -1, 0]
    for lengths in ([20, 5, 9], [1, 1, 1], [1, 1, 1]):
        tokens = torch.randint(1, 400, (sum(lengths),))
        found = model.forward(tokens, lengths, range(3), states, adapters=of_rows)
        assert off(found, truth.forward(tokens, lengths, range(3), wanted, adapters=of_rows)) < LOGITS


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_invariant_row_is_the_same_beside_any_others(kind):
    model, _ = models(kind, invariant=True)
    prompt = torch.randint(1, 500, (70,))
    states = model.new_states(1, torch.float32)
    for piece in prompt.split(33):
        alone = model.forward(piece, [len(piece)], [0], states)
    states = model.new_states(200, torch.float32)
    tokens = torch.cat([torch.randint(1, 500, (199,)), prompt])
    together = model.forward(tokens, [*[1] * 199, 70], range(200), states)
    assert torch.equal(together[199], alone[0])


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_an_engine_says_that_many_rows_are_slower(kind, caplog):
    engine = Engine(tiny(**SHAPE), device="cuda", weights=kind, max_rows=8, prefill_tokens=64, l1=0)
    assert len(engine.generate([[1, 2, 3], [4]], max_tokens=5, stop_ids=[])) == 2
    engine.close()
    assert f"--weights {kind} is made for few rows" in caplog.text
