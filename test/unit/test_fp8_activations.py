"""`--activations fp8` without a GPU: the copies of matrices in fp8, what may multiply them, and refusals."""

from types import SimpleNamespace

import pytest
import torch
from checkpoints import tiny
from torch import Tensor

from app import command_line
from rwkv_batch.config import EngineConfig
from rwkv_batch.engine import memory
from rwkv_batch.engine.engine import Engine
from rwkv_batch.evaluate.compare import ReadText, compare
from rwkv_batch.model.cuda.gemms.autotune import likely
from rwkv_batch.model.cuda.gemms.gemms import Gemms
from rwkv_batch.model.cuda.packed.coded import CodedMatrix
from rwkv_batch.model.cuda.packed.orders import ordered_codes
from rwkv_batch.model.cuda.packed.packing import fp8_copy_bytes
from rwkv_batch.model.cuda.packed.weights import CudaWeights, pack_weights
from rwkv_batch.model.quantization.quantize import quantize
from rwkv_batch.ops.cuda.abi import IDENTITY
from rwkv_batch.ops.cuda.buffers import Buffers
from rwkv_batch.ops.cuda.gemms import Codes
from rwkv_batch.ops.device import DeviceError
from rwkv_batch.ops.weights.channels import Fp8BothWeight, Fp8Weight
from rwkv_batch.ops.weights.formats import FORMATS
from rwkv_batch.runner import backends

CPU, GPU = torch.device("cpu"), [torch.device("cuda", 0)]
CODED = ["int8", "int4", "int4-128"]
FP8 = {"fp8", "fp8/128"}
KINDS = ("in", "out", "key", "value")


def packed(name: str, fp8_copies: bool = True, head: bool | None = True) -> CudaWeights:
    checkpoint = quantize(tiny(layers=2, width=128, vocab=320), name, head)
    return pack_weights(checkpoint, CPU, fp8_copies=fp8_copies)


def gemms(weights: CudaWeights) -> Gemms:
    kernels = SimpleNamespace(
        has_lowrank=True,
        has_tile=True,
        overlaps=True,
        invariant=False,
        sparse8_fits=lambda rows, k: rows <= 8,
    )
    return Gemms(kernels, weights, None)


@pytest.mark.parametrize("name", FORMATS)
def test_a_matrix_is_packed_again_as_the_numbers_that_it_stands_for(name):
    weight = FORMATS[name].pack(torch.randn(70, 130))
    found, wanted = Fp8Weight.repack(weight, "cpu"), Fp8Weight.pack(weight.dequantize())
    for part in ("values", "scales"):
        assert torch.equal(found.parts[part].view(torch.uint8), wanted.parts[part].view(torch.uint8))


@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize("few_rows", [False, True])
def test_every_matrix_of_a_layer_has_a_copy_and_the_head_has_none(name, few_rows):
    checkpoint = quantize(tiny(layers=2, width=128, vocab=320), name, True)
    weights = pack_weights(checkpoint, CPU, few_rows=few_rows, fp8_copies=True)
    names = ("att.receptance", "att.key", "att.value", "att.output", "ffn.key", "ffn.value")
    for index, layer in enumerate(weights.layers):
        matrices = (*layer.rkv, layer.output, layer.key, layer.value)
        for of, matrix in zip(names, matrices, strict=True):
            assert isinstance(matrix, CodedMatrix) and matrix.format == name
            numbers = checkpoint.packed[f"blocks.{index}.{of}.weight"].dequantize()
            wanted, copy = Fp8Weight.pack(numbers).parts, matrix.in_fp8
            assert copy is not None and (copy.format, copy.shape) == ("fp8", tuple(numbers.shape))
            assert torch.equal(copy.codes, ordered_codes(wanted["values"].view(torch.uint8)))
            assert torch.equal(copy.scales, wanted["scales"])
    assert isinstance(weights.head, CodedMatrix) and weights.head.in_fp8 is None
    copies = sum(m.in_fp8.codes.nbytes for x in weights.layers for m in (*x.rkv, x.output, x.key, x.value))
    assert fp8_copy_bytes(checkpoint.packed) == copies


def test_matrices_of_fp8_need_no_copy():
    weights = packed("fp8")
    assert weights.layers[0].key.fp8_copy is None and weights.layers[0].key.in_fp8 is weights.layers[0].key
    assert fp8_copy_bytes(quantize(tiny(), "fp8").packed) == 0


