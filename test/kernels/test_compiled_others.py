"""The kernels that are no GEMMs compile for every architecture, also where there is no GPU."""

import pytest
from compiled_once import complaints_of_any_architecture

from rwkv_batch.ops.cuda import build

SOURCES = [file for file in build.sources() if not file.stem.startswith("gemm_")]


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: file.stem)
def test_it_compiles_for_every_architecture(file, tmp_path, nvcc):
    wrong = complaints_of_any_architecture(nvcc, file, tmp_path / "out.o")
    assert not wrong, wrong
