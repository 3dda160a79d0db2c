"""The kernels in `cuda/` as Python functions: pointers out of tensors, the current stream, and errors raised.

Every tensor is contiguous, on the current device and fp16, except the residual stream x and partial sums
(fp32) and indices (int32). `T`: tokens of a step; `C`: width. The header of each .cu file has its formula.
"""

from ctypes import byref, c_int, c_void_p
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from rwkv_batch.ops.cuda import build
from rwkv_batch.ops.cuda.abi import (
    DEFERRED_HALF,
    ROUNDED_HALF,
    SINGLE,
    AdapterInput,
    ChunksInput,
    NormInput,
    PackedRowsInput,
    ReadoutInput,
    TimeMixInput,
    Wkv6Input,
)
from rwkv_batch.ops.cuda.gemms import CodedRows, GemmKernels, launch, pointer, prefetched
from rwkv_batch.ops.cuda.signatures import SIGNATURES

MAX_WIDTH_OF_FOUR = 4096  # of which a thread of a norm can have 4 columns


@dataclass(frozen=True)
class RowBounds:
    """Rows of a prefill, one after the other in a step's tokens; int32 on the device."""

    row_of: Tensor  # [T]
    first: Tensor  # [rows], the first token
    last: Tensor  # [rows]
    slots: Tensor  # [rows]
    # [T] slots that get the states behind the tokens, negative for none; only a row's first token may name
    # the row's own. None: that behind a row's last token goes into the row's own.
    kept: Tensor | None = None

    @property
    def input(self) -> PackedRowsInput:
        places = (self.row_of, self.first, self.last, self.slots, self.kept)
        return PackedRowsInput(*map(pointer, places))


@dataclass(frozen=True)
class ChunkedRows:
    """Rows that one launch of the chunked recurrence takes: at most so many chunks and rows."""

    input: ChunksInput
    chunks: int
    rows: int


@dataclass(frozen=True)
class Addend:
    """What a norm adds to x: nothing, `y`, or the sum of `partials`; or rows of `table`, which replace x."""

    y: Tensor | None = None  # [T, C]
    partials: Tensor | None = None  # [P, T, C]
    tokens: Tensor | None = None  # [T]
    table: Tensor | None = None  # [vocabulary, C]


class NormMix(NamedTuple):
    """A norm of the residual stream, with the token shift and the mixes after it.

    next_at_once: of few rows, the kernel launched next may start while the one before this still runs; until
    it waits for its inputs, it may read only what neither of them writes. coded: where the first mixes go as
    `quantize_rows` would make them fp8: 3 of 6, of which the first two do not go to out then, or 1 of 1,
    which does not. Needs `has_tile`; nothing has partial sums then, C is a multiple of 64, and sums are those
    of 64 rows or more.
    """

    added: Addend  # to the stream first
    norm: tuple[Tensor, Tensor]  # weight and bias [C]
    shift: Tensor  # of all slots, [slots, C], any stride
    mixes: Tensor  # [N, C], N 1, 3 or 6
    out: Tensor  # [N, T, C]
    next_at_once: bool = False
    coded: CodedRows | None = None


