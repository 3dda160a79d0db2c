"""Builds the kernels in `cuda/` into a shared library, once for each version of the sources and architecture.

python -m rwkv_batch.ops.cuda.build            for the GPUs of this machine
python -m rwkv_batch.ops.cuda.build 80 90a     for these architectures, with or without a GPU
"""

import ctypes
import hashlib
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import torch
from tqdm import tqdm

from rwkv_batch.ops.cuda import abi

log = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[3]
SOURCES = ROOT / "cuda"
FLAGS = ("-std=c++17", "-O3", "--use_fast_math", "-Xcompiler", "-fPIC")


class BuildError(Exception):
    """The kernels cannot be built or used; the message says why and what to do."""


def architecture(device: torch.device | int) -> str:
    """The name of a GPU's architecture for nvcc: "90a", "86"."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"{major}{minor}{'a' if (major, minor) == (9, 0) else ''}"


def sources() -> list[Path]:
    """All .cu files, in order."""
    return sorted(SOURCES.glob("*.cu"))


def compile_flags(arch: str) -> list[str]:
    """Options of nvcc for one architecture."""
    return [*FLAGS, f"-gencode=arch=compute_{arch},code=sm_{arch}"]


@cache
def nvcc() -> str | None:
    """Path of the CUDA compiler; None if there is none."""
    return shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


@cache
def load(arch: str) -> ctypes.CDLL:
    """The library for that architecture, built first if it is missing. Raises BuildError."""
    file = build(arch)
    library = ctypes.CDLL(str(file))
    if different := abi.mismatch(library):
        raise BuildError(
            f"The CUDA kernels in {file} do not match rwkv_batch/ops/cuda/abi.py ({different}); delete that "
            "file and run make kernels to rebuild them."
        )
    return library


def build(arch: str) -> Path:
    """Compile the sources if there is no library for them yet; returns its path. Raises BuildError."""
    digest = hashlib.sha256(" ".join(compile_flags(arch)).encode())
    for file in sorted(SOURCES.glob("*.cu*")):
        digest.update(file.name.encode() + file.read_bytes())
    library = _home() / f"sm_{arch}-{digest.hexdigest()[:16]}" / "kernels.so"
    if library.is_file():
        return library
    compiler = nvcc()
    if compiler is None:
        raise BuildError(
            "The CUDA kernels are not built and there is no nvcc to build them; install the CUDA toolkit "
            "(13.0)."
        )
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        _run_ninja(Path(folder), compiler, arch)
        os.replace(Path(folder) / "kernels.so", library)  # atomic: two processes may build at once
    return library


def _home() -> Path:
    """Where libraries are kept: in the repository, or in the user's cache where that is read-only."""
    if os.access(ROOT, os.W_OK):
        return ROOT / "build" / "kernels"
    return Path.home() / ".cache" / "rwkv-batch" / "kernels"


def _run_ninja(folder: Path, compiler: str, arch: str) -> None:
    ninja = shutil.which("ninja", path=str(Path(sys.executable).parent)) or shutil.which("ninja")
    if ninja is None:
        raise BuildError(
            "The CUDA kernels are not built and there is no ninja to build them; run pip install ninja."
        )
    files = sources()
    rules = [
        f"nvcc = {shlex.quote(compiler).replace('$', '$$')}",
        f"flags = {' '.join(compile_flags(arch))}",
        "rule compile",
        "  command = $nvcc $flags -MD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "rule link",
        "  command = $nvcc $flags -shared $in -o $out",
        *(f"build {file.stem}.o: compile {_ninja_path(file)}" for file in files),
        f"build kernels.so: link {' '.join(file.stem + '.o' for file in files)}",
    ]
    (folder / "build.ninja").write_text("\n".join([*rules, ""]))
    log.info("building %d CUDA files for sm_%s (once; under a few minutes)", len(files), arch)
    command = [ninja, "-C", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = []
    assert process.stdout is not None
    with tqdm(total=len(files) + 1, desc=f"building CUDA kernels for sm_{arch}", unit="file") as bar:
        for line in process.stdout:
            lines.append(line)
            bar.update(line.startswith("["))
    if process.wait():
        raise BuildError(f"nvcc could not build the kernels for sm_{arch}; its output:\n{''.join(lines)}")


def _ninja_path(path: Path) -> str:
    """A path as a build statement of ninja takes it."""
    return re.sub(r"[$ :]", r"$\g<0>", str(path))


def main() -> None:
    archs = sys.argv[1:] or sorted({architecture(i) for i in range(torch.cuda.device_count())})
    if not archs:
        sys.exit(
            "There is no GPU here; name the architectures to build for, such as: python -m "
            "rwkv_batch.ops.cuda.build 90a"
        )
    for arch in archs:
        try:
            print(build(arch))
        except BuildError as error:
            sys.exit(str(error))


if __name__ == "__main__":
    main()
