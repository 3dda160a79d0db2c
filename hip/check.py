#!/usr/bin/env python3
"""Compile all kernels for AMD GPUs and check what can be checked without one.

    python hip/check.py                 as root on Debian: installs the compiler it needs
    python hip/check.py --table         also prints what each kernel takes on each GPU
    HIPCXX=/opt/rocm/bin/hipcc LLVM=/opt/rocm/llvm/bin python hip/check.py    with ROCm 6.4 or newer

One library for all GPUs is linked and loaded; it must export what the sources of the CUDA build do, with the
same structures. Every kernel must have waves of the GPU's size and no more than 64 KB of LDS, and no more
scratch memory and flat memory instructions than the limits below say; those of tile.cuh must use the matrix
cores. Exit code 1 if anything is wrong.
"""

import argparse
import ctypes
import os
import re
import shlex
import shutil
import struct
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rwkv_batch.ops.cuda import abi, build

ROOT = Path(__file__).resolve().parents[1]
WAVES = {"gfx90a": 64, "gfx942": 64, "gfx1100": 32, "gfx1151": 32, "gfx1201": 32}  # lanes
LDS = 64 << 10
# Bytes of scratch memory of a lane, where registers do not suffice: at most so many, of these kernels alone.
SCRATCH = {"wkv_decode_kernel": 16}
# Instructions that find out at run time which memory they mean: at most so many, of these kernels alone.
FLAT = {
    "HalfELb0EEv12TimeMixInput": 10,  # wkv_decode_fp16: what is deferred, whose address comes from LDS
    "HalfELb1EEv12TimeMixInput": 10,  # the same, scaled
    "sample_kernel": 9,  # penalties, whose address comes from a record
    "record_kernel": 4,
    "adjust_kernel": 5,
}
MATRIX = ("wkv_prefill_prepare", "wkv_prefill_scan")  # kernels that use the matrix cores
PACKAGES = ("clang-19", "lld-19", "llvm-19", "clang-tools-19", "hipcc", "libamdhip64-dev", "rocm-device-libs")
BITCODE = Path("/usr/lib/x86_64-linux-gnu/amdgcn/bitcode")
# Debian's device libraries lack these GPUs; each has a file with one constant.
LACKING = {"942": 9402, "1100": 11000, "1151": 11501, "1201": 12001}
MAGIC = b"__CLANG_OFFLOAD_BUNDLE__"
TEXT = {"check": True, "capture_output": True, "text": True}  # of subprocess.run


@dataclass(frozen=True)
class Kernel:
    """What the compiler made of one kernel for one GPU."""

    name: str
    wave: int
    registers: int
    scratch: int  # bytes of a lane
    lds: int  # bytes of a block, without what a launch adds
    flat: int
    matrix: int  # instructions of the matrix cores


def tool(name: str) -> str:
    """Path of a program of LLVM."""
    folder = os.environ.get("LLVM")
    found = shutil.which(name, path=folder) if folder else shutil.which(f"{name}-19")
    if found is None:
        sys.exit(f"There is no {name}; name the folder of ROCm's LLVM in LLVM.")
    return found


def debian_compiler(folder: Path) -> str:
    """Clang 19 with Debian's HIP, and device libraries completed in `folder`; installed if this may."""
    if not (shutil.which("clang++-19") and BITCODE.is_dir() and Path("/usr/include/hip").is_dir()):
        install = ["apt-get", "install", "-y", "-q", *PACKAGES]
        if os.geteuid() != 0 or shutil.which("apt-get") is None:
            sys.exit(
                f"There is no compiler for AMD GPUs; run {shlex.join(install)}, or name hipcc in HIPCXX."
            )
        environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        if subprocess.run(install, env=environment, stdout=subprocess.DEVNULL).returncode:
            subprocess.run(["apt-get", "update", "-q"], env=environment, stdout=subprocess.DEVNULL)
            subprocess.run(install, env=environment, stdout=subprocess.DEVNULL, check=True)
    folder.mkdir(parents=True, exist_ok=True)
    for file in BITCODE.glob("*.bc"):
        shutil.copy(file, folder)
    known = subprocess.run([tool("llvm-dis"), BITCODE / "oclc_isa_version_90a.bc", "-o", "-"], **TEXT).stdout
    for name, number in LACKING.items():
        file = folder / f"oclc_isa_version_{name}.bc"
        made = re.sub(r"i32 9010\b", f"i32 {number}", known)
        subprocess.run([tool("llvm-as"), "-", "-o", file], input=made, text=True, check=True)
    return f"clang++-19 -Werror --rocm-path=/usr --rocm-device-lib-path={shlex.quote(str(folder))}"


