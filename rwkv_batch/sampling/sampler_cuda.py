"""Draws tokens on the GPU: the same ids as `sampling.Sampler` from the same seeds, without the logits leaving
the device.

Weights are computed in fp32 here and partly in fp64 there, so a random number within about 1e-6 of the border
between two tokens may fall on the other side; nothing else differs.
"""

import math
from collections.abc import Sequence
from ctypes import POINTER, Structure, byref, c_int, c_int64, c_void_p
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rwkv_batch.ops.cuda import build
from rwkv_batch.ops.cuda.records import Records
from rwkv_batch.ops.cuda.staging import upload
from rwkv_batch.sampling.params import Parameters, check
from rwkv_batch.sampling.penalties import Rule
from rwkv_batch.sampling.random import random_key
from rwkv_batch.text.tokenizer import VOCABULARY
from rwkv_batch.wire.protocol import Sampling

GREEDY, RAPID, NUCLEUS, NOISE = range(4)
METHODS = {
    "rapid": RAPID,
    "gumbel": RAPID,
    "nucleus": NUCLEUS,
    "noise": NOISE,
}  # "gumbel" is "rapid" without limits
FIRST_CAPACITY = 256  # drawn tokens that a row has room for when it begins

# The records of cuda/sample_row.cuh.
ROW = np.dtype(
    [
        ("temperature", "f8"),
        ("noise", "f8"),
        ("top_p", "f8"),
        ("first", "f8"),
        ("later", "f8"),
        ("decay", "f8"),
        ("flat", "f8"),
        ("per_count", "f8"),
        ("key", "u8"),
        ("position", "u8"),
        ("penalties", "u8"),
        ("capacity", "i4"),
        ("used", "i4"),
        ("bias", "u8"),
        ("bias_count", "i4"),
        ("method", "i4"),
        ("top_k", "i4"),
        ("scale", "f4"),
        ("exempt", "i4"),
        ("unused", "i4"),
    ]
)
PLACE = np.dtype([("penalties", "u8"), ("capacity", "i4")])  # a part of it,
PLACE_AT = 80  # that begins at this byte
BIAS = np.dtype([("amount", "f8"), ("id", "i4"), ("unused", "i4")])
PENALTY_BYTES = 16


class Call(Structure):
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


@dataclass(frozen=True)
class _Shared:
    """What the rows of a request have in common. The record of one: `parameters`, then its own key, position
    and list of penalties, then `rest`.
    """

    parameters: tuple[float, ...]
    rest: tuple[float, ...]
    capacity: int  # of the list of penalties; 0: there are none
    bias: Tensor | None  # which `rest` points to


