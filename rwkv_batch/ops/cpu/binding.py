"""The kernels for CPUs as Python functions. All tensors are fp32 on a CPU unless it says otherwise."""

import ctypes
import logging
from collections.abc import Sequence
from ctypes import Array, byref
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor

from rwkv_batch.ops.compiled.libraries import BuildError
from rwkv_batch.ops.cpu.build import build
from rwkv_batch.ops.cpu.records import ACTIVATIONS, KINDS, LayerRecord, MatrixRecord

log = logging.getLogger(__name__)

HEAD_SIZE = 64
NO_MEMORY = "The host has no memory for a step of the model."
ALLOCATE = ("product", "mix", "rwkv7_layers")  # functions that return whether they have had the memory
POINTERS_AND_SIZES = {  # of each function: pointers, then 64-bit sizes, then ints, the last one the threads
    "product": (3, 1, 2),
    "mix": (12, 5, 1),
    "wkv7": (21, 3, 1),
    "rwkv7_layers": (8, 8, 1),
    "int8_group": (0, 0, 0),
    "int4_inputs": (0, 0, 0),
}


@dataclass(frozen=True)
class CpuRows:
    """Where the rows of one call lie, for the kernels: all int64 `[rows]`."""

    ends: Tensor  # where the tokens of each row end
    slots: Tensor
    kept: Tensor  # where those end that move its state on
    begins: Tensor | None = None  # where they begin; None: where those of the row before end

    @classmethod
    def of(cls, lengths: Sequence[int], slots: Sequence[int], drafted: Sequence[int] = ()) -> "CpuRows":
        """drafted: how many tokens of each row, the last ones, leave its state as it is; empty: none."""
        ends = torch.tensor(lengths).cumsum(0)
        return cls(ends, torch.tensor(slots), ends - torch.tensor(drafted) if drafted else ends)


@dataclass(frozen=True)
class PackedMatrix:
    """The weights `[outputs, inputs]` and the bias of a product, as products.py packs them."""

    kind: str  # of KINDS
    weights: Tensor
    scales: tuple[Tensor, ...]  # of int8, with 128 times the sums of its rows, and of fp8; else none
    bias: Tensor  # [panels * 64]
    outputs: int
    inputs: int
    group: int = 0  # inputs that have a scale together, of 4 bits

    @cached_property
    def record(self) -> MatrixRecord:
        """Which points to the tensors here."""
        scales = [scale.data_ptr() for scale in self.scales] + [0, 0]
        return MatrixRecord(
            self.weights.data_ptr(),
            scales[0],
            scales[1],
            self.bias.data_ptr(),
            self.inputs,
            self.outputs,
            self.group,
            KINDS.index(self.kind),
        )