@pytest.mark.parametrize("name", CODED)
def test_many_rows_may_run_by_the_products_of_fp8_and_few_run_as_without(name):
    plain, copied = gemms(packed(name, False)), gemms(packed(name))
    for kind in (*KINDS, "head", "out_split", "value_split"):
        for rows in (1, 8, 32, 64):
            assert copied.candidates(kind, rows) == plain.candidates(kind, rows)
    for kind in KINDS:
        assert {*copied.candidates(kind, 65)} == FP8 | {*plain.candidates(kind, 65)}
        assert copied.untimed(kind) == "fp8" and plain.untimed(kind) == "many"
        candidates = copied.candidates(kind, 512)
        assert next(method for method in likely(512) if method in candidates) == "fp8"
    for rows in (65, 960):
        assert copied.candidates("head", rows) == plain.candidates("head", rows)
    # A norm that writes fp8 adds up no partial sums.
    assert "partial sums" not in copied.candidates("out_split", 65)


class Fp8Kernels:
    """Those for x and w in fp8, by their definition."""

    invariant, has_lowrank, has_tile, overlaps = False, True, True, True

    def sparse8_fits(self, rows: int, k: int) -> bool:
        return False

    def gemm_lowrank(self, parts: object, mode: int) -> None:
        pass

    def quantize_rows(self, x: Tensor, codes: Tensor, scales: Tensor, square: bool) -> None:
        x = x.float().relu().square() if square else x.float()
        scales.view(-1).copy_(x.abs().amax(1) / 448)
        numbers = (x / scales.view(-1, 1)).to(torch.float8_e4m3fn)
        codes.view(x.shape).copy_(ordered_codes(numbers.view(torch.uint8)))

    def gemm_tile_fp8(
        self, ws: Codes, xs: list[Tensor], scales: list[Tensor], ys: list[Tensor], function: int, most: int
    ) -> None:
        assert ws.format == "fp8" and function == IDENTITY
        for w, w_scales, x, x_scales, y in zip(ws.codes, ws.scales, xs, scales, ys, strict=True):
            assert w_scales is not None
            products = x.view(torch.float8_e4m3fn).float() @ w.view(torch.float8_e4m3fn).float().T
            y.copy_(products * x_scales.view(-1, 1) * w_scales)


@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize("kind", ["in", "out", "value"])
def test_a_product_of_many_rows_is_that_of_the_copy_and_of_inputs_in_fp8(name, kind):
    checkpoint, rows = quantize(tiny(layers=2, width=128, vocab=320), name), 70
    weights = pack_weights(checkpoint, CPU, fp8_copies=True)
    of, b = Gemms(Fp8Kernels(), weights, None), Buffers(weights.buffer_shape, rows, {})  # type: ignore[arg-type]
    for inputs in (b.mixed, b.y, b.hidden):
        inputs.normal_()
    call = of.call(kind, weights.layers[1], b)
    xs = [x.clone() for x in call.xs]
    of.find(kind, "fp8").run(call)
    matrices = {
        "in": ("att.receptance", "att.key", "att.value"),
        "out": ("att.output",),
        "value": ("ffn.value",),
    }
    for x, y, matrix in zip(xs, call.ys, matrices[kind], strict=True):
        numbers = checkpoint.packed[f"blocks.1.{matrix}.weight"].dequantize()
        wanted = Fp8BothWeight.rounded(x.float()) @ Fp8Weight.pack(numbers).dequantize().T
        torch.testing.assert_close(y.float(), wanted, rtol=1e-3, atol=1e-3)


def test_choices_are_kept_apart_from_those_without_copies():
    names = {gemms(packed(name, copies)).format for name in CODED for copies in (False, True)}
    assert len(names) == 2 * len(CODED)


def test_the_buffers_of_a_step_have_room_for_inputs_in_fp8():
    assert packed("int4").buffer_shape.fp8 and packed("fp8").buffer_shape.fp8
    assert not packed("int4", False).buffer_shape.fp8


