"""Draws tokens on the GPU: the same ids as `sampling.Sampler` from the same seeds, without the logits leaving the device.

Weights are computed in fp32 here and partly in fp64 there, so a random number within about 1e-6 of the border between two tokens may
fall on the other side; nothing else differs.
"""
import math
from collections.abc import Sequence
from ctypes import POINTER, Structure, byref, c_int, c_int64, c_void_p

import numpy as np
import torch
from torch import Tensor

from rwkv_batch.ops import build
from rwkv_batch.ops.cuda_records import Records
from rwkv_batch.penalties import Penalties
from rwkv_batch.protocol import Sampling
from rwkv_batch.sampling import Sampler

GREEDY, RAPID, NUCLEUS, NOISE = range(4)
METHODS = {"rapid": RAPID, "gumbel": RAPID, "nucleus": NUCLEUS, "noise": NOISE}  # "gumbel" is "rapid" without limits
FIRST_CAPACITY = 256  # drawn tokens that a row has room for when it begins

# The records of cuda/sample_row.cuh.
ROW = np.dtype([("temperature", "f8"), ("noise", "f8"), ("top_p", "f8"), ("first", "f8"), ("later", "f8"), ("decay", "f8"), ("flat", "f8"),
                ("per_count", "f8"), ("key", "u8"), ("position", "u8"), ("penalties", "u8"), ("capacity", "i4"), ("used", "i4"),
                ("bias", "u8"), ("bias_count", "i4"), ("method", "i4"), ("top_k", "i4"), ("scale", "f4"), ("exempt", "i4"),
                ("unused", "i4")])
PLACE = np.dtype([("penalties", "u8"), ("capacity", "i4")])  # a part of it,
PLACE_AT = 80                                                # that begins at this byte
BIAS = np.dtype([("amount", "f8"), ("id", "i4"), ("unused", "i4")])
PENALTY_BYTES = 16
NO_PENALTIES = Penalties()


class Call(Structure):
    _fields_ = (("logits", c_void_p), ("stride", c_int64), ("width", c_int), ("vocab", c_int), ("slots", c_void_p), ("table", c_void_p),
                ("ids", c_void_p), ("workspace", c_void_p), ("chunk", c_int))


