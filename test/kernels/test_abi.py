"""Structures, records and constants that Python and the kernels share, compared without a GPU."""

import ctypes
import re
import subprocess
from ctypes import Structure, c_int

import numpy as np
import pytest

from rwkv_batch.ops.cuda import abi, binding, build
from rwkv_batch.ops.cuda.feed import RECORD

NAMES = {file.name: file.read_text() for file in sorted(build.SOURCES.glob("*.cu"))}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The exported numbers, built for any architecture; it loads where there is no driver."""
    if build.nvcc() is None:
        pytest.skip("needs nvcc")
    file = tmp_path_factory.mktemp("abi") / "abi.so"
    sources = [str(build.SOURCES / "abi.cu"), "-o", str(file)]
    subprocess.run([build.nvcc(), *build.compile_flags("80"), "-shared", *sources], check=True)
    return ctypes.CDLL(str(file))


def record_layout(name: str, dtype: np.dtype) -> dict[str, int]:
    """As abi.layout, of a numpy record."""
    return {name: dtype.itemsize, **{f"{name}.{field}": at for field, (_, at) in dtype.fields.items()}}


def test_python_and_the_library_agree(library):
    assert abi.mismatch(library) is None


def test_the_record_of_a_sequence_has_its_layout(library):
    expected = record_layout("SequenceRecord", RECORD)
    found = {key: value for key, value in abi.exported(library).items() if key.startswith("SequenceRecord")}
    assert found == expected


def test_nothing_is_exported_that_python_does_not_know(library):
    known = abi.CONSTANTS | record_layout("SequenceRecord", RECORD)
    for structure in abi.STRUCTURES:
        known |= abi.layout(structure)
    assert abi.exported(library) == known


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
    assert abi.mismatch(library) == "TileShape is 20 there and 8 here"


@pytest.mark.parametrize("name", binding.SIGNATURES)
def test_a_function_takes_as_many_arguments_as_it_is_given(name):
    """Of the exported functions, whose arguments nothing else compares."""
    found = [m[1] for text in NAMES.values() for m in re.finditer(rf"^int {name}\(([^)]*)\)", text, re.M)]
    assert len(found) == 1
    assert found[0].count(",") + 1 == len(binding.SIGNATURES[name]) + 1  # and a stream
    assert found[0].rstrip().endswith("cudaStream_t stream")
