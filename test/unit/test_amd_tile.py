"""hip/tile_layout.h against the matrix instructions of AMD GPUs, emulated."""

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from tools import absent

HIP = Path(__file__).resolve().parents[2] / "hip"
EXPORTS = """
#include "tile_layout.h"
template <MatrixCore CORE>
int ask(int what, int lane, int n) {
    using L = TileLayout<CORE>;
    const int facts[] = {L::lanes, L::halves, L::sums, L::k(lane, n), L::row(lane, n)};
    return facts[what];
}
extern "C" int layout(int core, int what, int lane, int n) {
    if (core == 0) return ask<MatrixCore::CDNA>(what, lane, n);
    return core == 1 ? ask<MatrixCore::GFX11>(what, lane, n) : ask<MatrixCore::GFX12>(what, lane, n);
}
"""
LANES, HALVES, SUMS, K, ROW = range(5)


@dataclass(frozen=True)
class Instruction:
    """D [16, 16] += A [16, 16] B [16, 16] of a wave, as its instruction set guide says where numbers are.

    A[i][k] is at `operand(i, k)`, B[k][j] at `operand(j, k)`, D[i][j] at `sum(i, j)`: each a lane and the
    number's place in its registers. gfx11 wants lanes 16 to 31 to have the operands of 0 to 15.
    """

    lanes: int
    operand: Callable[[int, int], tuple[int, int]]
    sum: Callable[[int, int], tuple[int, int]]

    def run(self, a: np.ndarray, b: np.ndarray, d: np.ndarray) -> np.ndarray:
        """Registers `[lanes, numbers]` of a wave."""
        read = [[self.operand(index, k) for k in range(16)] for index in range(16)]
        matrix_a = np.array([[a[place] for place in row] for row in read], np.float32)
        matrix_b = np.array([[b[place] for place in row] for row in read], np.float32).T
        product, out = matrix_a @ matrix_b, d.copy()
        for i in range(16):
            for j in range(16):
                out[self.sum(i, j)] += product[i, j]
        return out


INSTRUCTIONS = {
    "v_mfma_f32_16x16x16_f16": Instruction(
        64, lambda index, k: (16 * (k // 4) + index, k % 4), lambda i, j: (16 * (i // 4) + j, i % 4)
    ),
    "v_wmma_f32_16x16x16_f16 of gfx11": Instruction(
        32, lambda index, k: (index, k), lambda i, j: (16 * (i % 2) + j, i // 2)
    ),
    "v_wmma_f32_16x16x16_f16 of gfx12": Instruction(
        32, lambda index, k: (16 * (k // 8) + index, k % 8), lambda i, j: (16 * (i // 8) + j, i % 8)
    ),
}


@pytest.fixture(scope="module")
def layout(tmp_path_factory):
    compiler = shutil.which("c++") or shutil.which("clang++-19")
    if compiler is None:
        absent("There is no C++ compiler.")
    folder = tmp_path_factory.mktemp("layout")
    (folder / "layout.cpp").write_text(EXPORTS)
    library = folder / "layout.so"
    command = [compiler, "-std=c++17", "-shared", "-fPIC", f"-I{HIP}", folder / "layout.cpp", "-o", library]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(library)).layout


@pytest.mark.parametrize("core", range(3), ids=INSTRUCTIONS)
def test_a_product_of_registers_filled_by_the_layout(layout, core):
    """left[row][k] and right[column][k] as tile.cuh fills and reads them; `right` is the instruction's A."""
    instruction = list(INSTRUCTIONS.values())[core]
    lanes, halves, sums = (layout(core, what, 0, 0) for what in (LANES, HALVES, SUMS))
    assert lanes == instruction.lanes
    rng = np.random.default_rng(0)
    left, right = rng.standard_normal((2, 16, 16)).astype(np.float16)
    before = rng.standard_normal((16, 16)).astype(np.float32)

    def registers(matrix: np.ndarray, what: int, numbers: int) -> np.ndarray:
        places = [[layout(core, what, lane, n) for n in range(numbers)] for lane in range(lanes)]
        return np.array([[matrix[lane % 16, n] for n in row] for lane, row in enumerate(places)])

    got = instruction.run(
        registers(right, K, halves), registers(left, K, halves), registers(before, ROW, sums)
    )
    want = before + left.astype(np.float32) @ right.astype(np.float32).T
    assert np.allclose(got, registers(want, ROW, sums), atol=1e-4)
    assert sorted((lane % 16, layout(core, ROW, lane, i)) for lane in range(lanes) for i in range(sums)) == [
        (row, column) for row in range(16) for column in range(16)
    ]


@pytest.mark.parametrize("core", [0, 2], ids=["CDNA", "GFX12"])
def test_sums_are_an_operand_as_they_lie(layout, core):
    lanes, halves, sums = (layout(core, what, 0, 0) for what in (LANES, HALVES, SUMS))
    assert halves == sums
    assert all(
        layout(core, K, lane, n) == layout(core, ROW, lane, n) for lane in range(lanes) for n in range(sums)
    )
