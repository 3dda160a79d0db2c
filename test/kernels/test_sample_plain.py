"""Rows without limits, bias, penalties and noise: a kernel of their own draws what that of all rows draws."""

import pytest
import torch
from cuda_gpu import needs_gpu

from rwkv_batch.ops.cuda.binding import Kernels
from rwkv_batch.ops.cuda.inputs.feed import Feed
from rwkv_batch.sampling.reference import BROKEN
from rwkv_batch.sampling.sampler_cuda import CudaSampler
from rwkv_batch.text.tokenizer import VOCABULARY
from rwkv_batch.wire.protocol import Sampling

pytestmark = needs_gpu
METHODS = [
    Sampling(),
    Sampling(temperature=0),
    Sampling(method="nucleus"),
    Sampling(method="gumbel"),
    Sampling(temperature=0.2),
    Sampling(temperature=1000.0),
]


def sampler_of(rows: int, vocab: int, takes_plain: bool) -> CudaSampler:
    sampler = CudaSampler(rows, vocab, "cuda")
    sampler.takes_plain = sampler.takes_plain and takes_plain
    for row in range(rows):
        sampler.begin(row, METHODS[row % len(METHODS)], 5, row)
    return sampler


@pytest.mark.parametrize("rows", [1, 16, 17, 48, 49, 321])
@pytest.mark.parametrize("vocab", [40, 5000, 20000, 50304, 65536])
def test_they_draw_what_they_draw_beside_others(rows, vocab):
    alone, beside = sampler_of(rows, vocab, True), sampler_of(rows, vocab, False)
    logits = (torch.randn(rows, vocab, device="cuda") * 3).half()
    odd = logits.clone()
    odd[0, [1, 20]] = -float("inf")
    odd[rows // 2, 21:30] = -0.0
    for given in (logits, odd, logits):
        assert alone.sample(given, range(rows)) == beside.sample(given, range(rows))


@pytest.mark.parametrize("rows", [1, 17, 49, 321])
@pytest.mark.parametrize("vocab", [40, 50304, 65536])
def test_logits_that_are_not_finite_draw_nothing(rows, vocab):
    """A number anywhere, or all of them; NaN of either sign. Ids without text do not count."""
    sampler, beside = sampler_of(rows, vocab, True), sampler_of(rows, vocab, False)
    logits = (torch.randn(rows, vocab, device="cuda") * 3).half()
    places = torch.randint(0, min(vocab, VOCABULARY), (rows,))
    kinds = [
        float("nan"),
        -float("nan"),
        float("inf"),
        "nan",
        "-inf",
        "inf",
        -float("inf"),
        "undrawable",
        0.0,
    ]
    for row in range(rows):
        kind = kinds[row % len(kinds)]
        if kind == "undrawable":
            logits[row, VOCABULARY:] = float("nan")
        elif isinstance(kind, str):
            logits[row] = float(kind)
        else:
            logits[row, places[row]] = kind
    drawn = sampler.sample(logits, range(rows))
    assert [token == BROKEN for token in drawn] == [row % len(kinds) < 6 for row in range(rows)]
    assert drawn == beside.sample(logits, range(rows))


@pytest.mark.parametrize("rows", [3, 60])
def test_padding_is_left_alone(rows):
    alone, beside = sampler_of(rows, 5000, True), sampler_of(rows, 5000, False)
    logits = (torch.randn(rows, 5000, device="cuda") * 3).half()
    slots = torch.arange(rows, dtype=torch.int32, device="cuda")
    slots[1] = -1
    for sampler in (alone, beside):
        sampler.prepare(range(rows))
        assert sampler.sample_async(logits, slots)[1] == 0
    assert alone.sample(logits, range(rows)) == beside.sample(logits, range(rows))


def possible(sampling: Sampling, logits: torch.Tensor) -> list[int]:
    """The ids that a row may draw; some more at the border of top_p, as sums are rounded there."""
    if sampling.logit_bias:
        return list(sampling.logit_bias)  # by so much that others are not drawn
    probs, ids = logits.double().softmax(0).sort(descending=True)
    kept = probs.cumsum(0) - probs < sampling.top_p + 1e-3
    kept[sampling.top_k or len(kept) :] = False
    return (logits >= logits[ids[kept][-1]]).nonzero().flatten().tolist()


@pytest.mark.parametrize("limited", [Sampling(top_k=5), Sampling(top_p=0.5), Sampling(logit_bias={3: 50.0})])
def test_one_row_with_a_limit_beside_them_has_it(limited):
    sampler, others = sampler_of(6, 5000, True), sampler_of(6, 5000, True)
    logits = (torch.randn(6, 5000, device="cuda") * 3).half()
    sampler.begin(2, limited, 5, 2)
    drawn, expected = sampler.sample(logits, range(6)), others.sample(logits, range(6))
    assert drawn[2] in possible(limited, logits[2])
    assert drawn[:2] + drawn[3:] == expected[:2] + expected[3:]


def test_logits_that_lie_across_16_bytes_are_drawn_too():
    sampler, copied = sampler_of(4, 40, True), sampler_of(4, 40, True)
    logits = (torch.randn(4, 43, device="cuda") * 3).half()[:, 3:]
    assert sampler.sample(logits, range(4)) == copied.sample(logits.contiguous(), range(4))


@pytest.mark.parametrize("rows", [5, 100])
def test_the_feed_knows_what_was_drawn_and_whether_that_ends_a_row(rows):
    slots = torch.arange(rows, dtype=torch.int32, device="cuda")
    slots[3] = -1
    logits = (torch.randn(rows, 5000, device="cuda") * 3).half()
    logits[2, 4000] = float("nan")  # nothing is drawn, and the row has ended
    found = []
    for takes_plain in (True, False):
        sampler = sampler_of(rows, 5000, takes_plain)
        feed = Feed(Kernels(torch.device("cuda")), torch.zeros(rows, 1, 1, 64, 64, device="cuda"))
        for row in range(rows):
            feed.begin(row, logits[row].topk(12 * (row % 2)).indices.tolist())
        feed.prepare()
        sampler.prepare(range(rows))
        ids = sampler.sample_async(logits, slots, feed=feed)
        found.append((ids.tolist(), feed.records.view(torch.int32)[:, :2].tolist()))
    assert found[0] == found[1]
    ids, records = found[0]
    assert ids[2] == BROKEN and records[2] == [0, 1]
    ids[2], records[2] = 0, [0, 0]
    assert [record[0] for record in records] == ids
    assert {record[1] for record in records[::2]} == {0}
    assert records[1][1] == 1, "a greedy row draws what is likely"
