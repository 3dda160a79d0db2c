"""The structs of cuda/sample_row.cuh, sample_filter.cuh and sample_adjust.cu, for numpy and ctypes."""

from ctypes import Structure, c_int, c_int64, c_void_p

import numpy as np

GREEDY, RAPID, NUCLEUS, NOISE = range(4)
METHODS = {"rapid": RAPID, "gumbel": RAPID, "nucleus": NUCLEUS, "noise": NOISE}  # "gumbel": no limits

SAMPLE_RECORD = np.dtype(
    [(name, "f8") for name in ("temperature", "noise", "top_p")]
    + [(name, "f8") for name in ("first", "later", "decay", "flat", "per_count")]
    + [(name, "u8") for name in ("key", "position", "penalties")]
    + [("capacity", "i4"), ("used", "i4"), ("bias", "u8")]
    + [(name, "i4") for name in ("bias_count", "method", "top_k")]
    + [("scale", "f4"), ("exempt", "i4"), ("unused", "i4")]
)
# The part of a record that moves the list of penalties, and the byte at which it begins.
PENALTY_LIST = np.dtype([("penalties", "u8"), ("capacity", "i4")])
PENALTY_LIST_AT = 80
BIAS_ENTRY = np.dtype([("amount", "f8"), ("id", "i4"), ("unused", "i4")])
PENALTY_ENTRY = np.dtype([("decaying", "f8"), ("id", "i4"), ("count", "i4")])

ROW_FILTER = np.dtype([("min_p", "f4"), ("top_a", "f4"), ("repetition", "f4"), ("mask", "i4")])


class SampleInput(Structure):
    _fields_ = (
        ("logits", c_void_p),
        ("stride", c_int64),
        ("width", c_int),
        ("vocab", c_int),
        ("slots", c_void_p),
        ("table", c_void_p),
        ("ids", c_void_p),
        ("workspace", c_void_p),
        ("chunk", c_int),
    )


class FilterInput(Structure):
    _fields_ = (
        ("sample", SampleInput),
        ("filters", c_void_p),
        ("masks", c_void_p),
        ("seen", c_void_p),
        ("words", c_int),
    )


class AdjustInput(Structure):
    _fields_ = (
        ("sample", SampleInput),
        ("places", c_void_p),
        ("adjusted", c_void_p),
        ("top_k", c_void_p),
        ("top_p", c_void_p),
        ("adjusted_width", c_int),
    )
