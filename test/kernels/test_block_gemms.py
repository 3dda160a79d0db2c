"""The GEMMs of a layer with matrices of codes in blocks, by every method, and how these are packed."""

from types import SimpleNamespace

import pytest
import torch
from checkpoints import tiny
from cuda_gpu import DEVICE, needs_gpu, normal, off

from rwkv_batch.model.checkpoint import Checkpoint
from rwkv_batch.model.cuda.gemms import calls
from rwkv_batch.model.cuda.gemms.autotune import likely
from rwkv_batch.model.cuda.gemms.block_codes import CODES, DECODED
from rwkv_batch.model.cuda.gemms.gemms import Gemms
from rwkv_batch.model.cuda.gemms.kinds import KINDS as GEMMS
from rwkv_batch.model.cuda.gemms.kinds import WHOLE
from rwkv_batch.model.cuda.packed import blocks
from rwkv_batch.model.cuda.packed.blocks import BlockMatrix
from rwkv_batch.model.cuda.packed.packing import in_tiles
from rwkv_batch.model.cuda.packed.weights import CudaLayer, CudaWeights, pack_weights
from rwkv_batch.model.quantization.quantize import quantize
from rwkv_batch.ops.cuda.buffers import Buffers
from rwkv_batch.ops.cuda.special.codes import most_warp_rows

WIDTH = 128
SHAPE = {"layers": 2, "width": WIDTH, "vocab": 300}
LARGE = ("in", "out", "key", "value", "head")
ANY_GPU = "86"
KINDS = ["int8", "fp8", "fp6", "fp5", "int4", "int4-128", "nf4"]
PRODUCTS = [
    *((kind, method) for kind in KINDS for method, rows in CODES.items() if rows <= most_warp_rows(kind)),
    *(pytest.param(kind, DECODED, marks=pytest.mark.cublas) for kind in KINDS),
]


def packed(kind: str) -> tuple[Checkpoint, CudaWeights]:
    checkpoint = quantize(tiny(**SHAPE), kind)
    return checkpoint, pack_weights(checkpoint, torch.device(DEVICE), ANY_GPU)


