"""The operations of RWKV-7 in plain torch, on any device: the readable reference.

Rows of one call are packed without padding: rows of one token (decode) come first, then those whose last
tokens are a draft, then longer pieces (prefill). T is the number of tokens of all rows together, H the number
of heads, C = 64 H the width. The recurrence computes in fp32, also where states are stored in fp16.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import group_norm, normalize

from rwkv_batch.ops.wkv_prefill import CHUNK, Chunks, cut, split, wkv_prefill

HEAD_SIZE = 64
GROUP_NORM_EPS = 64e-5
LOG_DECAY_SCALE = -0.6065306597126334  # -exp(-1/2)
TOGETHER = 1024  # prompt tokens, padding included, whose recurrence runs at once: more take memory


@dataclass(frozen=True)
class Pieces:
    """Rows of more than one token whose recurrence runs at once."""

    tokens: slice
    slots: Tensor  # in the order of the chunks
    chunks: Chunks


@dataclass(frozen=True)
class AcceptedTokens:
    """What is accepted of the drafts of a call, for the rows where that is something. All int64 `[rows]`."""

    begins: Tensor  # where the accepted tokens of a row begin among those of the call,
    ends: Tensor  # and where they end
    slots: Tensor


@dataclass(frozen=True)
class PackedRows:
    """Where the rows of one call lie: those of one token (decode) first, those with drafts next.

    Draft tokens leave the states in the slots as they are, until `accept` says how many of them count.
    """

    lengths: Sequence[int]
    slot_numbers: Sequence[int]
    device: torch.device | str
    by_token: bool = False  # the recurrence runs token after token, by what it computes for rows of one token
    drafted: Sequence[int] = ()  # how many tokens of each row, the last ones, are a draft; empty: none
    # What moves states on by accepted tokens, each of one layer.
    moves: list[Callable[[AcceptedTokens], None]] = field(default_factory=list)

    def accept(self, counts: Sequence[int]) -> None:
        """So many tokens of each row's draft, the first ones, count: its state moves on by them. Once."""
        ends = [end - drafted for end, drafted in zip(self.ends, self.drafted, strict=True)]
        rows = [
            (end, end + count, slot)
            for end, count, slot in zip(ends, counts, self.slot_numbers, strict=True)
            if count
        ]
        if rows:
            accepted = AcceptedTokens(*torch.tensor(rows, device=self.device).T.contiguous())
            for move in self.moves:
                move(accepted)

    @cached_property
    def decode(self) -> int:
        """How many rows have one token each; the others are in `drafts` and `pieces`."""
        return sum(length == 1 for length in self.lengths)

    @cached_property
    def drafting(self) -> int:
        """How many rows have drafts."""
        return sum(count > 0 for count in self.drafted)

    @cached_property
    def ends(self) -> list[int]:
        """Where the tokens of each row end."""
        return list(accumulate(self.lengths))

    @cached_property
    def drafts(self) -> Pieces:
        """The rows with drafts, token after token."""
        rows = slice(self.decode, self.decode + self.drafting)
        chunks = cut(self.lengths[rows], self.device, 1)
        slots = torch.tensor(self.slot_numbers[rows], device=self.device)[chunks.order]
        return Pieces(slice(self.decode, self.ends[rows.stop - 1]), slots, chunks)

    @cached_property
    def pieces(self) -> list[Pieces]:
        pieces, begin = [], self.decode + self.drafting
        while begin < len(self.lengths):
            end, padded = begin + 1, _padded(self.lengths[begin])
            while end < len(self.lengths) and (padded := padded + _padded(self.lengths[end])) <= TOGETHER:
                end += 1
            chunks = cut(self.lengths[begin:end], self.device, 1 if self.by_token else CHUNK)
            pieces.append(
                Pieces(
                    slice(self.ends[begin] - self.lengths[begin], self.ends[end - 1]),
                    torch.tensor(self.slot_numbers[begin:end], device=self.device)[chunks.order],
                    chunks,
                )
            )
            begin = end
        return pieces

    @cached_property
    def slots(self) -> slice | Tensor:
        """Of all rows; a slice (which reads and writes in place) if they follow each other."""
        return _index(self.slot_numbers, self.device)

    @cached_property
    def decode_slots(self) -> slice | Tensor:
        return _index(self.slot_numbers[: self.decode], self.device)

    @cached_property
    def first(self) -> Tensor | None:
        """The first token of every row; None if all rows have one token."""
        if self.decode == len(self.lengths):
            return None
        return torch.tensor([0, *self.ends[:-1]], device=self.device)

    @cached_property
    def last(self) -> Tensor | None:
        """The last token of every row; None if all rows have one token."""
        return None if self.decode == len(self.lengths) else torch.tensor(self.ends, device=self.device) - 1

    @cached_property
    def kept(self) -> Tensor | None:
        """The last token of every row that moves its state on; None if all rows have one token."""
        if self.last is None or not self.drafting:
            return self.last
        return self.last - torch.tensor(self.drafted, device=self.device)


