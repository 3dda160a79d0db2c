"""What a compiler has made of the same inputs before, it need not make again: the user's cache notes that."""

import re
import subprocess
from pathlib import Path

from rwkv_batch.ops.compiled import kernel_cache, libraries

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