def of(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    """A matrix of the last layer in fp64, transposed."""
    found = checkpoint.packed.get(name) or checkpoint.packed[f"blocks.1.{name}.weight"]
    return found.dequantize().double().T.to(DEVICE)


class TestMethods:
    pytestmark = needs_gpu

    @pytest.mark.parametrize(("kind", "method"), PRODUCTS)
    @pytest.mark.parametrize("rows", [1, 7, 70])
    def test_products(self, kernels, kind, method, rows, monkeypatch):
        """Where a matrix is decoded, by parts."""
        monkeypatch.setattr(blocks, "DECODED_BYTES", 2 * 64 * 4 * WIDTH)
        checkpoint, weights = packed(kind)
        gemms, layer = Gemms(kernels, weights, None), weights.layers[1]
        b = Buffers(weights.buffer_shape, rows, {})
        for tensor in (b.mixed, b.y, b.normed, *b.low.values()):
            tensor.copy_(normal(*tensor.shape))
        run_gemm(gemms, "in", layer, b, method)
        for name, x, y in zip(("receptance", "key", "value"), b.mixed, b.rkv, strict=False):
            assert off(y, x.double() @ of(checkpoint, f"att.{name}")) < 2e-3
        x = b.mixed[3].double() @ layer.low_in["w"].double().T
        assert off(b.low["w"], x.tanh()) < 2e-3
        run_gemm(gemms, "out", layer, b, method)
        assert off(b.out, b.y.double() @ of(checkpoint, "att.output")) < 2e-3
        run_gemm(gemms, "key", layer, b, method)
        x = b.mixed.view(-1, WIDTH)[:rows].double() @ of(checkpoint, "ffn.key")
        assert off(b.hidden, x.relu().square()) < 2e-3
        gemms.find("value", method).run(calls.value(layer, b, prefetch=blocks_of(layer.key)))
        assert off(b.out, b.hidden.double() @ of(checkpoint, "ffn.value")) < 2e-3
        if isinstance(weights.head, BlockMatrix):
            logits = normal(rows, len(weights.head))
            gemms.find("head", method).run(calls.head(weights.head, b.normed, logits))
            wanted = b.normed.double() @ of(checkpoint, "head.weight")
            assert off(logits[:, :300], wanted) < 2e-3 and not logits[:, 300:].any()


def run_gemm(gemms: Gemms, kind: str, layer: CudaLayer, b: Buffers, method: str) -> None:
    assert gemms.find(kind, method).run(gemms.call(kind, layer, b)) is None  # no partial sums


def blocks_of(matrix: object) -> torch.Tensor:
    assert isinstance(matrix, BlockMatrix)
    return matrix.codes


class TestChoice:
    """Without a GPU."""

    def gemms(self, kind: str, invariant: bool = False) -> Gemms:
        kernels = SimpleNamespace(
            has_lowrank=False,
            has_tile=False,
            overlaps=False,
            invariant=invariant,
            sparse_fits=lambda rows, k: False,
        )
        weights = pack_weights(quantize(tiny(**SHAPE), kind, True), torch.device("cpu"), ANY_GPU)
        return Gemms(kernels, weights, None)

    def test_few_rows_stream_and_many_are_decoded(self):
        gemms = self.gemms("int8")
        for kind in LARGE:
            assert gemms.candidates(kind, 16) == (*CODES, DECODED)
            assert gemms.candidates(kind, 1024) == (DECODED,) == (gemms.untimed(kind),)
        assert (
            gemms.candidates("out_split", 200) == (WHOLE,) and gemms.candidates("low_out", 1)[0] == "stream16"
        )
        assert gemms.format == "int8-blocks"

    @pytest.mark.parametrize("tokens", [1, 16, 17, 64, 65, 256, 1024])
    def test_there_is_a_guess_for_every_kind(self, tokens):
        gemms = self.gemms("nf4")
        for kind in GEMMS:
            candidates = gemms.candidates(kind, tokens)
            guess = next(method for method in likely(tokens) if method in candidates)
            assert kind not in LARGE or guess == ("codes16" if tokens <= 64 else DECODED)

    def test_one_method_for_any_number_of_rows(self):
        chosen = self.gemms("int4", invariant=True).invariant_methods(4096)
        assert {chosen[kind] for kind in LARGE} == {"codes16"} and chosen["low_out"] == "stream16"

    @pytest.mark.parametrize("kind", KINDS)
    def test_hopper_keeps_its_own_form(self, kind):
        assert in_tiles(kind, "90a") == (kind not in ("fp6", "fp5", "nf4"))
        for other in ("80", "86", "89", "100", "120", "gfx942", "gfx1100", "portable-90-gfx942"):
            assert not in_tiles(kind, other)

    def test_a_model_has_room_for_one_decoded_matrix(self, monkeypatch):
        checkpoint = quantize(tiny(**SHAPE), "int8", True)

        launches: list[int] = []  # of a layer, to decode and multiply by parts

        def room() -> int:
            weights = pack_weights(checkpoint, torch.device("cpu"), ANY_GPU)
            launches.append(weights.decoding_launches)
            matrices = [weights.head, *(m for layer in weights.layers for m in (*layer.rkv, layer.value))]
            rooms = {id(m.decoded): m.decoded for m in matrices if isinstance(m, BlockMatrix)}
            (only,) = rooms.values()
            assert weights.decoded_bytes == only.nbytes == only.tensor.nbytes
            return only.nbytes

        assert room() == 2 * 4 * WIDTH * WIDTH  # the channel mix's
        monkeypatch.setattr(blocks, "DECODED_BYTES", 2 * WIDTH * WIDTH)
        assert room() == 2 * 64 * 4 * WIDTH  # of which at least 64 outputs fit
        assert launches == [2 * 6, 2 * (4 + 2 + 2)]  # four matrices, key and value
        plain = pack_weights(tiny(**SHAPE), torch.device("cpu"), ANY_GPU)
        assert plain.decoding_launches == plain.decoded_bytes == 0