def _padded(length: int) -> int:
    return -(-length // CHUNK) * CHUNK


def _index(slots: Sequence[int], device: torch.device | str) -> slice | Tensor:
    if all(slot == slots[0] + i for i, slot in enumerate(slots)):
        return slice(slots[0], slots[0] + len(slots)) if slots else slice(0, 0)
    return torch.tensor(slots, device=device)


def as_stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers of a state as states of that dtype hold them.

    What fp16 cannot hold becomes the largest number that it can: an infinity would turn the state, and all
    that follows, into NaN for good.
    """
    if dtype != torch.float16:
        return x.to(dtype)
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest).to(dtype)


def token_shift(x: Tensor, shift: Tensor, rows: PackedRows) -> Tensor:
    """The step from each token's x `[T, C]` back to the token before it in its row.

    `shift` `[slots, C]` holds the token before the first of a row, and is moved on to the last.
    """
    if rows.first is None or rows.kept is None:
        delta = shift[rows.slots] - x
        shift[rows.slots] = as_stored(x, shift.dtype)
        return delta
    before = torch.empty_like(x)
    before[1:] = x[:-1]
    before[rows.first] = shift[rows.slots]
    shift[rows.slots] = as_stored(x[rows.kept], shift.dtype)
    if rows.drafting:
        rows.moves.append(partial(move_shift, x, shift))
    return before.sub_(x)


def move_shift(x: Tensor, shift: Tensor, accepted: AcceptedTokens) -> None:
    """Move `shift` `[slots, C]` on to the last accepted ones of the tokens x `[T, C]`."""
    shift[accepted.slots] = as_stored(x[accepted.ends - 1], shift.dtype)


def mix(x: Tensor, delta: Tensor, amounts: Tensor) -> Tensor:
    """`x + delta * amount` for every row of amounts `[n, 1, C]`: `[n, T, C]`."""
    return torch.addcmul(x, delta, amounts)


def log_decay(w: Tensor) -> Tensor:
    """`log w = -exp(-1/2) sigmoid(w)`, in fp32."""
    return w.float().sigmoid_().mul_(LOG_DECAY_SCALE)


def removal_key(k: Tensor, k_k: Tensor) -> Tensor:
    """`k * k_k` `[T, C]`, of unit length in every head: `[T, H, 64]`."""
    return normalize((k * k_k).view(len(k), -1, HEAD_SIZE), dim=-1, eps=1e-12)


def readout(y: Tensor, r: Tensor, k: Tensor, v: Tensor, r_k: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """What the time mix reads out: `[T, C]`.

    It is the group norm of y `[T, H, 64]` by head, and the current token's own value times `sum(r k r_k)`.
    """
    tokens, heads, _ = y.shape
    normed = group_norm(y.reshape(tokens, -1).to(v.dtype), heads, weight, bias, GROUP_NORM_EPS)
    own = (r * k * r_k).view(tokens, heads, HEAD_SIZE).sum(-1, keepdim=True)
    return torch.addcmul(normed.view(tokens, heads, HEAD_SIZE), own, v.view(tokens, heads, HEAD_SIZE)).view(
        tokens, -1
    )


def wkv(inputs: Sequence[Tensor], states: Tensor, rows: PackedRows) -> Tensor:
    """The recurrence over all rows: returns y `[T, H, 64]`, fp32.

    Inputs are r, the log of the decay, k, v, kk and a, all `[T, H, 64]`; states `[slots, H, value, key]` are
    updated in place.
    """
    return run_recurrence(inputs, states, rows, wkv_step, wkv_prefill)


def run_recurrence(
    inputs: Sequence[Tensor],
    states: Tensor,
    rows: PackedRows,
    step: Callable[..., tuple[Tensor, Tensor]],
    prefill: Callable[..., tuple[Tensor, Tensor]],
) -> Tensor:
    """A recurrence over all rows, as `wkv`: `step` for rows of one token, `prefill` for pieces of prompts."""
    inputs = [x.float() for x in inputs]
    parts = []
    if rows.decode:
        y, state = step(*(x[: rows.decode] for x in inputs), states[rows.decode_slots].float())
        states[rows.decode_slots] = as_stored(state, states.dtype)
        parts.append(y)
    if rows.drafting:
        parts.append(_run_drafts(inputs, states, rows, step))
    for piece in rows.pieces:
        own, before = [x[piece.tokens] for x in inputs], states[piece.slots].float()
        if piece.chunks.size == 1:
            y, state = _by_token(step, own, before, piece.chunks)
        else:
            y, state = prefill(own, before, piece.chunks)
        states[piece.slots] = as_stored(state, states.dtype)
        parts.append(y)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _run_drafts(
    inputs: Sequence[Tensor], states: Tensor, rows: PackedRows, step: Callable[..., tuple[Tensor, Tensor]]
) -> Tensor:
    """The rows with drafts: y `[T, H, 64]`. What is no draft moves their states on, and it is one token."""
    chunks, slots = rows.drafts.chunks, rows.drafts.slots
    ordered = [split(x[rows.drafts.tokens], chunks).squeeze(2) for x in inputs]
    first = chunks.counts[0]
    y, state = step(*(x[:first] for x in ordered), states[slots].float())
    states[slots] = stored = as_stored(state, states.dtype)
    parts, at = [y], first
    for count in chunks.counts[1:]:
        y, state = step(*(x[at : at + count] for x in ordered), stored[:count].float())
        stored = as_stored(state, states.dtype)  # rounded as it is where tokens come one by one
        parts.append(y)
        at += count
    rows.moves.append(partial(_move_states, inputs, states, step))
    return torch.cat(parts)[chunks.places]


def _move_states(
    inputs: Sequence[Tensor],
    states: Tensor,
    step: Callable[..., tuple[Tensor, Tensor]],
    accepted: AcceptedTokens,
) -> None:
    """Move states on by accepted tokens, of which `inputs` `[T, H, 64]` are the inputs."""
    begins, ends, slots = accepted.begins, accepted.ends, accepted.slots
    while len(slots):
        _, state = step(*(x[begins] for x in inputs), states[slots].float())
        states[slots] = as_stored(state, states.dtype)
        begins = begins + 1
        more = begins < ends
        begins, ends, slots = begins[more], ends[more], slots[more]


def _by_token(
    step: Callable[..., tuple[Tensor, Tensor]], inputs: Sequence[Tensor], states: Tensor, chunks: Chunks
) -> tuple[Tensor, Tensor]:
    """What a `prefill` gives, by `step` for the first tokens of all pieces, then for the second ones, ...

    Inputs `[T, H, 64]`, states `[pieces, H, value, key]` in `chunks.order`; chunks of one token.
    """
    ordered = [split(x, chunks).squeeze(2) for x in inputs]  # [T, H, 64]
    states, parts, first = states.clone(), [], 0
    for count in chunks.counts:
        y, states[:count] = step(*(x[first : first + count] for x in ordered), states[:count])
        parts.append(y)
        first += count
    return torch.cat(parts)[chunks.places], states


def wkv_step(
    r: Tensor, w_log: Tensor, k: Tensor, v: Tensor, kk: Tensor, a: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of every row: returns y `[B, H, 64]` and the new state.

    Inputs `[B, H, 64]`, state `[B, H, value, key]`.

        S' = S diag(w) - (S kk) (kk a)^T + v k^T,   y = S' r

    The state is the bulk of the data, so it is passed over as seldom as torch allows. With P = S diag(w), S
    kk = P (kk / w), read together with P r; both rank-one terms are added as one product of rank two; and y =
    P r + v (k . r) - (S kk) (kk a . r).
    """
    batch, heads, _ = r.shape
    rows = batch * heads
    w = w_log.exp()
    decayed = (state * w.unsqueeze(-2)).view(rows, HEAD_SIZE, HEAD_SIZE)
    reading = torch.stack((kk / w, r), -2).view(rows, 2, HEAD_SIZE)
    removed, y = torch.bmm(reading, decayed.mT).unbind(1)  # [rows, value] each
    values = torch.stack((v.view(rows, HEAD_SIZE), removed), -1)  # [rows, value, 2]
    keys = torch.stack((k, (kk * a).neg_()), -2).view(rows, 2, HEAD_SIZE)  # [rows, 2, key]
    y = torch.baddbmm(y.unsqueeze(-1), values, torch.bmm(keys, r.view(rows, HEAD_SIZE, 1)))
    return y.view(batch, heads, HEAD_SIZE), decayed.baddbmm_(values, keys).view_as(state)
