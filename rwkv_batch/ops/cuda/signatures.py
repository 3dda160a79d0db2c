"""What the exported functions of the kernels' library take."""

from ctypes import POINTER, c_int, c_size_t, c_uint, c_void_p
from typing import Any

from rwkv_batch.ops.cuda.abi import (
    AdapterInput,
    ChunksInput,
    GemmPart,
    NormInput,
    PackedRowsInput,
    ReadoutInput,
    RowInput,
    TileShape,
    TimeMixInput,
    Wkv6Input,
)

_MIX = (c_void_p, c_size_t, c_void_p, c_int, *[c_void_p] * 3)  # shift, stride, mixes, n, out, codes, scales
_PREFETCH = (c_void_p, c_uint)
_BESIDE = (POINTER(GemmPart), c_int)
SIGNATURES: dict[str, tuple[Any, ...]] = {  # arguments of every exported function but the last, a stream
    "rwkv_norm": (POINTER(NormInput), c_int, c_int, c_void_p),
    "rwkv_norm_mix_decode": (POINTER(NormInput), c_int, c_void_p, *_MIX, c_int),
    "rwkv_norm_mix_prefill": (
        *(POINTER(NormInput), c_void_p, c_int, c_int),
        *(POINTER(PackedRowsInput), *_MIX),
    ),
    "rwkv_relu_square": (c_void_p, c_size_t),
    "rwkv_gemm_stream": (POINTER(GemmPart), c_int, c_int, c_int, c_int, *_PREFETCH),
    "rwkv_gemm_lowrank": (POINTER(GemmPart), c_int, c_int, c_int, *_PREFETCH),
    "rwkv_gemm_tile": (*[POINTER(c_void_p)] * 3, *[c_int] * 6, POINTER(TileShape)),
    "rwkv_gemm_many": (*[POINTER(c_void_p)] * 3, *[c_int] * 6, POINTER(TileShape), *_BESIDE),
    "rwkv_gemm_tile8": (*[POINTER(c_void_p)] * 4, *[c_int] * 7, POINTER(TileShape), *_BESIDE, *_PREFETCH),
    "rwkv_gemm_tile4": (*[POINTER(c_void_p)] * 3, *[c_int] * 6, POINTER(TileShape), *_BESIDE, *_PREFETCH),
    "rwkv_decode_row": (POINTER(RowInput),),
    "rwkv_gemm_tile_fp8": (*[POINTER(c_void_p)] * 5, *[c_int] * 5, POINTER(TileShape)),
    "rwkv_gemm_many8": (*[POINTER(c_void_p)] * 4, *[c_int] * 6, POINTER(TileShape)),
    "rwkv_gemm_many4": (*[POINTER(c_void_p)] * 3, *[c_int] * 6, POINTER(TileShape)),
    "rwkv_gemm_many_fp8": (*[POINTER(c_void_p)] * 5, *[c_int] * 5, POINTER(TileShape)),
    "rwkv_quantize_rows": (*[c_void_p] * 3, c_int, c_int, c_int),
    "rwkv_gemm_sparse": (*[c_void_p] * 3, *[c_int] * 4, *_PREFETCH),
    "rwkv_gemm_sparse8": (*[c_void_p] * 4, *[c_int] * 4, *_PREFETCH),
    "rwkv_resolve_drawn": (*[c_void_p] * 6, c_int, c_void_p, c_int),
    "rwkv_record_drawn": (c_void_p, c_void_p, c_int, c_void_p),
    "rwkv_wkv_decode": (POINTER(TimeMixInput), c_int, c_void_p, c_void_p, c_int, POINTER(ReadoutInput)),
    "rwkv_wkv_sequence": (
        *(POINTER(TimeMixInput), c_int, c_int, POINTER(PackedRowsInput)),
        *(c_int, c_int, c_void_p),
    ),
    "rwkv_wkv_flush": (c_void_p, c_void_p, c_int, *[c_void_p, c_void_p, c_size_t, c_void_p, c_size_t], c_int),
    "rwkv_wkv_prefill": (
        *(POINTER(TimeMixInput), POINTER(ChunksInput), c_int, c_int),
        *(c_void_p, c_int, POINTER(ReadoutInput)),
    ),
    "rwkv_wkv6": (POINTER(Wkv6Input), c_int, c_int, c_void_p, POINTER(PackedRowsInput), c_int),
    "rwkv_shift_mix": (*[c_void_p] * 4, *[c_int] * 3),
    "rwkv_gate": (c_void_p, c_void_p, c_size_t),
    "rwkv_deep_embed": (*[c_void_p] * 3, c_int, c_void_p),
    "rwkv_deep_scale": (*[c_void_p] * 3, c_int, c_int),
    "rwkv_adapter_shrink": (POINTER(AdapterInput), c_int, c_int, *_PREFETCH),
    "rwkv_adapter_expand": (POINTER(AdapterInput), c_int, c_int, c_int),
}
