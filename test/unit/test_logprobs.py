"""Logprobs are those of the model's distribution, no matter what is drawn from it."""

import math

import pytest
import torch
from cuda_gpu import needs_gpu

from rwkv_batch.sampling.logprobs import ROWS_AT_ONCE, RowLogprobs, logprobs, row_logprobs
from rwkv_batch.text.tokenizer import VOCABULARY

on_devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])


def found(logits: torch.Tensor, drawn: list[int], counts: list[int]) -> list[RowLogprobs]:
    values, ids = logprobs(logits, torch.tensor(drawn, device=logits.device), max(counts))
    return row_logprobs(values.cpu(), ids.cpu(), counts)


@on_devices
def test_logprobs_are_those_of_the_model(device: str):
    logits = (torch.randn(3, 65536, generator=torch.Generator().manual_seed(4)) * 4).to(device)
    logits[0, 65533] = 40.0
    untouched = logits.clone()
    expected = logits.cpu().double().log_softmax(1)
    rows = found(logits, [5, 70, 65529], [3, 0, 20])
    assert torch.equal(logits, untouched)
    for row, (token, count) in enumerate([(5, 3), (70, 0), (65529, 20)]):
        logprob, top = rows[row]
        assert logprob == pytest.approx(expected[row, token].item(), abs=1e-5)
        values, ids = expected[row, :VOCABULARY].topk(count)
        assert [i for i, _ in top] == ids.tolist()
        assert [p for _, p in top] == pytest.approx(values.tolist(), abs=1e-5)


@on_devices
def test_those_of_equal_tokens_come_in_order_of_id(device: str):
    logits = torch.tensor(
        [[0.0, 1.0, 1.0, -0.0, 1.0, -1.0, -2.0], [-3.0, -1.0, -0.0, 0.0, -1.0, -1.0, -2.0]], device=device
    )
    rows = found(logits, [0, 0], [7, 6])
    assert [[i for i, _ in top] for _, top in rows] == [[1, 2, 4, 0, 3, 5, 6], [2, 3, 1, 4, 5, 6]]


@on_devices
def test_many_equal_tokens_of_half_precision(device: str):
    """Which of them are among the likeliest is no chance either."""
    logits = (
        (torch.randn(2 * ROWS_AT_ONCE + 1, 65536, generator=torch.Generator().manual_seed(5)) * 2)
        .round()
        .half()
        .to(device)
    )
    for (_, top), row in zip(
        found(logits, [0] * len(logits), [20] * len(logits)), logits[:, :VOCABULARY].tolist(), strict=True
    ):
        assert [i for i, _ in top] == sorted(range(VOCABULARY), key=lambda i, row=row: (-row[i], i))[:20]


@on_devices
def test_those_of_minus_infinity_are_numbers(device: str):
    ((logprob, top),) = found(torch.tensor([[0.0, 1.0, -math.inf]], device=device), [2], [2])
    assert math.isfinite(logprob) and logprob < -1e38
    assert [p for _, p in top] == pytest.approx([-0.3132617, -1.3132617])
    assert [i for i, _ in top] == [1, 0]


@on_devices
@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_broken_row_has_no_logprobs_and_others_keep_theirs(device: str, number: float):
    """Nor does it need a drawn id."""
    logits = torch.tensor([[0.0, number, 2.0], [0.0, 1.0, 2.0]], device=device)
    (logprob, top), whole = found(logits, [-1, 0], [2, 2])
    assert math.isnan(logprob) and all(math.isnan(p) for _, p in top)
    assert whole == found(logits[1:], [0], [2])[0]


@on_devices
def test_no_more_than_there_are(device: str):
    ((_, top),) = found(torch.zeros(1, 4, device=device), [0], [9])
    assert [i for i, _ in top] == [0, 1, 2, 3]