def code_objects(library: bytes) -> Iterator[tuple[str, bytes]]:
    """What the library holds for each GPU: the GPU's name, and an ELF file."""
    for found in re.finditer(MAGIC, library):
        start = found.start()
        (count,), at = struct.unpack_from("<Q", library, found.end()), found.end() + 8
        for _ in range(count):
            offset, size, length = struct.unpack_from("<3Q", library, at)
            target = library[at + 24 : at + 24 + length].decode()
            at += 24 + length
            if "amdgcn" in target and size:
                yield target.rsplit("-", 1)[1], library[start + offset : start + offset + size]


def kernels(code: Path) -> list[Kernel]:
    """Of one ELF file."""
    listing = subprocess.run([tool("llvm-objdump"), "-d", code], **TEXT).stdout
    texts = dict(re.findall(r"^[0-9a-f]+ <(\S+)>:\n((?:.+\n)*)", listing, re.MULTILINE))
    notes = subprocess.run([tool("llvm-readelf"), "--notes", code], **TEXT).stdout
    found = []
    for part in re.split(r"\n  - (?=\.ag|\.args)", notes)[1:]:

        def number(key: str, part: str = part) -> int:
            return int(re.search(rf"\.{key}:\s+(\d+)", part)[1])

        name = re.search(r"\n    \.name:\s+(\S+)", part)[1]
        found.append(
            Kernel(
                name,
                number("wavefront_size"),
                number("vgpr_count"),
                number("private_segment_fixed_size"),
                number("group_segment_fixed_size"),
                len(re.findall(r"\tflat_\w+", texts[name])),
                len(re.findall(r"\tv_(?:mfma|wmma)_f32_16x16x16_?f16", texts[name])),
            )
        )
    return found


def wrong(gpu: str, kernel: Kernel) -> Iterator[str]:
    """What is wrong with a kernel, one sentence each."""

    def limit(limits: dict[str, int]) -> int:
        return next((most for part, most in limits.items() if part in kernel.name), 0)

    if kernel.wave != WAVES[gpu]:
        yield f"{kernel.name} has waves of {kernel.wave} on {gpu}, not of {WAVES[gpu]}."
    if kernel.lds > LDS:
        yield f"{kernel.name} takes {kernel.lds} bytes of LDS on {gpu}, and there are {LDS}."
    if kernel.scratch > limit(SCRATCH):
        yield f"{kernel.name} takes {kernel.scratch} bytes of scratch on {gpu}; {limit(SCRATCH)} are allowed."
    if kernel.flat > limit(FLAT):
        yield f"{kernel.name} has {kernel.flat} flat memory instructions on {gpu}; {limit(FLAT)} are allowed."
    if any(part in kernel.name for part in MATRIX) and not kernel.matrix:
        yield f"{kernel.name} does not use the matrix cores of {gpu}."


def exported(library: Path) -> Iterator[str]:
    """How what the library exports differs from the sources of the CUDA build."""
    pattern = re.compile(r"^(?:extern \"C\" )?[\w ]+[ *]+(rwkv_\w+)\(", re.MULTILINE)
    declared = {
        name
        for source in (ROOT / "cuda").glob("*.cu")
        for name in pattern.findall(source.read_text(encoding="utf-8"))
    }
    symbols = subprocess.run([tool("llvm-nm"), "-D", "--defined-only", library], **TEXT).stdout
    there = set(re.findall(r" T (rwkv_\w+)", symbols))
    yield from (f"The library does not export {name}." for name in sorted(declared - there))
    yield from (
        f"The library exports {name}, which the CUDA build has not." for name in sorted(there - declared)
    )
    if different := abi.mismatch(ctypes.CDLL(str(library))):
        yield f"The structures are not those of the CUDA build: {different}."


def main() -> None:
    parser = argparse.ArgumentParser(description="Compile the kernels for AMD GPUs and check the result.")
    parser.add_argument("--table", action="store_true", help="print what each kernel takes")
    options = parser.parse_args()
    folder = ROOT / "build" / "hip-check"
    folder.mkdir(parents=True, exist_ok=True)
    if "HIPCXX" not in os.environ:
        os.environ["HIPCXX"] = debian_compiler(folder / "bitcode")
    library = build.build(",".join(WAVES))
    problems, found = list(exported(library)), defaultdict[str, list[Kernel]](list)
    for number, (gpu, code) in enumerate(code_objects(library.read_bytes())):
        file = folder / f"{number}-{gpu}.elf"
        file.write_bytes(code)
        found[gpu] += kernels(file)
    for gpu in WAVES:
        problems += [sentence for kernel in found[gpu] for sentence in wrong(gpu, kernel)]
        if options.table:
            for kernel in found[gpu]:
                print(gpu, kernel)
        print(
            f"{gpu}: {len(found[gpu])} kernels, at most {max(k.scratch for k in found[gpu])} bytes of scratch"
        )
    if len({len(kernels) for kernels in found.values()}) != 1 or found.keys() != WAVES.keys():
        problems.append(f"Not every GPU has the same kernels: { {gpu: len(k) for gpu, k in found.items()} }.")
    sys.exit("\n".join(problems) or 0)


if __name__ == "__main__":
    main()