class CudaSampler(Sampler):
    """`Sampler` on the device. Memory: 264 bytes a slot and 4 KiB for penalties, which grow to 16 to 32 bytes a token drawn by a row that
    has penalties (at most 1 MiB, when it has drawn the whole vocabulary). Not thread-safe; all calls belong on one stream.
    """

    def __init__(self, slots: int, vocab: int, device: torch.device | str) -> None:
        """`vocab` is the width of the logits. Raises build.BuildError when the kernels cannot be had."""
        super().__init__(slots, vocab, "cpu")
        self.device = torch.device(device)
        self._library = build.load(build.architecture(self.device))
        self._library.rwkv_sample.argtypes = (POINTER(Call), c_int, c_int, c_int, c_void_p)
        self.blocks = 0  # that share a row; 0: as many as is best. The ids do not depend on it
        self._records = Records(slots, ROW, self.device)
        self._penalties = torch.empty(slots, FIRST_CAPACITY * PENALTY_BYTES, dtype=torch.uint8, device=self.device)
        self._lists = self._penalties.data_ptr()
        self._grown: dict[int, Tensor] = {}  # slot -> the list of its penalties that did not fit any more
        self._bias: dict[int, Tensor] = {}
        self._capacity = np.zeros(slots, np.int64)  # 0: no penalties
        self._drawn = np.zeros(slots, np.int64)

    def set_row(self, slot: int, params: Sampling, seed: int, stream: int) -> None:
        super().set_row(slot, params, seed, stream)
        row = self._row(slot)
        self._grown.pop(slot, None)
        self._bias.pop(slot, None)
        self._drawn[slot] = 0
        self._capacity[slot] = 0 if row.penalties is None else FIRST_CAPACITY
        bias: tuple[int, int] = 0, 0
        if row.bias is not None:
            entries = np.zeros(len(row.bias[0]), BIAS)
            entries["id"], entries["amount"] = row.bias
            self._bias[slot] = _bytes(entries).to(self.device, non_blocking=True)
            bias = self._bias[slot].data_ptr(), len(entries)
        rule = row.penalties or NO_PENALTIES
        self._records.put(slot, (
            row.temperature, row.noise, row.top_p, rule._first, rule._later, rule._decay, rule._flat, rule._per_count,
            self._keys[slot], 0, self._lists + slot * FIRST_CAPACITY * PENALTY_BYTES, self._capacity[slot], 0, *bias,
            GREEDY if row.greedy else METHODS[row.method], row.top_k, math.log2(math.e) / row.temperature, bool(rule._uncounted), 0))

    def sample(self, logits: Tensor, slots: Sequence[int]) -> list[int]:
        """As in `Sampler`, from fp32 or fp16 logits, which are left as they are."""
        for slot in slots:
            self._row(slot)
        self.prepare(slots)
        index = torch.tensor(list(slots), dtype=torch.int32).to(self.device, non_blocking=True)
        return self.sample_async(logits, index).tolist()

    def prepare(self, slots: Sequence[int]) -> None:
        """Once before each step that draws for `slots`, also one that replays a graph: tells the device of the rows that have begun, and
        makes room for the penalties of one more token."""
        self._records.flush()  # before `_grow`, which changes a part of a record
        index = np.asarray(slots, np.intp)
        capacity = self._capacity[index]
        for slot in index[(capacity > 0) & (self._drawn[index] >= capacity) & (capacity < self.vocab)]:
            self._grow(int(slot))
        self._drawn[index] += 1

    def sample_async(self, logits: Tensor, slots: Tensor, ids: Tensor | None = None) -> Tensor:
        """One token for each row of logits [rows, vocab], fp32 or fp16, without waiting for it: ids [rows] int32 on the device.

        slots [rows] int32 on the device; a slot comes at most once, and a negative one is padding, whose id is 0. `ids`: where to write.
        Can be captured in a graph. `prepare` comes first.
        """
        if logits.dtype not in (torch.float32, torch.float16) or logits.shape != (len(slots), self.width) or logits.stride(1) != 1:
            raise ValueError(f"Logits {list(logits.shape)} of {logits.dtype} cannot be sampled from; give fp32 or fp16 logits "
                             f"[{len(slots)}, {self.width}] whose rows are contiguous.")
        if slots.dtype != torch.int32:
            raise ValueError(f"Slots of {slots.dtype} cannot be used; give int32.")
        rows = len(slots)
        if ids is None:
            ids = torch.empty(rows, dtype=torch.int32, device=self.device)
        blocks = self.blocks or self._library.rwkv_sample_blocks(rows)
        workspace = None
        if blocks == 1:
            chunk = self._library.rwkv_sample_chunk(self.vocab, 1)
            workspace = torch.empty(rows, chunk, dtype=torch.float32, device=self.device)
        call = Call(logits.data_ptr(), logits.stride(0), self.width, self.vocab, slots.data_ptr(), self._records.table.data_ptr(),
                    ids.data_ptr(), None if workspace is None else workspace.data_ptr(), 0)
        stream = torch.cuda.current_stream(self.device).cuda_stream
        error = self._library.rwkv_sample(byref(call), rows, int(logits.dtype == torch.float16), blocks, stream)
        if error:
            raise RuntimeError(f"The kernel rwkv_sample could not be launched (CUDA error {error}); check the driver and free GPU memory.")
        return ids

    def _grow(self, slot: int) -> None:
        """Move a row's penalties to a list twice as long."""
        capacity = int(self._capacity[slot])
        old = self._grown.get(slot, self._penalties[slot])
        new = torch.empty(2 * capacity * PENALTY_BYTES, dtype=torch.uint8, device=self.device)
        new[: len(old)].copy_(old)
        place = np.array([(new.data_ptr(), 2 * capacity)], PLACE)
        self._records.table.view(torch.uint8)[slot, PLACE_AT : PLACE_AT + PLACE.itemsize].copy_(_bytes(place), non_blocking=True)
        self._grown[slot], self._capacity[slot] = new, 2 * capacity


def _bytes(records: np.ndarray) -> Tensor:
    """Structured numbers as uint8. Copies of these to the device are staged by the driver, so `records` may go at once."""
    return torch.from_numpy(records.view(np.uint8))
