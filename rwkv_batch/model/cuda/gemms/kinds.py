"""The kinds of GEMM of a layer, in the order in which they are compared, and the names of their methods.

A method is an object (`method.py`); tuning files and choices name it. The names of those of fp16 are in
`halves.py`, of small matrices in `low_rank.py`, of codes in `tiled_codes.py` and `block_codes.py`. Here are
those that more than one form of matrices has, and those that are no GEMMs.

What is added to the residual stream may also be computed with split-K; the next norm adds up the partial
sums. Whether that is faster than the whole GEMM shows only together with the norm, so it is a choice of its
own: of "out_split" and "value_split".

The kernels after a norm may start "early", before the norm has its inputs, so that their weights are already
on the way, or "late". Weights come sooner, but blocks lie where there was room, and may have less of it. So
this too is timed, between the neighbours alone: "in_start" and "key_start".

All layers of a step of one row may run "together" by one launch, where there is a kernel for them
(`steps/row.py`). That is the choice of "layers", again between neighbours alone.
"""

IN, LOW_OUT, OUT, KEY, VALUE, HEAD = "in", "low_out", "out", "key", "value", "head"
LARGE = (IN, OUT, KEY, VALUE, HEAD)
SPLITS = ("out_split", "value_split")
STARTS = ("in_start", "key_start")  # of the kernels after the two norms
LAYERS = "layers"
KINDS = (
    IN,
    LOW_OUT,
    OUT,
    KEY,
    VALUE,
    HEAD,
    *SPLITS,
    *STARTS,
    LAYERS,
)  # what the last stands for depends on all
BETWEEN = (*STARTS, LAYERS)  # what shows only between neighbours

STREAM, LOW, TILE, MANY, BESIDE, BLAS = "stream16", "low", "tile", "many", "beside", "blas"
SPARSE = "sparse"
WHOLE = "whole"
LATE, EARLY = "late", "early"
SEPARATE, TOGETHER = "separate", "together"


def split_of(kind: str) -> str:
    """The choice of split-K for OUT or VALUE."""
    return f"{kind}_split"


def output_method(methods: dict[str, str], kind: str) -> str:
    """The method for OUT or VALUE: with split-K if that was chosen."""
    split = methods[split_of(kind)]
    return methods[kind] if split == WHOLE else split