def test_copies_are_counted_before_a_model_is_loaded_beside_others(monkeypatch):
    checkpoint, gpu = quantize(tiny(width=512, vocab=1024), "int4"), torch.device("cuda", 0)
    without = int(memory.FILLED_UP * checkpoint.bytes_held(2)) + 1000
    monkeypatch.setattr(memory, "free_bytes", lambda device: without)
    monkeypatch.setattr(memory, "reserve_bytes", lambda device: 0)
    monkeypatch.setattr(memory, "describe", lambda device: "cuda:0")
    memory.check_weights(checkpoint, gpu, kept=0)
    with pytest.raises(DeviceError, match=r"^The weights of .* take .*\.$"):
        memory.check_weights(checkpoint, gpu, kept=0, fp8_copies=True)


@pytest.mark.parametrize(
    ("weights", "places", "options", "said"),
    [
        ("int8", [CPU], {}, r"is not for a CPU, but for Hopper GPUs \(H100, H200\); leave it out\.$"),
        ("fp8", [CPU], {}, r"is not for a CPU, .*; leave it out\.$"),
        ("int8", GPU, {"backend": "portable"}, r"is not for --backend portable, .*; leave it out\.$"),
        ("int8", GPU, {"backend": "torch"}, r"is not for --backend torch, .*; leave it out\.$"),
        (
            "",
            GPU,
            {},
            r"is for --weights int8, fp8, int4, int4-128, and .* is not rounded; give one of these",
        ),
        ("fp16", GPU, {}, r"is for --weights .* is in fp16; give one of these, or leave it out\.$"),
        ("nf4", GPU, {}, r"is for --weights .* is in nf4; give one of these, or leave it out\.$"),
    ],
)
def test_where_there_is_no_such_product_it_is_refused_in_one_sentence(weights, places, options, said):
    checkpoint = quantize(tiny(), weights) if weights else tiny()
    config = EngineConfig(activations="fp8", **options)
    with pytest.raises(DeviceError, match=f"^--activations fp8 {said}"):
        backends.create_runner(checkpoint, places, config)


def test_other_activations_and_invariance_are_refused():
    checkpoint = quantize(tiny(), "int8")
    with pytest.raises(DeviceError, match=r"^There are no activations int8; use fp8\.$"):
        backends.create_runner(checkpoint, GPU, EngineConfig(activations="int8"))
    both = EngineConfig(activations="fp8", batch_invariant=True)
    with pytest.raises(DeviceError, match=r"^--batch-invariant keeps activations in fp16; leave"):
        backends.create_runner(checkpoint, GPU, both)


@pytest.mark.parametrize("architecture", ["80", "90", "gfx942"])
def test_a_gpu_without_its_kernels_is_refused_before_weights_are_copied(architecture, monkeypatch):
    monkeypatch.setattr(backends.build, "architecture", lambda place: architecture)
    monkeypatch.setattr(backends, "describe", lambda place: "cuda:0 (A GPU)")
    with pytest.raises(
        DeviceError, match=r"is for Hopper GPUs .*, not for cuda:0 \(A GPU\); leave it out\.$"
    ):
        backends.create_runner(quantize(tiny(), "int4"), GPU, EngineConfig(activations="fp8"))


def test_an_engine_on_a_cpu_refuses_it():
    with pytest.raises(DeviceError, match=r"^--activations fp8 is not for a CPU"):
        Engine(tiny(), device="cpu", weights="int4", activations="fp8")


def test_the_command_line_has_it_for_all_models(capsys):
    parser = command_line()
    assert parser.parse_args(["--activations", "fp8"]).activations == "fp8"
    assert parser.parse_args([]).activations is None
    with pytest.raises(SystemExit):
        parser.parse_args(["--activations", "int8"])
    assert "fp8" in capsys.readouterr().err


def test_it_is_measured_by_rounding_both_sides():
    texts = [ReadText([5, 6, 7, 8, 9, 10]), ReadText([1, 2, 3, 4, 5], first=3)]
    names = ["int8", "fp8", "int4"]
    records = compare(tiny(vocab=300), texts, names, head=True, fp8_copies=True).records
    of = {record["weights"]: record for record in records}
    assert [*of] == [
        *("fp32", "int8", "int8, activations fp8", "fp8", "fp8, many rows", "int4", "int4, activations fp8")
    ]
    assert of["int8"]["kl"] < of["int8, activations fp8"]["kl"] < 2 * of["fp8, many rows"]["kl"]
    assert of["int4, activations fp8"]["mb"] == of["int4"]["mb"]
    assert "int8, activations fp8" not in {
        r["weights"] for r in compare(tiny(vocab=300), texts, names).records
    }
