"""Log probabilities of the drawn token and of the likeliest ones, in the model's own distribution.

That is the softmax of the logits over the whole vocabulary, before bias, penalties and limits. It is computed
on the device of the logits without a synchronisation, so that rows with logprobs do not hold up the others.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.functional import pad

from rwkv_batch.sampling.reference import LARGEST
from rwkv_batch.text.tokenizer import VOCABULARY

ROWS_AT_ONCE = 32  # each takes about five more rows of fp32 logits meanwhile
ID_BITS = 20  # enough for the ids of any vocabulary

# Logprob of the drawn id, and (id, logprob) of the likeliest ones, likeliest first.
RowLogprobs = tuple[float, list[tuple[int, float]]]


def logprobs(logits: Tensor, drawn: Tensor, count: int, invariant: bool = False) -> tuple[Tensor, Tensor]:
    """Log probabilities of the ids `[rows]` drawn from logits `[rows, vocab]`, and of the `count` likeliest.

    invariant: a row's are the same, bit for bit, for any number of rows.

    Returns logprobs `[rows, 1 + count]` fp32, the drawn id's first, and the likeliest ids `[rows, count]`.
    Ids without text are not among the likeliest; of equally likely ones the lowest comes first. Where a logit
    is NaN or infinity, all are NaN; those of a negative id mean nothing.
    """
    count = min(count, VOCABULARY, logits.shape[1])
    parts = zip(torch.split(logits, ROWS_AT_ONCE), torch.split(drawn, ROWS_AT_ONCE), strict=True)
    pieces = [_logprobs(some, ids, count, ROWS_AT_ONCE if invariant else 0) for some, ids in parts]
    values, ids = zip(*pieces, strict=True)
    return torch.cat(values), torch.cat(ids)


def row_logprobs(values: Tensor, ids: Tensor, counts: Iterable[int]) -> list[RowLogprobs]:
    """The results of `logprobs`, on the host, by row; `counts`: likeliest ids that each row asked for."""
    return [
        (drawn, list(zip(top[:count], likeliest[:count], strict=True)))
        for (drawn, *likeliest), top, count in zip(values.tolist(), ids.tolist(), counts, strict=True)
    ]


def _logprobs(logits: Tensor, drawn: Tensor, count: int, padded: int) -> tuple[Tensor, Tensor]:
    """padded: the least number of rows of which the sums are made."""
    logits = logits.float().nan_to_num(math.nan, math.nan, -LARGEST)
    ids = _likeliest(logits[:, :VOCABULARY], count)
    values = logits.gather(1, torch.cat([drawn.long().clamp(min=0)[:, None], ids], 1))
    rows = len(logits)
    if rows < padded:  # as the order of a sum may depend on how many there are
        logits = pad(logits, (0, 0, 0, padded - rows))
    return values - logits.logsumexp(1, keepdim=True)[:rows], ids


def _likeliest(values: Tensor, count: int) -> Tensor:
    """The ids `[rows, count]` of the largest values.

    Several are found by keys that are all different, as `topk` leaves open which of equal values it takes.
    """
    if count == 0:
        return torch.empty(len(values), 0, dtype=torch.int64, device=values.device)
    if count == 1:
        return values.argmax(1, keepdim=True)  # the first of equal ones
    bits = (values + 0.0).view(torch.int32)  # -0 becomes 0
    keys = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()  # integers in the order of the numbers
    keys <<= ID_BITS
    keys -= torch.arange(values.shape[1], device=values.device)
    return keys.topk(count).indices