class Kernels(GemmKernels):
    """Own kernels for one GPU. Raises build.BuildError if they cannot be built or loaded."""

    def __init__(
        self, device: torch.device, architecture: str | None = None, invariant: bool = False
    ) -> None:
        """architecture: as in build.build; None: that of the GPU.

        invariant: whether what norms and small GEMMs give for a row is to be the same, bit for bit, for
        any number of rows. `wkv_decode` and `wkv_sequence` then round fp16 states behind every token.
        """
        self.device, self.invariant = device, invariant
        self.architecture = architecture or build.architecture(device)
        self.library = build.load(self.architecture)
        self._call = partial(launch, self.library)
        # Not by its number, 9, which AMD GPUs have too.
        self.has_lowrank = self.has_tile = self.has_row = self.overlaps = self.architecture == "90a"
        for name, arguments in SIGNATURES.items():
            function = getattr(self.library, name)
            function.argtypes, function.restype = (*arguments, c_void_p), c_int
        self.chunk_bytes = int(self.library.rwkv_wkv_chunk_bytes())

    def norm(
        self,
        x: Tensor,
        added: Addend,
        weight: Tensor,
        bias: Tensor,
        out: Tensor,
        gather: Tensor | None = None,
    ) -> None:
        """Add and norm rows of x. `gather`: which rows, in the order of out."""
        inputs = _norm_input(x, added, weight, bias, gather)
        self._call("rwkv_norm", byref(inputs), len(out), self._columns(x), out.data_ptr())

    def norm_mix_decode(self, x: Tensor, mix: NormMix, slots: Tensor) -> None:
        """Add, norm, token shift and mix of rows of one token each. A negative slot is padding."""
        self._call(
            "rwkv_norm_mix_decode",
            byref(_norm_input(x, mix.added, *mix.norm)),
            len(x),
            slots.data_ptr(),
            *_mix_arguments(mix),
            int(mix.next_at_once),
        )

    def norm_mix_prefill(self, x: Tensor, to: Tensor, mix: NormMix, rows: RowBounds) -> None:
        """Norm and token shift of packed rows; see `norm_mix_decode`. `next_at_once` changes nothing.

        The residual stream goes from x to `to`, both `[T, C]`.
        """
        self._call(
            "rwkv_norm_mix_prefill",
            byref(_norm_input(x, mix.added, *mix.norm)),
            to.data_ptr(),
            len(x),
            self._columns(x),
            byref(rows.input),
            *_mix_arguments(mix),
        )

    def adapter_shrink(
        self, inputs: AdapterInput, parts: int, tiles: int, prefetch: Tensor | None = None
    ) -> None:
        """The sums A x of rows in so many tiles, by the adapter of each; see adapters.AdapterSlots."""
        self._call("rwkv_adapter_shrink", byref(inputs), parts, tiles, *prefetched(prefetch))

    def adapter_expand(self, inputs: AdapterInput, parts: int, tiles: int, output: int) -> None:
        """Add B times these sums to y. output: ADAPTER_ADD and its neighbours."""
        self._call("rwkv_adapter_expand", byref(inputs), parts, tiles, output)

    def resolve_drawn(
        self,
        given: tuple[Tensor, Tensor],
        fed: tuple[Tensor, Tensor],
        records: Tensor,
        lag: Tensor | None,
        single: int,
        counted: Tensor | None,
    ) -> None:
        """Before a step: tokens and slots `fed` from those `given`; see feed.Feed.resolve."""
        places = map(pointer, (*given, *fed, records, lag))
        self._call("rwkv_resolve_drawn", *places, single, pointer(counted), len(given[0]))

    def record_drawn(self, ids: Tensor, slots: Tensor, records: Tensor) -> None:
        """After sampling: record ids `[n]` of the sequences in slots `[n]`, negative for none."""
        self._call("rwkv_record_drawn", ids.data_ptr(), slots.data_ptr(), len(ids), records.data_ptr())

    def wkv_decode(
        self,
        inputs: TimeMixInput,
        slots: Tensor,
        fp32: bool,
        counted: Tensor | None = None,
        readout: ReadoutInput | None = None,
    ) -> None:
        """The time mix of one token of each of `slots` `[rows]`, or of the first `counted` `[1]` of them.

        fp32: how states are stored, else fp16. readout: by what the output of some rows is scaled.
        """
        self._call(
            "rwkv_wkv_decode",
            byref(inputs),
            len(slots),
            pointer(counted),
            slots.data_ptr(),
            self._numbers(fp32),
            readout and byref(readout),
        )

    def wkv_flush(
        self, slots: int, counted: int | None, most: int, records: Tensor, states: Tensor, deferred: Tensor
    ) -> None:
        """Bring fp16 states `[slots, layers, heads, 64, 64]` up to date with the writes deferred for them.

        slots: address of `most` int32, or of as many as the int32 at address `counted` says. For `records`
        and `deferred` see feed.Feed.
        """
        self._call(
            "rwkv_wkv_flush",
            slots,
            counted,
            most,
            records.data_ptr(),
            states.data_ptr(),
            states.stride(0),
            deferred.data_ptr(),
            deferred.stride(0),
            states.shape[1] * states.shape[2],
        )

    def wkv_prefill(
        self,
        inputs: TimeMixInput,
        rows: ChunkedRows,
        scratch: Tensor,
        fp32: bool,
        readout: ReadoutInput | None = None,
    ) -> None:
        """The time mix of packed rows of two tokens and more. scratch: `chunk_bytes` a chunk and head.

        readout: as of `wkv_decode`.
        """
        self._call(
            "rwkv_wkv_prefill",
            byref(inputs),
            byref(rows.input),
            rows.chunks,
            rows.rows,
            scratch.data_ptr(),
            int(fp32),
            readout and byref(readout),
        )

    def wkv_sequence(
        self,
        inputs: TimeMixInput,
        tokens: int,
        rows: RowBounds,
        fp32: bool = True,
        left_out: int = 0,
        counted: Tensor | None = None,
    ) -> None:
        """The time mix of packed rows of any number of tokens, one after the other.

        fp32: how states are stored, else fp16: with `rows.kept`, or where each token rounds them. With fp32,
        or where each token rounds, what a token gives depends neither on other rows nor on where a prompt is
        cut, bit for bit, and is that of `wkv_decode`. left_out: how many of the first rows, or `counted`
        `[1]` of them, do not run.
        """
        self._call(
            "rwkv_wkv_sequence",
            byref(inputs),
            tokens,
            len(rows.slots),
            byref(rows.input),
            self._numbers(fp32),
            left_out,
            pointer(counted),
        )

    def wkv6(self, inputs: Wkv6Input, tokens: int, slots: Tensor, fp32: bool) -> None:
        """The time mix of RWKV-6 of one token of each of `slots` `[tokens]`. fp32: how states are stored."""
        self._call("rwkv_wkv6", byref(inputs), tokens, tokens, slots.data_ptr(), None, int(fp32))

    def wkv6_packed(self, inputs: Wkv6Input, tokens: int, rows: RowBounds, fp32: bool) -> None:
        """The recurrence of RWKV-6 over packed rows of any number of tokens; see `wkv6`."""
        count, slots = len(rows.slots), rows.slots.data_ptr()
        self._call("rwkv_wkv6", byref(inputs), tokens, count, slots, byref(rows.input), int(fp32))

    def shift_mix(self, amounts: Tensor, x: Tensor, before: Tensor, offsets: Tensor) -> None:
        """`x + (before - x) (offset + amount)` in place of amounts `[N, T, C]`.

        x and before `[T, C]`, offsets `[N, C]`.
        """
        pointers = (tensor.data_ptr() for tensor in (amounts, x, before, offsets))
        self._call("rwkv_shift_mix", *pointers, *amounts.shape)

    def gate(self, y: Tensor, gates: Tensor) -> None:
        """y = y sigmoid(gates) in place."""
        self._call("rwkv_gate", y.data_ptr(), gates.data_ptr(), y.numel())

    def deep_embed(self, q: Tensor, table: Tensor, tokens: Tensor, out: Tensor) -> None:
        """out `[T, 32]` = each row of q `[T, 32]` times the matrix [32, 32] that `table` has of its token."""
        pointers = (tensor.data_ptr() for tensor in (q, table, tokens))
        self._call("rwkv_deep_embed", *pointers, len(q), out.data_ptr())

    def deep_scale(self, hidden: Tensor, factors: Tensor, offsets: Tensor) -> None:
        """`hidden (offsets + factors)` in place of hidden `[T, F]`, at most what fp16 holds."""
        pointers = (tensor.data_ptr() for tensor in (hidden, factors, offsets))
        self._call("rwkv_deep_scale", *pointers, *hidden.shape)

    def _numbers(self, fp32: bool) -> int:
        """How states are stored, as `wkv_decode` and `wkv_sequence` take it."""
        return SINGLE if fp32 else ROUNDED_HALF if self.invariant else DEFERRED_HALF

    def _columns(self, x: Tensor) -> int:
        """Of a thread of a norm, on which the order of its sums depends; 0: as is best for so many rows."""
        return 0 if not self.invariant else 4 if x.shape[1] <= MAX_WIDTH_OF_FOUR else 8


def _norm_input(
    x: Tensor, added: Addend, weight: Tensor, bias: Tensor, gather: Tensor | None = None
) -> NormInput:
    count, rows = (0, 0) if added.partials is None else added.partials.shape[:2]
    return NormInput(
        x.data_ptr(),
        pointer(added.y),
        pointer(added.partials),
        count,
        rows,
        pointer(added.tokens),
        pointer(added.table),
        pointer(gather),
        weight.data_ptr(),
        bias.data_ptr(),
        x.shape[1],
    )


def _mix_arguments(mix: NormMix) -> tuple[int | None, ...]:
    shift, mixes, places = mix.shift, mix.mixes, map(pointer, mix.coded or (None, None))
    return shift.data_ptr(), shift.stride(0), mixes.data_ptr(), len(mixes), mix.out.data_ptr(), *places