class CpuKernels:
    """The functions of a built library. Each uses as many threads as torch does, and raises MemoryError."""

    def __init__(self, library: ctypes.CDLL) -> None:
        for name, (pointers, sizes, ints) in POINTERS_AND_SIZES.items():
            function = getattr(library, name)
            function.argtypes = (
                [ctypes.c_void_p] * pointers + [ctypes.c_int64] * sizes + [ctypes.c_int] * ints
            )
            function.restype = ctypes.c_bool if name in ALLOCATE else None if pointers else ctypes.c_int
        self._library: Any = library
        self.int8_group: int = library.int8_group()
        self.int4_inputs: int = library.int4_inputs()

    def product(self, x: Tensor, matrix: PackedMatrix, activation: str = "identity") -> Tensor:
        """`x W^T + bias`, and one of ACTIVATIONS of it, for x `[rows, inputs]`: `[rows, outputs]`."""
        x = x.contiguous()
        rows = len(x)
        y = torch.empty(rows, matrix.outputs)
        done = self._library.product(
            byref(matrix.record),
            x.data_ptr(),
            y.data_ptr(),
            rows,
            ACTIVATIONS.index(activation),
            torch.get_num_threads(),
        )
        if not done:
            raise MemoryError(NO_MEMORY)
        return y

    def mix(
        self,
        x: Tensor,
        added: Tensor | None,
        norm: tuple[Tensor, Tensor],
        amounts: Tensor,
        shift: Tensor,
        rows: CpuRows,
        keep_normed: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The residual sum x + added, its layer norm, and the token shift.

        x and added `[T, width]`, norm: weight and bias `[width]`, amounts `[mixes, 1, width]`, shift
        `[slots, width]` (any stride between slots), moved on in place. Returns the sum `[T, width]`, the
        mixes `[mixes, T, width]`, and the normed sum if `keep_normed`.
        """
        tokens, width = x.shape
        mixes = amounts.numel() // width
        out = torch.empty(mixes, tokens, width)
        total = x if added is None else torch.empty_like(x)
        normed = torch.empty_like(x) if keep_normed else None
        done = self._library.mix(
            x.data_ptr(),
            None if added is None else added.data_ptr(),
            norm[0].data_ptr(),
            norm[1].data_ptr(),
            amounts.data_ptr(),
            total.data_ptr(),
            None if normed is None else normed.data_ptr(),
            out.data_ptr(),
            shift.data_ptr(),
            rows.ends.data_ptr(),
            rows.kept.data_ptr(),
            rows.slots.data_ptr(),
            shift.stride(0),
            len(rows.slots),
            tokens,
            width,
            mixes,
            torch.get_num_threads(),
        )
        if not done:
            raise MemoryError(NO_MEMORY)
        return total, out, normed

    def wkv7(
        self,
        tokens: Sequence[Tensor],
        residual: tuple[Tensor, Tensor] | None,
        vectors: Sequence[Tensor],
        states: Tensor,
        rows: CpuRows,
        scales: Tensor | None = None,
        reads: bool = True,
    ) -> Tensor:
        """The time mix of RWKV-7 between its products: `[T, width]`; formula in wkv7.cpp.

        tokens: r, w, k, v, a, g, all `[T, width]`. residual: v_mix and v_first, None in the layer whose
        values are v_first. vectors: k_k, k_a, 1 - k_a, r_k, weight and bias of the group norm, all `[width]`.
        states `[slots, heads, 64, 64]` (any stride between slots) are updated in place. scales `[T, width]`:
        what is read out of them is multiplied with before the group norm. reads: if not, only the states
        change, and what is returned means nothing.
        """
        out = torch.empty_like(tokens[0]) if reads else tokens[0]
        v_mix, v_first = (None, None) if residual is None else (x.data_ptr() for x in residual)
        self._library.wkv7(
            *(x.data_ptr() for x in tokens),
            v_mix,
            v_first,
            *(x.data_ptr() for x in vectors),
            None if scales is None else scales.data_ptr(),
            out.data_ptr() if reads else None,
            states.data_ptr(),
            None if rows.begins is None else rows.begins.data_ptr(),
            rows.ends.data_ptr(),
            rows.kept.data_ptr(),
            rows.slots.data_ptr(),
            states.stride(0),
            len(rows.slots),
            out.shape[1],
            torch.get_num_threads(),
        )
        return out

    def rwkv7_layers(
        self,
        layers: "Array[LayerRecord]",
        x: Tensor,
        v_first: Tensor | None,
        shift: Tensor,
        wkv: Tensor,
        rows: CpuRows,
    ) -> tuple[Tensor, Tensor]:
        """Layers of RWKV-7 one after the other, none of whose rows has a draft; see rwkv7_layers.cpp.

        x and v_first `[T, width]`, the latter the values of layer 0, None before it. shift `[slots, layers,
        2, width]` and wkv `[slots, layers, heads, 64, 64]` are updated in place. Returns x and v_first.
        """
        out, values = torch.empty_like(x), torch.empty_like(x) if v_first is None else v_first
        done = self._library.rwkv7_layers(
            layers,
            x.data_ptr(),
            out.data_ptr(),
            values.data_ptr(),
            shift.data_ptr(),
            wkv.data_ptr(),
            rows.ends.data_ptr(),
            rows.slots.data_ptr(),
            len(layers),
            v_first is not None,
            shift.stride(0),
            shift.stride(1),
            wkv.stride(0),
            wkv.stride(1),
            len(rows.slots),
            x.shape[1],
            torch.get_num_threads(),
        )
        if not done:
            raise MemoryError(NO_MEMORY)
        return out, values


@cache
def load() -> CpuKernels | None:
    """The kernels for this processor, built first if they are missing; None if they cannot be built."""
    try:
        return CpuKernels(ctypes.CDLL(str(build())))
    except (BuildError, OSError) as error:
        log.info("The kernels for this CPU are not built, and slower torch operations run. %s", error)
        return None
