"""int4 by what a model does with a text: closer to its products than int4 without, and the same as a file."""

import pytest
import torch
from checkpoints import refusal, tiny, write_pth

from bench.make_checkpoint import random_rwkv6
from rwkv_batch.evaluate.compare import ReadText, compare
from rwkv_batch.model.checkpoint import from_tensors
from rwkv_batch.model.quantization.calibrate import SHRINKS, calibrated
from rwkv_batch.model.quantization.packed_file import load
from rwkv_batch.model.quantization.quantize import quantize
from rwkv_batch.ops.weights.groups import CALIBRATED
from rwkv_batch.quantize import main

pytestmark = pytest.mark.thorough

TEXTS = [torch.randint(1, 400, (300,), generator=torch.Generator().manual_seed(0)).tolist(), [5, 6, 7]]
MODELS = [tiny(vocab=400), from_tensors("m6", random_rwkv6(2, 64, 400))]


def group_error(group: torch.Tensor, heed: torch.Tensor, shrink: float) -> float:
    """By the formula, in fp64 but for the step and the smallest number, which are fp16."""
    low, high = group.min() * shrink, group.max() * shrink
    low, step = low.half().double(), ((high - low) / 15).half().double()
    rounded = ((group.double() - low) / step).round().clamp(0, 15) * step + low
    return float((heed.double() * (rounded - group) ** 2).sum())


@pytest.mark.parametrize("name", CALIBRATED)
def test_each_group_has_the_best_of_the_ranges(name):
    torch.manual_seed(0)
    kind, matrix, heed = CALIBRATED[name], torch.randn(20, 300), torch.rand(300) ** 3
    found, size = kind.pack_heeding(matrix, heed, SHRINKS).dequantize().double(), kind.group
    shrunk = 0
    for row in range(20):
        for start in range(0, 300, size):
            part = slice(start, start + size)
            errors = [group_error(matrix[row, part], heed[part], shrink) for shrink in SHRINKS]
            error = float((heed[part].double() * (found[row, part] - matrix[row, part]) ** 2).sum())
            if start + size <= 300:  # the last group's last number counts more than once
                assert error == pytest.approx(min(errors), rel=1e-3)
            shrunk += min(errors) < errors[0]
    assert shrunk > 10


def test_inputs_and_groups_of_zeros_do_no_harm():
    matrix, heed = torch.randn(8, 128), torch.zeros(128)
    matrix[:, :64] = 0
    for each in (heed, heed + 1e30):
        found = CALIBRATED["int4"].pack_heeding(matrix, each, SHRINKS).dequantize()
        assert found.isfinite().all() and not found[:, :64].any()
        assert (found - matrix).norm() < 0.2 * matrix.norm()


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.family)
def test_the_large_matrices_are_packed_and_have_another_fingerprint(model):
    found, plain = calibrated(model, "int4", TEXTS), quantize(model, "int4")
    assert found.packed.keys() == plain.packed.keys() and found.weights == "int4"
    assert len({model.fingerprint, found.fingerprint, plain.fingerprint}) == 3
    assert found.fingerprint == calibrated(model, "int4", TEXTS).fingerprint
    assert found.fingerprint != calibrated(model, "int4", TEXTS[1:]).fingerprint


def test_a_model_is_closer_to_itself_on_other_texts():
    others = torch.randint(1, 400, (400,), generator=torch.Generator().manual_seed(1)).tolist()
    records = compare(MODELS[0], [ReadText(others)], [*CALIBRATED], calibration=TEXTS).records
    divergence = {record["weights"]: record["kl"] for record in records}
    for name in CALIBRATED:
        assert divergence[f"{name}, calibrated"] < divergence[name]


def test_a_file_of_it_is_written_and_read(tmp_path, capsys):
    model = write_pth(tmp_path / "m.pth", dict(tiny(vocab=65536).tensors))
    (tmp_path / "text.txt").write_text("The capital of France is Paris. " * 9)
    run = [str(model), str(tmp_path / "out.safetensors"), "--calibrate", str(tmp_path / "text.txt")]
    assert main([*run, "--weights", "int4-128", "--quantize-head"]) == 0
    found = load(tmp_path / "out")
    assert found.weights == "int4-128" and found.fingerprint in capsys.readouterr().out
    assert {weight.format for weight in found.packed.values()} == {"int4-128", "int8"}
    assert main([*run, "--weights", "int8"]) == 2
    assert "int4-128" in capsys.readouterr().err
    assert main([*run[:2], "--calibrate", str(tmp_path / "no.txt"), "--weights", "int4"]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_what_cannot_be_calibrated_is_refused():
    assert "one token" in refusal(lambda: calibrated(tiny(), "int4", [[]]))
    assert "already" in refusal(lambda: calibrated(quantize(tiny(), "int8"), "int4", TEXTS))
