"""The bytecode of Python's modules, kept where this user can write. Imports nothing that takes long.

Python compiles a module as it is imported, unless its bytecode is there from before. pip installs it, uv does
not. Where Python may not write it either, every start compiles torch, which takes longer than to load it.
"""

import os
import subprocess
import sys
from contextlib import suppress
from importlib.util import cache_from_source, find_spec
from pathlib import Path

from rwkv_batch.ops.compiled import kernel_cache


def keep_bytecode(package: str) -> None:
    """Let this process keep bytecode in the user's cache if that package has none, and would get none.

    It is the cache of the kernels. There it counts for all modules that are imported from now on, and
    PYTHONDONTWRITEBYTECODE, which keeps a folder of sources as it is, does not.
    """
    if not _lacks_bytecode(package):
        return
    with suppress(kernel_cache.CacheError):  # nor is there a place for kernels, which is said later
        sys.pycache_prefix = str(kernel_cache.folder().with_name("bytecode"))
        sys.dont_write_bytecode = False


def compile_ahead(package: str) -> None:
    """Import it once if that keeps its bytecode for starts to come.

    A process of its own does so, as this one may have imported the package already.
    """
    if _lacks_bytecode(package):
        code = f"from {__name__} import keep_bytecode; keep_bytecode({package!r}); import {package}"
        subprocess.run([sys.executable, "-c", code], check=False)


def _lacks_bytecode(package: str) -> bool:
    """Whether it has none, and Python writes none beside it or where the user has named a place."""
    spec = find_spec(package)
    if spec is None or spec.origin is None or sys.pycache_prefix is not None:
        return False
    writes = not sys.dont_write_bytecode and os.access(Path(spec.origin).parent, os.W_OK)
    return not writes and not Path(cache_from_source(spec.origin)).exists()
