"""The roofline counts what a step must read."""

import pytest
from checkpoints import tiny

from bench.decode import Work, decode_floor, prefill_floor

pytestmark = pytest.mark.thorough


def test_work_counts_every_weight_once():
    checkpoint = tiny(layers=2, width=128, vocab=512)
    work = Work.from_checkpoint(checkpoint)
    vectors = sum(t.numel() for name, t in checkpoint.tensors.items() if t.dim() == 1 or name.endswith("r_k"))
    assert work.dense + work.value + 512 * 128 + vectors == checkpoint.parameters
    assert work.value == 2 * 4 * 128 * 128 and work.state == 2 * 2 * 64 * 64


def test_floors_grow_with_the_work():
    work = Work.from_checkpoint(tiny())
    one = decode_floor(work, 1, 1e12, 1e15, active=0.1)
    assert (
        one
        < decode_floor(work, 1, 1e12, 1e15)
        < decode_floor(work, 8, 1e12, 1e15)
        < decode_floor(work, 8, 1e12, 1e15, state_bytes=4)
    )
    assert decode_floor(work, 1 << 20, 1e30, 1e15) > 2 * (1 << 20) * work.dense / 1e15
    assert prefill_floor(work, 200, 1e15) == 2 * prefill_floor(work, 100, 1e15)
