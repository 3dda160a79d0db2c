"""Logprobs: of what was drawn, and of the likeliest tokens, in the model's own distribution over all of its
vocabulary.

They are computed where the logits are, without waiting for it, so that rows which want them do not hold up
the others.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from rwkv_batch.sampling.reference import LARGEST
from rwkv_batch.text.tokenizer import VOCABULARY

ROWS_AT_ONCE = 32  # each takes about five more rows of fp32 logits meanwhile
ID_BITS = 20  # enough for the ids of any vocabulary

Entry = tuple[
    float, list[tuple[int, float]]
]  # logprob of the drawn id, and (id, logprob) of the likeliest ones, likeliest first


def logprobs(logits: Tensor, drawn: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Of logits [rows, vocab], which are left as they are, and the ids [rows] drawn from them: logprobs
    [rows, 1 + count] fp32, the drawn id's before those of the `count` likeliest, and the likeliest ids [rows,
    count].

    Ids without text are left out of the likeliest; of equally likely ones the lowest comes first.
    """
    count = min(count, VOCABULARY, logits.shape[1])
    pieces = [
        _logprobs(some, ids, count)
        for some, ids in zip(logits.split(ROWS_AT_ONCE), drawn.split(ROWS_AT_ONCE), strict=True)
    ]
    values, ids = zip(*pieces, strict=True)
    return torch.cat(values), torch.cat(ids)


def entries(values: Tensor, ids: Tensor, counts: Iterable[int]) -> list[Entry]:
    """What `logprobs` found, on the host, row by row; `counts`: how many of the likeliest each row wants."""
    return [
        (drawn, list(zip(top[:count], likeliest[:count], strict=True)))
        for (drawn, *likeliest), top, count in zip(values.tolist(), ids.tolist(), counts, strict=True)
    ]


def _logprobs(logits: Tensor, drawn: Tensor, count: int) -> tuple[Tensor, Tensor]:
    logits = logits.float().nan_to_num(0.0, LARGEST, -LARGEST)
    ids = _likeliest(logits[:, :VOCABULARY], count)
    values = logits.gather(1, torch.cat([drawn.long()[:, None], ids], 1))
    return values - logits.logsumexp(1, keepdim=True), ids


def _likeliest(values: Tensor, count: int) -> Tensor:
    """The ids [rows, count] of the largest values, by keys that are all different: `topk` leaves open which
    of equal ones it takes.
    """
    if count == 0:
        return torch.empty(len(values), 0, dtype=torch.int64, device=values.device)
    bits = (values + 0.0).view(torch.int32)  # -0 becomes 0
    keys = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()  # integers in the order of the numbers
    keys <<= ID_BITS
    keys -= torch.arange(values.shape[1], device=values.device)
    return keys.topk(count).indices
