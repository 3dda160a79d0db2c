"""The GEMMs of a layer of RWKV-7, as calls over the buffers of a step."""

from torch import Tensor

from rwkv_batch.model.cuda.gemms.method import GemmCall
from rwkv_batch.model.cuda.packed.coded import LargeMatrix, first_bytes
from rwkv_batch.model.cuda.packed.weights import CudaLayer
from rwkv_batch.model.tensors.description import LOW_RANKS, MIXES
from rwkv_batch.ops.cuda.abi import IDENTITY, RELU_SQUARE, SIGMOID, TANH
from rwkv_batch.ops.cuda.buffers import Buffers
from rwkv_batch.ops.cuda.gemms import CodedRows

ACTIVATIONS = {"tanh": TANH, "sigmoid": SIGMOID, "identity": IDENTITY}


def time_mix_in(
    layer: CudaLayer, b: Buffers, x_fp8: CodedRows | None = None, rkv: Tensor | None = None
) -> GemmCall:
    """r, k, v, and the inner sides of the low-rank functions with their activations. rkv: None: b.rkv."""
    low = [
        (w, b.mixed[MIXES.index(name)], b.low[name], ACTIVATIONS[LOW_RANKS[name]])
        for name, w in layer.low_in.items()
    ]
    return GemmCall(layer.rkv, b.mixed[:3], b.rkv if rkv is None else rkv, b, small=low, x_fp8=x_fp8)


def low_out(layer: CudaLayer, b: Buffers) -> GemmCall:
    """The outer sides of the low-rank functions."""
    parts = [(w, b.low[name], b.low_out[name], IDENTITY) for name, w in layer.low_out.items()]
    return GemmCall(None, b.x, b.x, b, small=parts, prefetch=first_bytes(layer.output))


def output(layer: CudaLayer, b: Buffers) -> GemmCall:
    """From the time mix back to the residual stream."""
    return GemmCall(layer.output, b.y, b.out, b, prefetch=first_bytes(layer.key))


def key(
    layer: CudaLayer, b: Buffers, activation: int = RELU_SQUARE, x_fp8: CodedRows | None = None
) -> GemmCall:
    """The hidden units of the channel mix, with that activation or IDENTITY."""
    x = b.mixed.view(-1, b.x.shape[1])[: len(b.x)]
    return GemmCall(layer.key, x, b.hidden, b, activation, x_fp8=x_fp8)


def value(layer: CudaLayer, b: Buffers, prefetch: Tensor | None = None, square: bool = False) -> GemmCall:
    """From the channel mix back to the residual stream.

    prefetch: weights of the next layer. square: the hidden units are still to be squared (`key` has not).
    """
    w, by_units = layer.value, isinstance(layer.value, Tensor)
    return GemmCall(w, b.hidden, b.out, b, transposed=by_units, prefetch=prefetch, square=square)


def head(w: LargeMatrix, x: Tensor, logits: Tensor) -> GemmCall:
    """Logits `[T, rows of the head]` of normed x `[T, C]`."""
    return GemmCall(w, x, logits, None)
