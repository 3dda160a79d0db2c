"""The records of matrix.h and rwkv7_layers.cpp. A pointer is 0 where there is nothing."""

from ctypes import Structure, c_int64, c_void_p

KINDS = ("fp32", "fp16", "int8", "fp8", "int4", "nf4")  # of weights
ACTIVATIONS = ("identity", "squared", "tanh", "sigmoid")  # "squared": max(0, y)^2


class MatrixRecord(Structure):
    _fields_ = (
        ("weights", c_void_p),
        ("scales", c_void_p),
        ("totals", c_void_p),
        ("bias", c_void_p),
        ("inputs", c_int64),
        ("outputs", c_int64),
        ("group", c_int64),
        ("kind", c_int64),
    )


class VectorsRecord(Structure):
    _fields_ = (("weight", c_void_p), ("bias", c_void_p))


class PairRecord(Structure):
    _fields_ = (("inner", MatrixRecord), ("outer", MatrixRecord), ("activation", c_int64))


class LayerRecord(Structure):
    """A layer of RWKV-7."""

    _fields_ = (
        ("norm", VectorsRecord),
        ("mixes", c_void_p),
        ("k_k", c_void_p),
        ("k_a", c_void_p),
        ("k_rest", c_void_p),
        ("r_k", c_void_p),
        ("group_norm", VectorsRecord),
        ("ffn_norm", VectorsRecord),
        ("ffn_mix", c_void_p),
        ("receptance", MatrixRecord),
        ("key", MatrixRecord),
        ("value", MatrixRecord),
        ("output", MatrixRecord),
        ("ffn_key", MatrixRecord),
        ("ffn_value", MatrixRecord),
        ("low_rank", PairRecord * 4),  # w, a, g, v
    )
