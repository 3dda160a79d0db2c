"""Builds the kernels into a shared library, once for each version of the sources and architecture.

python -m rwkv_batch.ops.cuda.build            for the GPUs of this machine
python -m rwkv_batch.ops.cuda.build 80 90a     for these architectures, with or without a GPU
python -m rwkv_batch.ops.cuda.build gfx942     for AMD GPUs; see hip/README.md
"""

import ctypes
import logging
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
from tqdm import tqdm

from rwkv_batch.ops.compiled import bytecode, hip, libraries
from rwkv_batch.ops.compiled.libraries import BuildError
from rwkv_batch.ops.cuda import abi
from rwkv_batch.ops.progress import hidden

log = logging.getLogger(__name__)

SOURCES = libraries.ROOT / "cuda"
PORTABLE = "portable-"
# By the AMD GPU whose matrix layout a portable build has: RWKV_TILE of hip/tile.cuh.
TILES = {"gfx942": 9, "gfx1100": 11, "gfx1201": 12}
FLAGS = ("-std=c++17", "-O3", "--use_fast_math", "-Xcompiler", "-fPIC")


@dataclass(frozen=True)
class Recipe:
    """How the kernels become a library for an architecture, or for several."""

    name: str  # of the architecture, "sm_90a" or "gfx942"
    compiler: list[str] | None  # a command, None if there is none
    missing: str  # what to do then
    sources: list[Path]
    inputs: list[Path]  # the sources and what they include
    flags: Callable[[Path], list[str]]  # of a source
    libraries: list[str]  # to link with

    def digest(self) -> str:
        """Of all that the library depends on but the compiler."""
        words = (" ".join([source.name, *self.flags(source)]) for source in self.sources)
        return libraries.digest(self.inputs, words)


def recipe(arch: str) -> Recipe:
    """For an architecture as nvcc names it, such as "90a", or AMD ones, such as "gfx942,gfx1100".

    "portable-90-gfx942": the kernels for such an AMD GPU by nvcc, to test them on such an NVIDIA GPU.
    """
    if arch.startswith("gfx"):
        return Recipe(
            arch.replace(",", "-"),
            hip.command(),
            "no hipcc to build them; install ROCm (6.4 or newer), or name the compiler in HIPCXX",
            hip.sources(),
            hip.inputs(),
            lambda source: hip.compile_flags(source, arch.split(",")),
            ["--hip-link", "-lamdhip64"],
        )
    compiler = nvcc()
    command = [compiler] if compiler else None
    missing = "no nvcc to build them; install the CUDA toolkit (13.0)"
    if arch.startswith(PORTABLE):
        number, _, target = arch.removeprefix(PORTABLE).partition("-")
        if target not in TILES:
            raise BuildError(f"{arch} names none of {', '.join(TILES)}; use portable-90-gfx942.")
        flags = partial(portable_flags, number, target)
        return Recipe(arch, command, missing, hip.sources(), hip.inputs(), flags, [])
    inputs = sorted(SOURCES.glob("*.cu*"))
    return Recipe(f"sm_{arch}", command, missing, sources(), inputs, lambda _: compile_flags(arch), [])


def architecture(device: torch.device | int) -> str:
    """The name of a GPU's architecture: "90a", "86", "gfx942"."""
    if torch.version.hip:
        return str(torch.cuda.get_device_properties(device).gcnArchName).split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"{major}{minor}{'a' if (major, minor) == (9, 0) else ''}"


def portable_architecture(device: torch.device | int, target: str = "gfx942") -> str:
    """The name of the build that tests the kernels for an AMD GPU on an NVIDIA one: "portable-90-gfx942"."""
    return f"{PORTABLE}{''.join(map(str, torch.cuda.get_device_capability(device)))}-{target}"


def sources() -> list[Path]:
    """All .cu files, in order."""
    return sorted(SOURCES.glob("*.cu"))


def compile_flags(arch: str) -> list[str]:
    """Options of nvcc for one architecture."""
    return [*FLAGS, f"-gencode=arch=compute_{arch},code=sm_{arch}"]


def portable_flags(number: str, target: str, source: Path) -> list[str]:
    """Options of nvcc for one file of the AMD kernels, with arithmetic as hipcc's flags have it there."""
    exact = ["-fmad=false"] if hip.is_exact(source) else []
    code = f"-gencode=arch=compute_{number},code=sm_{number}"
    defines = ["-DRWKV_PORTABLE", f"-DRWKV_TILE={TILES[target]}"]
    return ["-std=c++17", "-O3", "-Xcompiler", "-fPIC", *defines, *exact, code]


@cache
def nvcc() -> str | None:
    """Path of the CUDA compiler; None if there is none."""
    return shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


@cache
def load(arch: str) -> ctypes.CDLL:
    """The library for that architecture, built first if it is missing. Raises BuildError."""
    file = build(arch)
    try:
        library = ctypes.CDLL(str(file))
    except OSError as error:
        raise BuildError(
            f"The kernels in {file} cannot be loaded ({error}); delete that file and run make kernels to "
            "rebuild them."
        ) from error
    if different := abi.mismatch(library):
        raise BuildError(
            f"The CUDA kernels in {file} do not match rwkv_batch/ops/cuda/abi.py ({different}); delete that "
            "file and run make kernels to rebuild them."
        )
    return library


def build(arch: str) -> Path:
    """Compile the sources if there is no library for them yet; returns its path. Raises BuildError."""
    how = recipe(arch)
    return libraries.library(how.name, how.digest(), lambda folder: _compile(folder, how))


def _compile(folder: Path, how: Recipe) -> None:
    if how.compiler is None:
        raise BuildError(f"The kernels for {how.name} are not built and there is {how.missing}.")
    _run_ninja(folder, how, how.compiler)


def _run_ninja(folder: Path, how: Recipe, compiler: list[str]) -> None:
    ninja = shutil.which("ninja", path=str(Path(sys.executable).parent)) or shutil.which("ninja")
    if ninja is None:
        raise BuildError(
            "The kernels are not built and there is no ninja to build them; run pip install ninja."
        )
    rules = [
        f"compiler = {shlex.join(compiler).replace('$', '$$')}",
        "rule compile",
        "  command = $compiler $flags -MD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "rule link",
        f"  command = $compiler -shared $in {' '.join(how.libraries)} -o $out",
    ]
    for file in how.sources:
        rules += [
            f"build {file.stem}.o: compile {_ninja_path(file)}",
            f"  flags = {' '.join(how.flags(file))}",
        ]
    rules.append(f"build kernels.so: link {' '.join(file.stem + '.o' for file in how.sources)}")
    (folder / "build.ninja").write_text("\n".join([*rules, ""]), encoding="utf-8")
    log.info("building %d files of kernels for %s (once; under a few minutes)", len(how.sources), how.name)
    command = [ninja, "-C", str(folder)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",  # a compiler may write in another
    )
    lines = []
    assert process.stdout is not None
    with tqdm(
        total=len(how.sources) + 1,
        desc=f"building kernels for {how.name}",
        unit="file",
        disable=hidden(False),
    ) as bar:
        for line in process.stdout:
            lines.append(line)
            bar.update(line.startswith("["))
    if process.wait():
        raise BuildError(
            f"The kernels for {how.name} could not be built; the compiler says:\n{''.join(lines)}"
        )


def _ninja_path(path: Path) -> str:
    """A path as a build statement of ninja takes it."""
    return re.sub(r"[$ :]", r"$\g<0>", str(path))


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
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
    bytecode.compile_ahead("torch")


if __name__ == "__main__":
    main()
