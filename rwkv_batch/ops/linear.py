"""Matrix products with fixed weights, packed once for the device they run on.

On a CPU one step reads every weight once, so its speed is that of memory: weights that are exact in fp16
(those of bf16 checkpoints are, but for some below 6e-5) are kept in fp16 and widened to fp32 in registers,
which halves the bytes. Other weights are packed in fp32. Either way a row's product comes out the same, bit
for bit, beside any other rows: a row generates the same text alone and in a batch.
"""

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from rwkv_batch.ops.cpu.binding import CpuKernels
from rwkv_batch.ops.cpu.products import packed_linear

Linear = Callable[[Tensor], Tensor]  # [rows, inputs] -> [rows, outputs]

ROWS_HINT = 16  # the batch for which the fp32 layout is chosen; it serves every other as well
ROWS_AT_ONCE = 4096  # of a matrix that is converted
# Of a matrix's norm, what fp16 may change in all: about the rounding of one fp32 product of a row.
LOSSLESS = 1e-6


def prepare(
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    invariant: bool = False,
    kernels: CpuKernels | None = None,
) -> Linear:
    """`x -> x @ weight.T + bias` for rows x of `dtype`. weight: `[outputs, inputs]`, bias: `[outputs]`.

    invariant: a row's product must be the same beside any others, also where torch has only products of which
    that is not known. kernels: what multiplies on a CPU in fp32, in place of torch.
    """
    bias = None if bias is None else bias.to(device, dtype).contiguous()
    if kernels is not None and torch.device(device).type == "cpu" and dtype == torch.float32:
        half = _as_half(weight.to(device))
        return packed_linear(kernels, weight.to(device, dtype) if half is None else half, bias)
    weight = weight.to(device, dtype).contiguous()
    if weight.is_cuda or dtype != torch.float32:
        return partial(linear, weight=weight, bias=bias)
    if _has_half_weights() and _as_half(weight) is not None:
        return partial(_half_weights, packed=torch.ops.quantized.linear_prepack_fp16(weight, bias))
    if _has_packed_weights():
        return partial(
            _packed_weights, packed=torch.ops.mkldnn._reorder_linear_weight(weight, ROWS_HINT), bias=bias
        )
    return partial(_row_by_row if invariant else linear, weight=weight, bias=bias)


def _row_by_row(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.cat([linear(row, weight, bias) for row in x.split(1)]) if len(x) else linear(x, weight, bias)


def _half_weights(x: Tensor, packed: torch.ScriptObject) -> Tensor:
    rows = len(x)
    if missing := -rows % _rows_together():
        x = pad(x, (0, 0, 0, missing))
    # "dynamic" is the name only: inputs, sums and result are fp32.
    product: Tensor = torch.ops.quantized.linear_dynamic_fp16(x, packed)
    return product[:rows]


def _packed_weights(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    if len(x) == 1:  # one row alone would take another path, slower and rounded in another order
        return _packed_weights(x.expand(2, -1).contiguous(), packed, bias)[:1]
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return product


def _as_half(weight: Tensor) -> Tensor | None:
    """The matrix in fp16; None if that changes more than a few numbers too small to matter beside the others.

    No second matrix of 32 bits is made.
    """
    if weight.dtype == torch.float16:
        return weight
    half, changed, norms = torch.empty(weight.shape, dtype=torch.float16), [], []
    for place, rows in zip(half.split(ROWS_AT_ONCE), weight.split(ROWS_AT_ONCE), strict=True):
        numbers = rows.float()
        place.copy_(numbers)
        changed.append((place.float() - numbers).norm())
        norms.append(numbers.norm())
    return half if torch.stack(changed).norm() <= LOSSLESS * torch.stack(norms).norm() else None


@cache
def _rows_together() -> int:
    """Rows of a multiple of which torch multiplies each as any other.

    With AVX2 it takes three to six at a time, and one or two that are left in another order of sums.
    """
    return 1 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 3


@cache
def _has_half_weights() -> bool:
    return _runs(lambda w: _half_weights(w, torch.ops.quantized.linear_prepack_fp16(w, None)))


@cache
def _has_packed_weights() -> bool:
    return _runs(lambda w: _packed_weights(w, torch.ops.mkldnn._reorder_linear_weight(w, ROWS_HINT), None))


def _runs(product: Callable[[Tensor], Tensor]) -> bool:
    """Whether this torch has the product and gets it right; builds for other processors leave some out."""
    weight = torch.eye(64)
    try:
        return torch.equal(product(weight), weight)
    except (RuntimeError, AttributeError):
        return False
