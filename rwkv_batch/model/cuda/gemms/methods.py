"""The names of the methods that can run a GEMM of a layer, and what each kind of GEMM may be run by.

- "stream16", "stream32": `gemm_stream`, with 16 or 32 rows of weights a warp
- "blas": cuBLAS through torch
- "mixed", "low": the low-rank matrices by `gemm_stream` or `gemm_lowrank`, the large ones by cuBLAS
- "sparse": `gemm_sparse` or `gemm_sparse8`, which skip the weights of inactive hidden units
- "tile", "many": the large matrices by `gemm_tile`, "many" by its kernel for many rows; the low-rank ones
  as with "low", or with "beside" in the same launch as "many"
- "blocks": cuBLAS, for a fixed number of rows at a time
- those of codes/coded_gemm.py and codes/block_gemm.py: large matrices of codes; the low-rank ones as with
  "low", or where there is no `gemm_lowrank` by what suits the number of tokens; with "beside" in the same
  launch
- "lt0", "lt1"...: the large matrices by an algorithm of cuBLASLt, the low-rank ones as with "low" if possible

What is added to the residual stream may also be computed with split-K; the next norm adds up the partial
sums. "lt0/2" is split-K into two, by the first algorithm for it, and "many/2" by "many"; "sparse/8" and
"partial sums" are "sparse" and "coded", whose blocks would else add these up. Whether that is faster than the
whole GEMM shows only together with the norm, so it is a choice of its own: of "out_split" and "value_split".

The kernels after a norm may start "early", before the norm has its inputs, so that their weights are already
on the way, or "late". Weights come sooner, but blocks lie where there was room, and may have less of it. So
this too is timed, between the neighbours alone: "in_start" and "key_start".

All layers of a step of one row may run "together" by one launch, where there is a kernel for them
(`steps/row.py`). That is the choice of "layers", again between neighbours alone.

A model that is to be batch-invariant runs each kind by one method for any number of tokens
(`Gemms.invariant_methods`), of those whose sums for a row do not depend on the other rows.
"""

from rwkv_batch.model.cuda.codes.block_gemm import DECODED
from rwkv_batch.model.cuda.codes.coded_gemm import BESIDE, CODED, MANY, SPARSE
from rwkv_batch.ops.cuda.blas.blaslt import MAX_ALGORITHMS
from rwkv_batch.ops.cuda.buffers import MAX_SPLITS

LT = tuple(f"lt{number}" for number in range(MAX_ALGORITHMS))
WHOLE = "whole"
LATE, EARLY = "late", "early"
STARTS = ("in_start", "key_start")  # of the kernels after the two norms
SPLITS = ("out_split", "value_split")
LAYERS, SEPARATE, TOGETHER = "layers", "separate", "together"
BETWEEN = (*STARTS, LAYERS)  # what shows only between neighbours
# An algorithm of cuBLASLt, or None for the kernel of "many"; parts of K.
SPLIT_K: dict[str, tuple[int | None, int]] = {
    **{f"lt{number}/{splits}": (number, splits) for splits in (2, MAX_SPLITS) for number in range(3)},
    **{f"{MANY}/{splits}": (None, splits) for splits in (2, MAX_SPLITS)},
}
METHODS = {
    "in": ("stream16", "stream32", "mixed", "low", "tile", MANY, BESIDE, "blas", *LT),
    "low_out": ("stream16", "low", "blas"),
    "out": ("stream16", "stream32", "tile", MANY, "blas", *LT),
    "key": ("stream16", "stream32", "tile", MANY, "blas", *LT),
    "value": (SPARSE, "tile", MANY, "blas", *LT),
    "head": ("stream16", "stream32", "tile", MANY, "blas", *LT),
    **dict.fromkeys(SPLITS, (WHOLE, *SPLIT_K)),
    **dict.fromkeys(STARTS, (LATE, EARLY)),
    LAYERS: (SEPARATE, TOGETHER),  # the last, as what it stands for depends on all others
}
TILES, LIBRARY = ("tile", MANY), ("blas", *LT)
# The likeliest methods for the fastest with many tokens, where nothing has been timed.
FOR_MANY = ("low", WHOLE, LATE, SEPARATE, "fp8lt0", "fp8", MANY, DECODED, CODED, "blas")
