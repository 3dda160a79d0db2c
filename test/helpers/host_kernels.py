"""The kernels that CudaSampler calls, in numpy on the host's memory, so that its own part runs without a GPU.

rwkv_sample is a stand-in that draws a fixed id for each slot; rwkv_sample_adjust and rwkv_sample_record do
what cuda/sample_adjust.cu does.
"""

from contextlib import nullcontext
from ctypes import c_uint8
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rwkv_batch.ops.cuda import build, gemms
from rwkv_batch.ops.cuda.inputs import staging
from rwkv_batch.sampling.penalties import UNCOUNTED
from rwkv_batch.sampling.reference import BROKEN, LARGEST, is_broken
from rwkv_batch.sampling.structs_cuda import (
    BIAS_ENTRY,
    PENALTY_ENTRY,
    SAMPLE_RECORD,
    AdjustInput,
    SampleInput,
)

NOT_DRAWN = 4  # as in sample_adjust.cu, in place of a row's top_p


class AtOnce:
    """In place of staging.Uploads, for a CPU."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        self._numbers = torch.empty(size, dtype=dtype)

    def buffer(self) -> np.ndarray:
        return self._numbers.numpy()

    def send(self, target: torch.Tensor) -> None:
        target.view(-1).copy_(self._numbers[: target.numel()])


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `CudaSampler(slots, vocab, "cpu")` run on these kernels."""
    library = SimpleNamespace(
        rwkv_sample_blocks=lambda rows: 1,
        rwkv_sample_chunk=lambda vocab, blocks: -(-vocab // (4096 * blocks)) * 4096,
        rwkv_sample=_sample,
        rwkv_sample_plain_fits=lambda vocab: 0,
        rwkv_sample_plain=_sample,
        rwkv_sample_filtered=lambda call, *rest: _sample(SimpleNamespace(_obj=call._obj.sample), *rest),
        rwkv_sample_adjust=_adjust,
        rwkv_sample_record=_record,
    )
    monkeypatch.setattr(build, "architecture", lambda device: "host")
    monkeypatch.setattr(build, "load", lambda arch: library)
    monkeypatch.setattr(staging, "Uploads", AtOnce)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(gemms, "raw_stream", lambda: 0)


def _sample(call, rows: int, fp16: int, blocks: int, stream: int) -> int:
    given = call._obj
    slots = _array(given.slots, rows, np.int32)
    _array(given.ids, rows, np.int32)[:] = np.where(slots < 0, 0, (slots + 1) % given.vocab)
    return 0


def _adjust(call, rows: int, fp16: int, blocks: int, stream: int) -> int:
    given: AdjustInput = call._obj
    width = given.adjusted_width
    adjusted = _array(given.adjusted, rows * width, np.float32).reshape(rows, width)
    top_k, top_p = _array(given.top_k, rows, np.int32), _array(given.top_p, rows, np.float32)
    for row, place in enumerate(_array(given.places, rows, np.int32)):
        values, record = _logits(given.sample, int(place), bool(fp16)), _record_at(given.sample, int(place))
        if record is not None:
            bias = _array(int(record["bias"]), int(record["bias_count"]), BIAS_ENTRY)
            drawn = _array(int(record["penalties"]), int(record["used"]), PENALTY_ENTRY)
            values[bias["id"]] += bias["amount"]
            values[drawn["id"]] -= drawn["decaying"] + record["flat"] + record["per_count"] * drawn["count"]
        adjusted[row] = -np.inf
        adjusted[row, : given.sample.vocab] = values - values.max()
        with np.errstate(over="ignore"):
            adjusted[row] /= np.float32(1 if record is None else record["temperature"])
        top_k[row] = 1 if record is None else record["top_k"]
        top_p[row] = 2 if record is None or record["top_p"] == 1 else record["top_p"]
        if record is not None and is_broken(float(_stored(given.sample, int(place), bool(fp16)).max())):
            top_p[row] = NOT_DRAWN
    return 0


def _record(call, drawn: int, rows: int, stream: int) -> int:
    given: AdjustInput = call._obj
    places = _array(given.places, rows, np.int32)
    tokens = _array(drawn, rows, np.int32).tolist()
    for row, (place, token) in enumerate(zip(places.tolist(), tokens, strict=True)):
        ids, record = _array(given.sample.ids, place + 1, np.int32), _record_at(given.sample, place)
        broken = _array(given.top_p, rows, np.float32)[row] == NOT_DRAWN
        ids[place] = 0 if record is None else BROKEN if broken else token
        if record is None or broken:
            continue
        record["position"] += 1
        if record["capacity"]:
            entries = _array(int(record["penalties"]), int(record["capacity"]), PENALTY_ENTRY)
            used, counts = int(record["used"]), not (record["exempt"] and token in UNCOUNTED)
            entries["decaying"][:used] *= record["decay"]
            known = np.flatnonzero(entries["id"][:used] == token)
            if len(known):
                entries["count"][known] += 1
                entries["decaying"][known] += record["later"] * counts
            else:
                entries[used] = record["first"] * counts, token, 1
                record["used"] += 1
    return 0


def _logits(given: SampleInput, row: int, half: bool) -> np.ndarray:
    """fp32 [vocab], finite."""
    return np.nan_to_num(_stored(given, row, half), nan=LARGEST, posinf=LARGEST, neginf=-LARGEST)


def _stored(given: SampleInput, row: int, half: bool) -> np.ndarray:
    """fp32 [vocab], as they are."""
    dtype = np.dtype(np.float16 if half else np.float32)
    at = given.logits + row * given.stride * dtype.itemsize
    return _array(at, given.vocab, dtype).astype(np.float32)


def _record_at(given: SampleInput, row: int) -> np.ndarray | None:
    """The record of the slot in which the row lives, as a scalar that can be written; None for padding."""
    slot = int(_array(given.slots, row + 1, np.int32)[row])
    if slot < 0:
        return None
    return _array(given.table + slot * SAMPLE_RECORD.itemsize, 1, SAMPLE_RECORD)[0]


def _array(pointer: int, count: int, dtype: np.dtype | type) -> np.ndarray:
    """`count` numbers or records at that address, which can be written."""
    size = np.dtype(dtype).itemsize * count
    return np.frombuffer((c_uint8 * size).from_address(pointer), dtype) if count else np.empty(0, dtype)
