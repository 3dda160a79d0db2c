"""Builds the kernels for the processor of this machine, with the compiler of its system."""

import os
import platform
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from rwkv_batch.ops.compiled import libraries
from rwkv_batch.ops.compiled.libraries import BuildError

SOURCES = Path(__file__).parent
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-w")
# A compiler for ARM may know its processor by the second only, and a compiler for others by neither.
NATIVE = ("-march=native", "-mcpu=native", "")


def compiler() -> list[str] | None:
    """The command in CXX, or the first compiler on the path; None if there is none."""
    if named := os.environ.get("CXX"):
        return shlex.split(named)
    found = next(filter(None, map(shutil.which, COMPILERS)), None)
    return [found] if found else None


def sources() -> list[Path]:
    """All .cpp files, in order."""
    return sorted(SOURCES.glob("*.cpp"))


def build() -> Path:
    """Compile the sources if there is no library for them yet; returns its path. Raises BuildError."""
    return library("cpu", sources(), SOURCES.glob("*.h"))


def library(name: str, files: Sequence[Path], headers: Iterable[Path] = ()) -> Path:
    """A library of these sources for this processor, as `build` has it."""
    digest = libraries.digest(sorted([*files, *headers]), [*FLAGS, *NATIVE, processor()])
    return libraries.library(name, digest, partial(_compile, files))


def processor() -> str:
    """What distinguishes processors: code for one need not run on another that shares its folder."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return "\n".join(
            sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))})
        )
    return f"{platform.machine()} {platform.processor()}"


def _compile(sources: Sequence[Path], folder: Path) -> None:
    command = compiler()
    if command is None:
        raise BuildError("There is no C++ compiler; install g++, or name one in CXX.")
    linking = ["-undefined", "dynamic_lookup"] if platform.system() == "Darwin" else []
    for native in NATIVE:
        flags = [*filter(None, (*FLAGS, native)), *linking]
        files = [str(file) for file in sources]
        try:
            done = subprocess.run(
                [*command, *flags, *files, "-o", str(folder / "kernels.so")],
                capture_output=True,
                encoding="utf-8",
                errors="replace",  # it may write in another
            )
        except OSError as error:
            raise BuildError(
                f"{command[0]} does not run ({error.strerror}); name a C++ compiler in CXX."
            ) from error
        if done.returncode == 0:
            return
    raise BuildError(
        f"{command[0]} cannot build them; name another C++ compiler in CXX. It says:\n{done.stderr}"
    )
