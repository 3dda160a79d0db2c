"""How the kernels are compiled for AMD GPUs: by hipcc, or by the command in the environment's HIPCXX."""

import os
import shlex
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SHARED, OWN = ROOT / "cuda", ROOT / "hip"
HOPPER_ONLY = (
    *("gemm_lowrank", "gemm_lowrank_resident", "gemm_tile", "gemm_tile4", "gemm_tile8", "gemm_tile_fp8"),
    *("gemm_many", "gemm_many4", "gemm_many8", "gemm_many_fp8"),
    *("norm_mix_decode_team", "quantize_rows", "decode_row", "decode_row_half", "decode_row_wide"),
)
QUIET = ("-Wno-unused-result", "-Wno-unused-const-variable")
# What the fast arithmetic of the CUDA build leaves out here too, but no reordering: sums have a fixed order.
FLAGS = ("-x", "hip", "-std=c++17", "-O3", "-fPIC", "-fno-math-errno", "-Wall", *QUIET)
# Products that are added are rounded once, but not where a draw must be the same as on any other device.
FUSED, EXACT = "-ffp-contract=fast-honor-pragmas", "-ffp-contract=off"


def command() -> list[str] | None:
    """The compiler, None if there is none."""
    if given := os.environ.get("HIPCXX"):
        return shlex.split(given)
    found = shutil.which("hipcc") or shutil.which(
        "hipcc", path=f"{os.environ.get('ROCM_PATH', '/opt/rocm')}/bin"
    )
    return [found] if found else None


def sources() -> list[Path]:
    """All files: those of hip/, and those of cuda/ that have no other form there and do not need a Hopper."""
    own = sorted(OWN.glob("*.cu"))
    other = {*HOPPER_ONLY, *(file.stem for file in own)}
    return [*(file for file in sorted(SHARED.glob("*.cu")) if file.stem not in other), *own]


def inputs() -> list[Path]:
    """The sources and what they include."""
    return sorted([*SHARED.glob("*.cu*"), *OWN.glob("*.cu*"), *OWN.glob("*.h")])


def is_exact(source: Path) -> bool:
    """Whether every operation of a file is rounded by itself."""
    return source.stem.startswith("sample")


def compile_flags(source: Path, architectures: list[str]) -> list[str]:
    """Options for one file, into an object for these architectures, such as gfx942."""
    contract = EXACT if is_exact(source) else FUSED
    return [*FLAGS, contract, *(f"--offload-arch={name}" for name in architectures)]
