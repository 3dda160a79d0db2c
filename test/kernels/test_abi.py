"""Structures, records and constants that Python and the kernels share, compared without a GPU."""

import ctypes
import re
import subprocess
from ctypes import Structure, c_int

import numpy as np
import pytest

from rwkv_batch.ops.cuda import abi, build
from rwkv_batch.ops.cuda.inputs.feed import RECORD
from rwkv_batch.ops.cuda.signatures import SIGNATURES
from rwkv_batch.ops.cuda.special.codes import CODE_SIGNATURES
from rwkv_batch.sampling import structs_cuda

RECORDS = {
    "SequenceRecord": RECORD,
    "SampleRecord": structs_cuda.SAMPLE_RECORD,
    "BiasEntry": structs_cuda.BIAS_ENTRY,
    "PenaltyEntry": structs_cuda.PENALTY_ENTRY,
    "RowFilter": structs_cuda.ROW_FILTER,
}
SAMPLER_METHODS = ("GREEDY", "RAPID", "NUCLEUS", "NOISE")
NAMES = {file.name: file.read_text() for file in sorted(build.SOURCES.glob("*.cu"))}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory, nvcc: str) -> ctypes.CDLL:
    """The exported numbers, built for any architecture; it loads where there is no driver."""
    file = tmp_path_factory.mktemp("abi") / "abi.so"
    sources = [str(build.SOURCES / "abi.cu"), "-o", str(file)]
    subprocess.run([nvcc, *build.compile_flags("80"), "-shared", *sources], check=True)
    return ctypes.CDLL(str(file))


def record_layout(name: str, dtype: np.dtype) -> dict[str, int]:
    """The layout of a numpy record, in the form of abi.layout."""
    return {name: dtype.itemsize, **{f"{name}.{field}": at for field, (_, at) in dtype.fields.items()}}


def test_python_and_the_library_agree(library):
    assert abi.mismatch(library) is None


def test_python_has_every_exported_number(library):
    """Those that abi.py compares itself, and those of the records of sequences and of the sampler."""
    known = abi.CONSTANTS | {name: getattr(structs_cuda, name) for name in SAMPLER_METHODS}
    of_the_sampler = structs_cuda.SampleInput, structs_cuda.FilterInput, structs_cuda.AdjustInput
    for structure in (*abi.STRUCTURES, *of_the_sampler):
        known |= abi.layout(structure)
    for name, dtype in RECORDS.items():
        known |= record_layout(name, dtype)
    assert abi.exported(library) == known


def test_the_list_of_penalties_is_a_part_of_its_record():
    at, fields = structs_cuda.PENALTY_LIST_AT, structs_cuda.SAMPLE_RECORD.fields
    for name, (dtype, offset) in structs_cuda.PENALTY_LIST.fields.items():
        assert fields[name] == (dtype, at + offset)


def test_a_library_that_differs_is_refused(library, monkeypatch, tmp_path):
    class TileShape(Structure):
        _fields_ = (("groups", c_int), ("x_rows", c_int))

    monkeypatch.setitem(abi.CONSTANTS, "CHUNK", 17)
    assert abi.mismatch(library) == "CHUNK is 16 there and 17 here"
    monkeypatch.setattr(build, "build", lambda arch: tmp_path / "kernels.so")
    monkeypatch.setattr(build.ctypes, "CDLL", lambda path: library)
    with pytest.raises(build.BuildError, match=r"CHUNK is 16 there and 17 here.*rebuild"):
        build.load("none")
    monkeypatch.undo()
    monkeypatch.setattr(abi, "STRUCTURES", (TileShape,))
    assert abi.mismatch(library) == "TileShape is 24 there and 8 here"


@pytest.mark.parametrize("name", SIGNATURES | CODE_SIGNATURES)
def test_a_function_takes_as_many_arguments_as_it_is_given(name):
    """Of the exported functions, whose arguments nothing else compares."""
    found = [m[1] for text in NAMES.values() for m in re.finditer(rf"^int {name}\(([^)]*)\)", text, re.M)]
    assert len(found) == 1
    assert found[0].count(",") + 1 == len((SIGNATURES | CODE_SIGNATURES)[name]) + 1  # and a stream
    assert found[0].rstrip().endswith("cudaStream_t stream")
