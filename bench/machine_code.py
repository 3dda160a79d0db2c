#!/usr/bin/env python3
"""Which kernels of two checkouts have other machine code, where only the text was meant to change.

    git worktree add ../old HEAD~1
    python bench/machine_code.py ../old . 86 90a 120

Compiles all of cuda/ in both for each architecture, with the options of this one, and compares kernel by
kernel. One with another name (a further template parameter changes it) is named with the old one whose code
it has. Needs nvcc, but no GPU. Exit code 1 if any old kernel's code is not there.
"""

import argparse
import os
import re
import struct
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rwkv_batch.ops.cuda import build

TEXT = ".text."
ANONYMOUS = re.compile(r"_GLOBAL__N__[0-9a-f]{8}_(.*?)_[0-9a-f]{8}")  # with a hash of where the file lies


def sections(cubin: bytes) -> dict[str, bytes]:
    """Of a 64-bit ELF file, by name."""
    (start,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<3H", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, start + i * size) for i in range(count)]
    texts = headers[names][4]

    def name(header: tuple[int, ...]) -> str:
        return cubin[texts + header[0] : cubin.index(b"\0", texts + header[0])].decode()

    return {name(header): cubin[header[4] : header[4] + header[5]] for header in headers}


def kernels(checkout: Path, architecture: str) -> dict[str, bytes]:
    """The machine code of each kernel, by its mangled name."""
    compiler = build.nvcc()
    if compiler is None:
        sys.exit("There is no nvcc to compile with; install the CUDA toolkit.")
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:

        def compiled(source: Path) -> bytes:
            cubin = Path(folder) / source.with_suffix(".cubin").name
            command = [compiler, *build.compile_flags(architecture), "-cubin", source, "-o", cubin]
            if subprocess.run(command).returncode:
                raise SystemExit(f"{checkout / source} could not be compiled for sm_{architecture}.")
            return cubin.read_bytes()

        cubins = list(pool.map(compiled, sorted((checkout / "cuda").glob("*.cu"))))
    return {
        ANONYMOUS.sub(r"\1", name.removeprefix(TEXT)): code
        for cubin in cubins
        for name, code in sections(cubin).items()
        if name.startswith(TEXT)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the machine code of two checkouts' kernels.")
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("architectures", nargs="+", help="such as 90a")
    options = parser.parse_args()
    differ = False
    for architecture in options.architectures:
        old, new = kernels(options.old, architecture), kernels(options.new, architecture)
        changed = [name for name in old.keys() & new.keys() if old[name] != new[name]]
        added = {name: code for name, code in new.items() if name not in old}
        named = {code: name for name, code in added.items()}
        renamed = {name: named[code] for name, code in old.items() if name not in new and code in named}
        gone = old.keys() - new.keys() - renamed.keys()
        same = len(old) - len(changed) - len(gone)
        print(f"sm_{architecture}: {len(old)} kernels, {same} the same, {len(renamed)} of them renamed")
        lists = {"changed": changed, "only old": gone, "only new": added.keys() - set(renamed.values())}
        for what, names in lists.items():
            for name in sorted(names):
                print(f"  {what}: {name}")
        differ |= bool(changed or gone)
    sys.exit(differ)


if __name__ == "__main__":
    main()
