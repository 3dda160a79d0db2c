"""Torch's shared libraries, loaded while other work is done. Imports nothing that takes long."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from threading import Thread


@contextmanager
def loading_libraries() -> Iterator[None]:
    """Load them in a thread while the body runs, which the import of torch need not do then.

    It would hold the GIL meanwhile. The body is not to import an extension module, as the loader of the
    system has one lock. What fails here fails in torch too, which says why.
    """
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        yield
        return
    folder = Path(spec.origin).parent / "lib"
    load = ctypes.CDLL(None).dlopen  # ctypes.CDLL(path) holds the GIL in Python 3.11
    load.argtypes, load.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    # In torch's order: what its libraries depend on is for all that is loaded later.
    load(os.fsencode(folder / "libtorch_global_deps.so"), os.RTLD_NOW | os.RTLD_GLOBAL)
    # One call, as between two the body could take the GIL for long.
    thread = Thread(target=load, args=(os.fsencode(folder / "libtorch.so"), os.RTLD_NOW), daemon=True)
    try:
        with suppress(RuntimeError):  # there can be none; the import of torch loads them
            thread.start()
        yield
    finally:
        if thread.ident is not None:  # it has begun
            thread.join()
