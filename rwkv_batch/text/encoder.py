"""The encoder of a vocabulary, by a library that is compiled for this processor."""

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from rwkv_batch.ops.cpu import build

SOURCE = Path(__file__).with_name("encoder.cpp")
MOST_TOKENS, MOST_BYTES = 65_535, 1 << 20  # for which an entry has room


def new_encoder(table: Sequence[bytes]) -> Callable[[str], list[int]]:
    """What takes the longest token at each place of a text, over its UTF-8 bytes.

    table: the bytes of every id; ids without bytes are never given. It raises UnicodeEncodeError where a text
    has a lone surrogate. Raises BuildError where there is no compiler, OSError where its library does not
    load, ValueError for a table that is too large or lacks a byte.
    """
    data, ends = b"".join(table), np.cumsum([len(token) for token in table], dtype=np.int64)
    if len(table) > MOST_TOKENS or len(data) > MOST_BYTES or len({*table} & _BYTES) < len(_BYTES):
        raise ValueError(
            f"An encoder takes at most {MOST_TOKENS:,} tokens of {MOST_BYTES:,} bytes in all, and every byte "
            "has to be one."
        )
    library = ctypes.PyDLL(str(build.library("encoder", [SOURCE])))  # which keeps the interpreter's lock
    make = library.new_encoder
    make.argtypes, make.restype = (ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int64), ctypes.py_object
    encode: Callable[[str], list[int]] = make(data, ends.ctypes.data, len(ends))
    return encode


_BYTES = {bytes([byte]) for byte in range(256)}
