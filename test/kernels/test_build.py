"""The kernels compile for every architecture, also where there is no GPU."""

import shutil
import subprocess
from types import SimpleNamespace

import pytest
import torch

from rwkv_batch.model.cuda.steps.graphs import decode_sizes
from rwkv_batch.ops.compiled import libraries
from rwkv_batch.ops.cuda import build

ARCHITECTURES = ("80", "86", "89", "90a", "120")


@pytest.mark.skipif(build.nvcc() is None, reason="needs nvcc")
@pytest.mark.parametrize("file", build.sources(), ids=lambda file: file.stem)
def test_every_file_compiles_for_every_architecture(file, tmp_path):
    targets = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in ARCHITECTURES]
    done = subprocess.run(
        [
            build.nvcc(),
            *build.FLAGS,
            *targets,
            "--threads",
            "2",
            "-Werror",
            "all-warnings",
            "-c",
            str(file),
            "-o",
            str(tmp_path / "out.o"),
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(build.nvcc() is None, reason="needs nvcc")
def test_a_path_may_hold_what_means_something_to_ninja(tmp_path, monkeypatch):
    sources = tmp_path / "my models: RWKV" / "cuda"
    sources.mkdir(parents=True)
    for file in (*build.SOURCES.glob("*.cuh"), build.SOURCES / "sequence_feed.cu"):
        shutil.copy(file, sources)
    monkeypatch.setattr(build, "SOURCES", sources)
    monkeypatch.setattr(libraries, "home", lambda: sources.parent / "build")
    assert build.build("90a").is_file()


def test_a_missing_compiler_is_one_sentence(monkeypatch):
    monkeypatch.setattr(build, "nvcc", lambda: None)
    with pytest.raises(build.BuildError, match="there is no nvcc"):
        build.build("00")


def test_a_missing_compiler_for_amd_is_one_sentence(monkeypatch):
    monkeypatch.setattr(build.hip, "command", lambda: None)
    with pytest.raises(build.BuildError, match=r"gfx000 .*there is no hipcc .*ROCm.*HIPCXX\.$"):
        build.build("gfx000")


def test_the_architecture_of_an_amd_gpu_is_the_name_of_its_instructions(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    named = SimpleNamespace(gcnArchName="gfx90a:sramecc+:xnack-")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: named)
    assert build.architecture(0) == "gfx90a"


@pytest.mark.parametrize("most", [1, 2, 3, 37, 320, 1000, 1024])
def test_the_ladder_ends_with_the_largest_batch_and_wastes_little(most):
    sizes = decode_sizes(most)
    assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == most
    for rows in range(1, most + 1):
        size = next(size for size in sizes if size >= rows)
        assert size < 2 * rows or size == 1
        assert size - rows < 64