class CudaSampler:
    """`sampling.Sampler` on the device. Memory: 264 bytes a slot and 4 KiB for penalties, which grow to 16 to
    32 bytes a token drawn by a row that has penalties (at most 1 MiB, when it has drawn the whole
    vocabulary). Not thread-safe; all calls belong on one stream.
    """

    def __init__(self, slots: int, vocab: int, device: torch.device | str) -> None:
        """`vocab` is the width of the logits. Raises build.BuildError when the kernels cannot be had."""
        self.width = vocab
        self.vocab = min(vocab, VOCABULARY)
        self._library = build.load(build.architecture(torch.device(device)))
        self._library.rwkv_sample.argtypes = (POINTER(Call), c_int, c_int, c_int, c_void_p)
        self.blocks = 0  # that share a row; 0: as many as is best. The ids do not depend on it
        self._records = Records(slots, ROW, torch.device(device))
        self.device = self._records.table.device  # with its number
        self._rows: list[_Shared | None] = [None] * slots
        self._latest: tuple[Sampling, _Shared] | None = None
        self._penalties = torch.empty(
            slots, FIRST_CAPACITY * PENALTY_BYTES, dtype=torch.uint8, device=self.device
        )
        self._lists = self._penalties.data_ptr()
        self._grown: dict[int, Tensor] = {}  # slot -> the list of its penalties that did not fit any more
        self._capacity = np.zeros(slots, np.int64)  # 0: no penalties
        self._drawn = np.zeros(slots, np.int64)

    def check(self, params: Sampling) -> None:
        """Raises what parameters.check does."""
        check(params, self.width)

    def set_row(self, slot: int, params: Sampling, seed: int, stream: int) -> None:
        """As in `Sampler`; the device hears of it at the next `prepare`."""
        if self._latest is None or self._latest[0] is not params:
            self._latest = params, self._shared(params)
        shared = self._rows[slot] = self._latest[1]
        self._grown.pop(slot, None)
        self._drawn[slot] = 0
        self._capacity[slot] = shared.capacity
        penalties = self._lists + slot * FIRST_CAPACITY * PENALTY_BYTES
        self._records.put(slot, (*shared.parameters, random_key(seed, stream), 0, penalties, *shared.rest))

    def sample(self, logits: Tensor, slots: Sequence[int]) -> list[int]:
        """As in `Sampler`, from fp32 or fp16 logits, which are left as they are."""
        for slot in slots:
            if self._rows[slot] is None:
                raise ValueError(f"No row has begun in slot {slot}; call set_row first.")
        self.prepare(slots)
        index = upload(list(slots), self.device, torch.int32)
        return self.sample_async(logits, index).tolist()

    def prepare(self, slots: Sequence[int]) -> None:
        """Once before each step that draws for `slots`, also one that replays a graph: tells the device of
        the rows that have begun, and makes room for the penalties of one more token.
        """
        self._records.flush()  # before `_grow`, which changes a part of a record
        index = np.asarray(slots, np.intp)
        capacity = self._capacity[index]
        for slot in index[(capacity > 0) & (self._drawn[index] >= capacity) & (capacity < self.vocab)]:
            self._grow(int(slot))
        self._drawn[index] += 1

    def sample_async(self, logits: Tensor, slots: Tensor, ids: Tensor | None = None) -> Tensor:
        """One token for each row of logits [rows, vocab], fp32 or fp16, without waiting for it: ids [rows]
        int32 on the device.

        slots [rows] int32 on the device; a slot comes at most once, and a negative one is padding, whose id
        is 0. `ids`: where to write. Can be captured in a graph. `prepare` comes first.
        """
        if (
            logits.dtype not in (torch.float32, torch.float16)
            or logits.shape != (len(slots), self.width)
            or logits.stride(1) != 1
        ):
            raise ValueError(
                f"Logits {list(logits.shape)} of {logits.dtype} cannot be sampled from; give fp32 or fp16 "
                "logits "
                f"[{len(slots)}, {self.width}] whose rows are contiguous."
            )
        if slots.dtype != torch.int32:
            raise ValueError(f"Slots of {slots.dtype} cannot be used; give int32.")
        with torch.cuda.device(self.device):
            return self._sample(
                logits,
                slots,
                torch.empty(len(slots), dtype=torch.int32, device=self.device) if ids is None else ids,
            )

    def _sample(self, logits: Tensor, slots: Tensor, ids: Tensor) -> Tensor:
        rows = len(slots)
        blocks = self.blocks or self._library.rwkv_sample_blocks(rows)
        workspace = None
        if blocks == 1:
            chunk = self._library.rwkv_sample_chunk(self.vocab, 1)
            workspace = torch.empty(rows, chunk, dtype=torch.float32, device=self.device)
        call = Call(
            logits.data_ptr(),
            logits.stride(0),
            self.width,
            self.vocab,
            slots.data_ptr(),
            self._records.table.data_ptr(),
            ids.data_ptr(),
            None if workspace is None else workspace.data_ptr(),
            0,
        )
        stream = torch.cuda.current_stream(self.device).cuda_stream
        error = self._library.rwkv_sample(
            byref(call), rows, int(logits.dtype == torch.float16), blocks, stream
        )
        if error:
            raise RuntimeError(
                f"The kernel rwkv_sample could not be launched (CUDA error {error}); check the driver and "
                "free GPU memory."
            )
        return ids

    def _shared(self, params: Sampling) -> _Shared:
        """Raises what `check` does."""
        self.check(params)
        how = Parameters.of(params, self.vocab)
        rule = how.penalties or Rule()
        capacity = 0 if how.penalties is None else FIRST_CAPACITY
        bias, place, count = None, 0, 0
        if how.bias is not None:
            entries = np.zeros(len(how.bias[0]), BIAS)
            entries["id"], entries["amount"] = how.bias
            bias = _bytes(entries).to(self.device, non_blocking=True)
            place, count = bias.data_ptr(), len(entries)
        return _Shared(
            (
                how.temperature,
                how.noise,
                how.top_p,
                rule.first,
                rule.later,
                rule.decay,
                rule.flat,
                rule.per_count,
            ),
            (
                capacity,
                0,
                place,
                count,
                GREEDY if how.greedy else METHODS[how.method],
                how.top_k,
                math.log2(math.e) / how.temperature,
                bool(rule.uncounted),
                0,
            ),
            capacity,
            bias,
        )

    def _grow(self, slot: int) -> None:
        """Move a row's penalties to a list twice as long."""
        capacity = int(self._capacity[slot])
        old = self._grown.get(slot, self._penalties[slot])
        new = torch.empty(2 * capacity * PENALTY_BYTES, dtype=torch.uint8, device=self.device)
        new[: len(old)].copy_(old)
        place = np.array([(new.data_ptr(), 2 * capacity)], PLACE)
        self._records.table.view(torch.uint8)[slot, PLACE_AT : PLACE_AT + PLACE.itemsize].copy_(
            _bytes(place), non_blocking=True
        )
        self._grown[slot], self._capacity[slot] = new, 2 * capacity


def bytes_per_slot(vocab: int) -> int:
    """The most for a slot: all of the vocabulary drawn, with penalties and a bias for each token."""
    grown = 1 << (vocab - 1).bit_length()
    return 2 * ROW.itemsize + 8 + (FIRST_CAPACITY + grown) * PENALTY_BYTES + vocab * BIAS.itemsize


def _bytes(records: np.ndarray) -> Tensor:
    """Structured numbers as uint8. Copies of these to the device are staged by the driver, so `records` may
    go at once.
    """
    return torch.from_numpy(records.view(np.uint8))
