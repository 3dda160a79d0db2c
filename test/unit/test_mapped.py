"""Pages of mapped files leave a process that has read them, and only these."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tools import needs_proc

from bench.make_checkpoint import random_checkpoint
from rwkv_batch.engine.engine import Engine
from rwkv_batch.model.files import read_tensors
from rwkv_batch.ops.mapped import let_go

NUMBERS = torch.arange(1 << 20).reshape(1024, 1024).float()


def resident(tensor):
    """Bytes of the tensor's memory that are in this process."""
    first, last = tensor.data_ptr() // 4096, (tensor.data_ptr() + tensor.nbytes) // 4096
    with Path("/proc/self/pagemap").open("rb", buffering=0) as file:
        file.seek(8 * first)
        pages = np.frombuffer(file.read(8 * (last - first)), np.uint64)
    return 4096 * int((pages >> np.uint64(63)).sum())


@pytest.fixture(params=["numbers.pth", "numbers.safetensors"])
def mapped(request, tmp_path):
    needs_proc()
    file = tmp_path / request.param
    torch.save({"x": NUMBERS}, file) if file.suffix == ".pth" else save_file({"x": NUMBERS}, file)
    return read_tensors(file)["x"]


@pytest.mark.parametrize("turned", [False, True])
def test_what_has_been_read_leaves_and_comes_back(mapped, turned):
    assert mapped.sum() == NUMBERS.sum() and resident(mapped) > NUMBERS.nbytes // 2
    let_go(mapped.T if turned else mapped)
    assert resident(mapped) < NUMBERS.nbytes // 16
    assert torch.equal(mapped, NUMBERS)


def test_only_the_part_that_is_named_leaves(mapped):
    assert mapped.sum() == NUMBERS.sum()
    let_go(mapped[:512])
    assert NUMBERS.nbytes // 4 < resident(mapped) < NUMBERS.nbytes * 3 // 4
    assert torch.equal(mapped, NUMBERS)


def test_numbers_that_were_written_stay(mapped):
    mapped[700] = 7.0
    let_go(mapped)
    assert (mapped[700] == 7.0).all() and torch.equal(mapped[:700], NUMBERS[:700])


@pytest.mark.parametrize(
    "of", [lambda x: x[:, ::2], lambda x: x.clone(), lambda x: x[:0], lambda x: x.to("meta")]
)
def test_other_tensors_stay_as_they_are(mapped, of):
    other = of(mapped)
    let_go(other)
    assert other.is_meta or torch.equal(other, of(NUMBERS))
    assert torch.equal(mapped, NUMBERS)


def mapped_bytes(file):
    """Of a file, in this process."""
    here, found = False, 0
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if "-" in line.partition(" ")[0]:
            here = line.endswith(str(file))
        elif here and line.startswith("Rss:"):
            found += 1024 * int(line.split()[1])
    return found


@pytest.mark.parametrize("weights", [None, "int8"])
def test_a_model_on_a_cpu_leaves_its_file(tmp_path, weights):
    needs_proc()
    file = tmp_path / "model.pth"
    tensors = random_checkpoint(4, 512, 2048)
    torch.save({name: tensor.half() for name, tensor in tensors.items()}, file)
    engine = Engine(str(file), device="cpu", weights=weights)
    assert mapped_bytes(file) < file.stat().st_size // 2
    engine.close()
