"""The kernels of a layer that touch states, and what the time mix's takes."""

from collections.abc import Callable
from itertools import cycle

from torch import Tensor

from rwkv_batch.model.cuda.packed.weights import CudaLayer
from rwkv_batch.ops.cuda.abi import TimeMixInput
from rwkv_batch.ops.cuda.binding import Kernels, NormMix, RowBounds
from rwkv_batch.ops.cuda.buffers import Buffers, StepBuffers
from rwkv_batch.ops.cuda.gemms import pointer

NormMixer = Callable[[NormMix], None]


def decode_norms(kernels: Kernels, b: StepBuffers, slots: Tensor) -> NormMixer:
    """Over one token of every row."""
    return lambda mix: kernels.norm_mix_decode(b.x, mix, slots)


def prefill_norms(kernels: Kernels, b: StepBuffers, rows: RowBounds) -> NormMixer:
    """Over packed rows: the first norm of a layer leaves the stream in b.x_between, the second in b.x."""
    streams = cycle(((b.x, b.x_between), (b.x_between, b.x)))
    return lambda mix: kernels.norm_mix_prefill(*next(streams), mix, rows)


def time_mix_input(
    layer: CudaLayer, b: Buffers, rkv: Tensor, state: Tensor, pending: Tensor | None, work: Tensor
) -> TimeMixInput:
    """The input of a layer's WKV kernel.

    state `[slots, heads, 64, 64]` and pending `[slots, heads, MAX_LAG, DEFERRED_VECTORS, 64]` may have any
    distance between slots; work is zero, and one for all launches of a stream.
    """
    low = {name: b.low_out[name].data_ptr() for name in layer.low_out}
    return TimeMixInput(
        r=rkv[0].data_ptr(),
        k=rkv[1].data_ptr(),
        v=rkv[2].data_ptr(),
        w=low["w"],
        a=low["a"],
        g=low["g"],
        mix=low.get("v"),
        v_first=b.rkv0[2].data_ptr(),
        w0=layer.offsets["w"].data_ptr(),
        a0=layer.offsets["a"].data_ptr(),
        v0=pointer(layer.offsets.get("v")),
        k_k=layer.k_k.data_ptr(),
        k_a=layer.k_a.data_ptr(),
        r_k=layer.r_k.data_ptr(),
        norm_weight=layer.group_norm[0].data_ptr(),
        norm_bias=layer.group_norm[1].data_ptr(),
        out=b.y.data_ptr(),
        state=state.data_ptr(),
        slot_stride=state.stride(0),
        width=b.x.shape[1],
        tile_counter=work.data_ptr(),
        deferred=pointer(pending),
        deferred_stride=0 if pending is None else pending.stride(0),
        lag=b.lag.data_ptr(),
    )
