"""DeviceStates in fp16 that pass 65,504 keep the largest number of fp16, wherever torch stores them."""

from functools import partial

import pytest
import torch
from torch import Tensor

from rwkv_batch.ops import torch_ops as ops
from rwkv_batch.ops.wkv6 import wkv6_prefill, wkv6_step
from rwkv_batch.state.slots import DeviceStates

LARGEST = 65504
HEADS = 2
HALVES = torch.float16


def moved_on(state: float, change: float, lengths: list[int], family: str, by_token: bool = False) -> Tensor:
    """DeviceStates `[rows, heads, 64, 64]` of such numbers after rows of tokens that add `change` each."""
    tokens, shape = sum(lengths), (sum(lengths), HEADS, 64)
    states = torch.full((len(lengths), HEADS, 64, 64), state, dtype=HALVES)
    rows = ops.PackedRows(lengths, list(range(len(lengths))), "cpu", by_token)
    r, nothing = torch.randn(shape), torch.zeros(shape)
    k, v = torch.full(shape, abs(change) ** 0.5), torch.full(shape, change / abs(change) ** 0.5)
    if family == "rwkv6":
        step, prefill = (
            partial(function, u=torch.zeros(HEADS, 64)) for function in (wkv6_step, wkv6_prefill)
        )
        y = ops.run_recurrence((r, nothing, k, v), states, rows, step, prefill)
    else:
        kk = torch.nn.functional.normalize(torch.randn(shape), dim=-1)
        y = ops.wkv((r, nothing, k, v, kk, nothing), states, rows)
    assert y.shape == (tokens, HEADS, 64) and y.isfinite().all()
    return states


@pytest.mark.parametrize("family", ["rwkv7", "rwkv6"])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    ("lengths", "by_token"),
    [([1, 1, 1], False), ([2], False), ([1, 5, 40], False), ([1, 5, 40], True)],
    ids=["tokens", "a prompt", "both", "token after token"],
)
def test_a_recurrence_keeps_the_largest_number(
    family: str, sign: int, lengths: list[int], by_token: bool
) -> None:
    states = moved_on(sign * 65000, sign * 800, lengths, family, by_token)
    assert states.eq(sign * LARGEST).all()


@pytest.mark.parametrize("family", ["rwkv7", "rwkv6"])
def test_a_number_at_the_limit_comes_back_from_it(family: str) -> None:
    assert moved_on(LARGEST, -800, [1, 4], family)[:, 0, 0, 0].tolist() == [64704, 62304]


@pytest.mark.parametrize("lengths", [[1, 1], [1, 7]], ids=["tokens", "a prompt"])
def test_a_token_shift_keeps_the_largest_number(lengths: list[int]) -> None:
    shift = torch.zeros(2, 64, dtype=HALVES)
    x = torch.full((sum(lengths), 64), float("inf"), dtype=HALVES)
    x[:, ::2] *= -1
    ops.token_shift(x, shift, ops.PackedRows(lengths, [0, 1], "cpu"))
    assert shift[:, ::2].eq(-LARGEST).all() and shift[:, 1::2].eq(LARGEST).all()


def test_what_all_slots_begin_with_keeps_the_largest_number() -> None:
    start = torch.full((1, HEADS, 64, 64), 1e6)
    states = DeviceStates(3, 1, HEADS * 64, HALVES, HALVES, start=start)
    assert states.wkv.eq(LARGEST).all()
    states.wkv.zero_()
    states.clear([1])
    assert states.wkv[1].eq(LARGEST).all()


def test_what_is_no_number_stays_that() -> None:
    found = ops.as_stored(torch.tensor([float("nan"), float("inf"), -float("inf"), 70000.0, 1.0]), HALVES)
    assert found[0].isnan() and found[1:].tolist() == [LARGEST, -LARGEST, LARGEST, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes_with_room_for_it_hold_what_fp16_cannot(dtype: torch.dtype) -> None:
    assert ops.as_stored(torch.tensor([2.0**17]), dtype).item() == 2**17
