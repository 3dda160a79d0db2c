"""The ways to run GEMMs with matrices of codes on a Hopper GPU, looked at without one."""

from types import SimpleNamespace

import pytest
import torch
from checkpoints import tiny

from rwkv_batch.model.cuda.gemms import autotune
from rwkv_batch.model.cuda.gemms.autotune import Autotuner, usable
from rwkv_batch.model.cuda.gemms.gemms import Gemms
from rwkv_batch.model.cuda.packed.weights import pack_weights
from rwkv_batch.model.quantization.quantize import quantize
from rwkv_batch.ops.cuda.buffers import Buffers
from rwkv_batch.ops.cuda.gemms import SPARSE_ROWS

CPU = torch.device("cpu")
WIDTH = 64


class Coded(SimpleNamespace):
    """The kernels that take matrices of 8 bits, on a CPU."""

    invariant, has_lowrank, has_tile, overlaps = False, True, True, True

    def sparse8_fits(self, rows, k):
        return rows in SPARSE_ROWS

    def gemm_sparse8(self, h, w, scales, partials, prefetch, together):
        codes = w.view(len(w), -1, 8, 2).mT.reshape(w.shape)  # columns in order
        partials[:1] = h.float() @ (codes.float() - 128) * scales
        return partials[:1]


class TestCodes:
    def packed(self, kind, **options):
        weights = pack_weights(quantize(tiny(width=WIDTH, vocab=300), kind), CPU, few_rows=True)
        return Gemms(Coded(**options), weights, None)

    def test_int8_for_many_rows_reads_all_units(self):
        weights = pack_weights(quantize(tiny(width=WIDTH, vocab=300), "int8"), CPU)
        assert Gemms(Coded(), weights, None).candidates("value", 1) == ("coded",)

    def test_choices_for_many_rows_are_not_those_for_few(self, monkeypatch, tmp_path):
        """What is the fastest where all units are read may not be where some are skipped."""
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU")
        monkeypatch.setattr(autotune.build, "build", lambda architecture: tmp_path / "kernels.so")
        checkpoint, files = quantize(tiny(width=WIDTH, vocab=300), "int8"), set()
        for few in (False, True):
            gemms = Gemms(Coded(architecture="90a"), pack_weights(checkpoint, CPU, few_rows=few), None)
            files.add(Autotuner.from_cache(gemms, CPU, lambda rows: lambda methods: None).file)
        assert len(files) == 2

    def test_int8_skips_inactive_units_of_a_few_rows(self):
        found = self.packed("int8")
        for tokens in (1, 2, 4, 8):
            assert found.candidates("value", tokens) == ("sparse", "coded")
            assert found.candidates("value_split", tokens) == ("whole", "sparse/8")
        for kind, tokens in [("value", 3), ("value", 16), ("key", 1), ("out", 8), ("in", 17), ("head", 1)]:
            assert found.candidates(kind, tokens) == ("coded",)
        assert found.candidates("in", 16) == ("coded", "beside")
        assert found.candidates("value_split", 3) == found.candidates("out_split", 8) == ("whole",)
        assert usable({"value 8": "sparse", "value 3": "sparse"}, found) == {"value 8": "sparse"}

    @pytest.mark.parametrize("kind", ["int8", "int4", "int4-128"])
    def test_many_rows_have_a_kernel_of_their_own(self, kind):
        """Which always runs for so many that nothing is timed."""
        found = self.packed(kind)
        for of in ("in", "out", "key", "value"):
            assert found.candidates(of, 96) == ("coded",)
            assert found.candidates(of, 97) == found.candidates(of, 5000) == ("coded", "many")
            assert found.untimed(of) == "many"

    def test_of_a_model_in_fp8_only_a_head_in_int8_does(self):
        weights = pack_weights(quantize(tiny(width=WIDTH, vocab=300), "fp8", True), CPU)
        found = Gemms(Coded(), weights, None)
        assert "many" not in found.candidates("key", 1000)
        assert found.candidates("head", 1000) == ("coded", "many")
        assert found.untimed("head") == "many"

    def test_so_many_rows_in_fp8_that_nothing_is_timed_run_by_cublaslt(self):
        """Which takes numbers of rows that are multiples of four alone."""
        weights = pack_weights(quantize(tiny(width=2 * WIDTH, vocab=300), "fp8"), CPU)
        found = Gemms(Coded(), weights, SimpleNamespace(algorithm_count=lambda shape: 1))
        assert found.candidates("key", 97)[-1] == "fp8/128" and found.candidates("key", 96)[-1] == "fp8lt0"
        assert found.untimed("key") == "fp8lt0"

    @pytest.mark.parametrize("kind", ["fp8", "int4"])
    def test_others_read_all_units(self, kind):
        assert self.packed(kind).candidates("value", 1) == ("coded",)

    @pytest.mark.parametrize(("kind", "most"), [("int8", 96), ("fp8", 64), ("int4", 96)])
    def test_norms_may_add_up_the_sums_over_parts_of_k(self, kind, most):
        """Where K is long enough to be split, and with fp8 the norm writes no codes."""
        weights = pack_weights(quantize(tiny(width=1024, vocab=300), kind), CPU)
        found = Gemms(Coded(), weights, None)
        for split in ("out_split", "value_split"):
            assert found.candidates(split, most) == ("whole", "partial sums")
            assert found.candidates(split, most + 1) == ("whole",)
        assert Gemms(Coded(invariant=True), weights, None).candidates("value_split", 8) == ("whole",)

    def test_a_batch_invariant_model_skips_none(self):
        found = self.packed("int8", invariant=True)
        assert found.candidates("value", 1) == found.candidates("value", 1000) == ("coded",)
        assert found.invariant_methods()["value"] == "coded"

    def test_the_value_projection_lies_by_units(self):
        checkpoint = quantize(tiny(width=WIDTH, vocab=300), "int8")
        found = Gemms(Coded(), pack_weights(checkpoint, CPU, few_rows=True), None)
        b = Buffers(found.weights.buffer_shape, 2, {})
        b.hidden.normal_().relu_()
        weights = checkpoint.packed[f"blocks.{len(found.weights.layers) - 1}.ffn.value.weight"].dequantize()
        partials = found.find("value", "sparse").run(found.call("value", found.weights.layers[-1], b))
        torch.testing.assert_close(partials.sum(0), b.hidden.float() @ weights.T)
