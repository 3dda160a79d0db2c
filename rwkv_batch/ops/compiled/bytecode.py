"""The bytecode of Python's modules, kept where this user can write. Imports nothing that takes long.

Python compiles a module as it is imported, unless its bytecode is there from before. pip installs it, uv does
not. Where Python may not write it either, every start compiles torch, which takes longer than to load it.
"""

import os
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
    spec = find_spec(package)
    if spec is None or spec.origin is None or sys.pycache_prefix is not None:
        return
    writes = not sys.dont_write_bytecode and os.access(Path(spec.origin).parent, os.W_OK)
    if writes or Path(cache_from_source(spec.origin)).exists():
        return
    with suppress(kernel_cache.CacheError):  # nor is there a place for kernels, which is said later
        sys.pycache_prefix = str(kernel_cache.folder().with_name("bytecode"))
        sys.dont_write_bytecode = False
