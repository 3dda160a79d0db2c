"""Tensors that go to a device in pieces arrive as they are, and numbers that are not finite are refused."""

import pytest
import torch
from checkpoints import tiny
from cuda_gpu import needs_gpu

from rwkv_batch.engine.engine import Engine
from rwkv_batch.model import checkpoint
from rwkv_batch.model.checkpoint import from_tensors
from rwkv_batch.model.cuda.packed import uploading
from rwkv_batch.model.cuda.packed.uploading import UploadedTensors
from rwkv_batch.model.files import CheckpointError
from rwkv_batch.model.stages import stage_of
from rwkv_batch.wire.protocol import Sampling

CPU = torch.device("cpu")
KEY = "blocks.1.ffn.key.weight"


def uploaded(tensors: dict[str, torch.Tensor], device: torch.device = CPU, progress=None) -> UploadedTensors:
    return UploadedTensors(from_tensors("it", tensors, values=False), device, progress)


def weights(dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    return {name: tensor.to(dtype) for name, tensor in tiny().tensors.items()}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(uploading, "BUFFER", 1000)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("device", [CPU, pytest.param(torch.device("cuda", 0), marks=needs_gpu)])
def test_every_tensor_arrives_as_it_is(dtype, device):
    given = weights(dtype)
    given["blocks.0.att.w1"] = given["blocks.0.att.w1"].mT.contiguous().mT  # of another layout
    tensors = uploaded(given, device)
    for name in tensors:
        found = tensors[name]
        assert found.dtype == dtype and found.device == device and found.is_contiguous()
        assert torch.equal(found.cpu(), given[name].view(found.shape)), name
        assert found.data_ptr() != given[name].data_ptr()
    tensors.finish()
    assert tensors["emb.weight"].data_ptr() == given["emb.weight"].data_ptr()


def test_tensors_go_to_the_devices_of_their_stages():
    given, parts = weights(), [range(1), range(1, 3)]
    places = [torch.device("meta"), CPU]
    whole = from_tensors("it", given, values=False)
    tensors = UploadedTensors(whole, CPU, None, lambda name: places[stage_of(name, parts)])
    found = {
        name: tensors[name].device.type for name in ("emb.weight", "blocks.0.ln0.weight", KEY, "head.weight")
    }
    assert [*found.values()] == ["meta", "meta", "cpu", "cpu"]
    assert stage_of("ln_out.bias", parts) == stage_of("blocks.2.att.x_r", parts) == 1


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_not_finite_is_refused_with_its_name(wrong):
    given = weights()
    given[KEY][-1, -1] = wrong
    tensors = uploaded(given)
    for name in tensors:
        tensors[name]
    with pytest.raises(CheckpointError, match=rf"^it: {KEY} holds numbers that are not finite; .*\.$"):
        tensors.finish()


def test_finite_numbers_whose_sum_is_not_are_taken():
    given = weights(torch.float32)
    given[KEY].fill_(3e38)
    tensors = uploaded(given)
    assert tensors[KEY].isfinite().all()
    tensors.finish()


def test_progress_ends_with_all_bytes_once_also_where_a_tensor_is_read_twice():
    said: list[tuple[int, int]] = []
    tensors = uploaded(weights(), progress=lambda done, total: said.append((done, total)))
    for name in (*tensors, "emb.weight"):
        tensors[name]
    total = sum(tensor.numel() for tensor in tiny().tensors.values()) * 2
    assert said[-1] == (total, total) and said == sorted(said)
    assert len(set(said)) == len(said) == len(tensors)


def test_progress_ends_also_where_not_all_tensors_are_needed():
    said: list[tuple[int, int]] = []
    tensors = uploaded(weights(), progress=lambda done, total: said.append((done, total)))
    assert tensors["emb.weight"].numel() and said[-1][0] < said[-1][1]
    tensors.finish()
    assert said[-1][0] == said[-1][1] == said[0][1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.usefixtures("own_tuning")
class TestAServedFile:
    @pytest.fixture
    def path(self, tmp_path):
        torch.save(weights(), tmp_path / "it.pth")
        return tmp_path / "it.pth"

    def test_it_says_what_the_same_tensors_say(self, path):
        asked = {"max_tokens": 12, "stop_ids": [], "sampling": Sampling(temperature=0.0)}
        options = {"device": "cuda", "max_rows": 2, "prefix_cache_mb": 0}
        of_file = Engine(path, **options).generate([[5, 6, 7]], **asked)
        of_tensors = Engine(checkpoint.load(path), **options).generate([[5, 6, 7]], **asked)
        assert of_file[0].text == of_tensors[0].text

    def test_one_with_numbers_that_are_not_finite_is_refused(self, path):
        given = weights()
        given[KEY][0, 0] = float("nan")
        torch.save(given, path)
        with pytest.raises(CheckpointError, match=KEY):
            Engine(path, device="cuda", max_rows=2)
