"""What a compiler has made of the same inputs before, it need not make again: the user's cache notes that."""

import re
import subprocess
from pathlib import Path

from rwkv_batch.ops.compiled import kernel_cache, libraries
from rwkv_batch.ops.cuda import build

# What is compiled, and the architectures whose machine code is made of it: between the first three no source
# distinguishes (test_what_sources_distinguish), and each front end takes as long as the rest.
ARCHITECTURES = {"80": ("80", "86", "89"), "90a": ("90a",), "120": ("120",)}

INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)


def with_included(file: Path) -> list[Path]:
    """A source, the files of ours that it includes, and those that these include."""
    found, waiting = set[Path](), [file]
    while waiting:
        if (one := waiting.pop()) not in found:
            found.add(one)
            beside = (
                (one.parent / name).resolve() for name in INCLUDE.findall(one.read_text(encoding="utf-8"))
            )
            waiting += [each for each in beside if each.is_file()]
    return sorted(found)


def complaints(compiler: str, flags: list[str], file: Path, out: Path) -> str:
    """What a compiler says of a source that it does not take; empty if it makes an object of it, or has."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    digest = libraries.digest(with_included(file), [file.name, version, *flags])
    noted = kernel_cache.folder().parent / "compiled" / digest
    if noted.is_file():
        return ""
    command = [compiler, *flags, "-c", str(file), "-o", str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return done.stderr or f"The compiler ended with {done.returncode}."
    noted.parent.mkdir(parents=True, exist_ok=True)
    noted.touch()
    return ""


def complaints_of_any_architecture(nvcc: str, file: Path, out: Path) -> str:
    """What nvcc says of a kernel's source for the GPUs of NVIDIA; see `complaints`."""
    targets = [
        f"-gencode=arch=compute_{first},code=[{','.join(f'sm_{arch}' for arch in made)}]"
        for first, made in ARCHITECTURES.items()
    ]
    return complaints(nvcc, [*build.FLAGS, *targets, "--threads", "2", "-Werror", "all-warnings"], file, out)
