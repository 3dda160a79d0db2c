"""The sampler on a GPU: the same ids as `sampler.Sampler` from the same seeds, without the logits leaving it.

Weights are computed in fp32 here and partly in fp64 there, so a random number within about 1e-6 of the border
between two tokens may fall on the other side; nothing else differs. Rows that FlashInfer draws have random
numbers of their own.
"""

import math
from collections.abc import Sequence
from ctypes import POINTER, byref, c_int, c_void_p
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from rwkv_batch.ops.cuda import build
from rwkv_batch.ops.cuda.gemms import launch, pointer
from rwkv_batch.ops.cuda.inputs.feed import Feed
from rwkv_batch.ops.cuda.inputs.staging import Records, upload
from rwkv_batch.ops.host_memory import pinned, pins
from rwkv_batch.ops.random import random_key
from rwkv_batch.sampling import flashinfer
from rwkv_batch.sampling.masks import WORD, RowMasks, mask_words
from rwkv_batch.sampling.params import RowSampling, drawable
from rwkv_batch.sampling.penalties import PenaltyRule
from rwkv_batch.sampling.slots_cuda import FIRST_CAPACITY, NO_FILTER, PenaltyLists, SlotWays, as_bytes
from rwkv_batch.sampling.structs_cuda import (
    BIAS_ENTRY,
    GREEDY,
    METHODS,
    NUCLEUS,
    PENALTY_ENTRY,
    RAPID,
    ROW_FILTER,
    SAMPLE_RECORD,
    AdjustInput,
    FilterInput,
    SampleInput,
)
from rwkv_batch.wire.protocol import Sampling

FILTER_WORDS = ROW_FILTER.itemsize // 4
Way = Literal["plain", "any"]  # of drawing: for rows without limits, bias, penalties and noise; for all


def bytes_per_slot(vocab: int) -> int:
    """The most that a slot takes: a row with a bias for every token, which has drawn all, with penalties."""
    grown = 1 << (vocab - 1).bit_length()
    records = 2 * SAMPLE_RECORD.itemsize + 8  # in the table, and staged with the slot's number
    lists = (FIRST_CAPACITY + grown) * PENALTY_ENTRY.itemsize + vocab * BIAS_ENTRY.itemsize
    masks = 2 * 4 * mask_words(vocab) + ROW_FILTER.itemsize  # the tokens seen, and what a step uploads
    return records + lists + masks


@dataclass(frozen=True)
class _SamplingRecord:
    """What the records of a request's rows have in common.

    A record is `head`, then the row's own key, position, list of penalties, its capacity and how much of it
    is used, then `tail`.
    """

    head: tuple[float, ...]
    tail: tuple[float, ...]
    rule: PenaltyRule | None
    bias: Tensor | None  # which `tail` points to
    flashinfer: bool  # whether FlashInfer may draw
    plain: bool  # whether rwkv_sample_plain draws such rows: no limits, bias, penalties or noise
    filter: tuple[float, float, float]  # min_p, top_a and repetition of a RowFilter


class CudaSampler:
    """`sampler.Sampler` on the device. Not thread-safe; all calls belong on one stream.

    A slot takes 264 bytes, 4 KiB for penalties and 8 KiB for the tokens that it has seen. The list of a row
    with penalties grows to 16 to 32 bytes for each token drawn, at most 1 MiB.
    """

    def __init__(
        self,
        slots: int,
        vocab: int,
        device: torch.device | str,
        sampler: Literal["own", "flashinfer"] = "own",
        architecture: str | None = None,
    ) -> None:
        """`vocab` is the width of the logits; `sampler` draws the rows of "nucleus" that have no seed.

        `architecture`: of the kernels, as in build.build; None: that of the GPU.

        Raises build.BuildError when the kernels cannot be had, flashinfer.SamplerError when FlashInfer can't.
        """
        self.width = vocab
        self.vocab = drawable(vocab)
        self._library = build.load(architecture or build.architecture(torch.device(device)))
        self._library.rwkv_sample.argtypes = (POINTER(SampleInput), c_int, c_int, c_int, c_void_p)
        self._library.rwkv_sample_plain.argtypes = (POINTER(SampleInput), c_void_p, c_int, c_void_p)
        self._library.rwkv_sample_filtered.argtypes = (POINTER(FilterInput), c_int, c_int, c_int, c_void_p)
        self._library.rwkv_sample_adjust.argtypes = (POINTER(AdjustInput), c_int, c_int, c_int, c_void_p)
        self._library.rwkv_sample_record.argtypes = (POINTER(AdjustInput), c_void_p, c_int, c_void_p)
        self.takes_plain = bool(self._library.rwkv_sample_plain_fits(self.vocab))
        self.blocks = 0  # that share a row; 0: as many as is best. The ids do not depend on it
        self._records = Records(slots, SAMPLE_RECORD, torch.device(device))
        self.device = self._records.table.device  # with its number
        self._chunk = self._library.rwkv_sample_chunk(self.vocab, 1)  # ids of a row in one block
        self._draw = flashinfer.load(self.device, self._chunk) if sampler == "flashinfer" else None
        self._rows: list[_SamplingRecord | None] = [None] * slots
        self._latest: tuple[Sampling, _SamplingRecord] | None = None
        self._penalties = PenaltyLists(slots, self.vocab, self._records.table)
        self._ways = SlotWays(slots)  # whose next step is the next `sample_async`
        self._words = mask_words(self.vocab)
        # A bit for each token of the prompt and the answer, of rows with a repetition penalty.
        self._seen = torch.zeros(slots, self._words, dtype=torch.int32, device=self.device)

    def begin(
        self,
        slot: int,
        sampling: Sampling,
        seed: int,
        stream: int,
        drawn: Sequence[int] = (),
        prompt: Sequence[int] = (),
    ) -> None:
        """Begin a row in a slot; the next `prepare` uploads its record. See Sampler.begin."""
        if self._latest is None or self._latest[0] is not sampling:
            self._latest = sampling, self._sampling_record(sampling)
        shared = self._rows[slot] = self._latest[1]
        self._ways.begin(slot, shared.plain, shared.flashinfer, shared.filter)
        if shared.filter[2] != 1:
            self._seen[slot].copy_(self._bits((*prompt, *drawn)), non_blocking=True)
        row = random_key(seed, stream), len(drawn), *self._penalties.begin(slot, shared.rule, drawn)
        self._records.put(slot, (*shared.head, *row, *shared.tail))

    def sample(self, logits: Tensor, slots: Sequence[int]) -> list[int]:
        """One token for each slot, from fp32 or fp16 logits, which stay as they are. See Sampler.sample."""
        for slot in slots:
            if self._rows[slot] is None:
                raise ValueError(f"No row has begun in slot {slot}; call begin first.")
        self.prepare(slots)
        index = upload(list(slots), self.device, torch.int32)
        return self.sample_async(logits, index).tolist()

    def prepare(self, slots: Sequence[int], steps: int = 1) -> None:
        """Upload the records of rows that have begun, and make room for the penalties of a token a step.

        Call it once before so many steps that draw for `slots`, in their order, also before one that replays
        a graph.
        """
        self._records.flush()  # before lists grow, which changes a part of a record
        index = np.asarray(slots, np.intp)
        self._penalties.make_room(index, steps)
        self._ways.choose(index)

    def sample_async(
        self,
        logits: Tensor,
        slots: Tensor,
        ids: Tensor | None = None,
        masks: RowMasks | None = None,
        feed: Feed | None = None,
    ) -> Tensor:
        """One token for each row of logits `[rows, vocab]`, fp32 or fp16: ids `[rows]` int32 on the device.

        reference.BROKEN for a row whose logits are not finite, for which nothing is recorded.
        Queued without a synchronisation; `prepare` comes first. slots `[rows]` int32 are on the device; a
        slot comes at most once, and a negative one is padding, whose id is 0. `ids`: where to write. `masks`:
        what rows may draw, by their places. `feed`: where it is recorded what was drawn. Where there is a
        `way`, and no masks, `draw` is all that it launches, and can be captured in a graph.
        """
        if (
            logits.dtype not in (torch.float32, torch.float16)
            or logits.shape != (len(slots), self.width)
            or logits.stride(1) != 1
        ):
            raise ValueError(
                f"Logits {list(logits.shape)} of {logits.dtype} cannot be sampled from; give fp32 or fp16 "
                f"logits [{len(slots)}, {self.width}] whose rows are contiguous."
            )
        if slots.dtype != torch.int32:
            raise ValueError(f"Slots of {slots.dtype} cannot be used; give int32.")
        with torch.cuda.device(self.device):
            if ids is None:
                ids = torch.empty(len(slots), dtype=torch.int32, device=self.device)
            masked, way = bool(masks and masks.places), self.way(logits)
            if way is not None and not masked:
                self.draw(way, logits, slots, ids, feed)
                return ids
            if masked or self._ways.filters is not None or self._draw is None:
                self._sample_filtered(logits, slots, ids, masks)
            else:
                self._sample_with_flashinfer(self._draw, logits, slots, ids)
            if feed is not None:
                feed.record_drawn(ids, slots)
        return ids

    def ways(self, logits: Tensor) -> tuple[Way, ...]:
        """Those that there are for such logits, for any rows."""
        return ("plain", "any") if self.takes_plain and _is_aligned(logits) else ("any",)

    def way(self, logits: Tensor) -> Way | None:
        """How `draw` draws for the slots of the last `prepare`; None: filters or FlashInfer are needed."""
        if self._ways.filters is not None or (self._draw is not None and len(self._ways.flashinfer)):
            return None
        return self.ways(logits)[0] if self._ways.all_plain else "any"

    def draw(self, way: Way, logits: Tensor, slots: Tensor, ids: Tensor, feed: Feed | None) -> None:
        """Queue a draw by one of the ways of `sample_async`."""
        if way == "plain":
            call = self._input(logits, slots, ids, None)
            sequences = None if feed is None else feed.records.data_ptr()
            launch(self._library, "rwkv_sample_plain", byref(call), sequences, len(slots))
            return
        self._sample(logits, slots, ids)
        if feed is not None:
            feed.record_drawn(ids, slots)

    def _sample(self, logits: Tensor, slots: Tensor, ids: Tensor) -> None:
        blocks, workspace = self._split(len(slots))
        call, half = self._input(logits, slots, ids, workspace), int(logits.dtype == torch.float16)
        launch(self._library, "rwkv_sample", byref(call), len(slots), half, blocks)

    def _sample_filtered(self, logits: Tensor, slots: Tensor, ids: Tensor, masks: RowMasks | None) -> None:
        """Draw with masks, or where rows have filters; also for rows that FlashInfer would draw."""
        rows, lines = len(slots), len(masks.places) if masks else 0
        size = rows * FILTER_WORDS + lines * self._words
        staged = pinned(torch.empty, size, dtype=torch.int32, wanted=pins(self.device))
        numbers = staged.numpy()
        filters = numbers[: rows * FILTER_WORDS].view(ROW_FILTER)
        filters[:] = (*NO_FILTER, -1) if self._ways.filters is None else self._ways.filters
        if masks:
            filters["mask"][masks.places] = range(lines)
            numbers[rows * FILTER_WORDS :].reshape(lines, -1)[:] = masks.bits[:, : self._words]
        uploaded = staged.to(self.device, non_blocking=True)
        blocks, workspace = self._split(rows)
        call = FilterInput(
            self._input(logits, slots, ids, workspace),
            uploaded.data_ptr(),
            uploaded[rows * FILTER_WORDS :].data_ptr(),
            self._seen.data_ptr(),
            self._words,
        )
        half = int(logits.dtype == torch.float16)
        launch(self._library, "rwkv_sample_filtered", byref(call), rows, half, blocks)

    def _split(self, rows: int) -> tuple[int, Tensor | None]:
        """How many blocks share a row, and a workspace if they need one."""
        blocks = self.blocks or self._library.rwkv_sample_blocks(rows)
        if blocks > 1:
            return blocks, None
        return blocks, torch.empty(rows, self._chunk, dtype=torch.float32, device=self.device)

    def _bits(self, tokens: Sequence[int]) -> Tensor:
        """`[words]` int32 in which the bits of these tokens are set."""
        present = np.zeros(self._words * WORD, np.uint8)
        present[[token for token in tokens if token < self.vocab]] = 1
        return torch.from_numpy(np.packbits(present, bitorder="little").view(np.int32))

    def _sample_with_flashinfer(
        self, draw: flashinfer.Draw, logits: Tensor, slots: Tensor, ids: Tensor
    ) -> None:
        """Draw all rows, those at `SlotWays.flashinfer` by `draw`."""
        rows, count = len(slots), len(self._ways.flashinfer)
        numbers = np.zeros(rows + count, np.int32)
        numbers[self._ways.flashinfer], numbers[rows:] = -1, self._ways.flashinfer
        uploaded = upload(numbers.tolist(), self.device, torch.int32)
        others, places = slots | uploaded[:rows], uploaded[rows:]  # slots, negative where `draw` draws
        if count < rows:
            self._sample(logits, others, ids)
        adjusted = torch.empty(count, self._chunk, dtype=torch.float32, device=self.device)
        top_k = torch.empty(count, dtype=torch.int32, device=self.device)
        top_p = torch.empty(count, dtype=torch.float32, device=self.device)
        blocks = self.blocks or self._library.rwkv_sample_blocks(count)
        call = AdjustInput(
            self._input(logits, slots, ids, adjusted if blocks == 1 else None),
            *(tensor.data_ptr() for tensor in (places, adjusted, top_k, top_p)),
            self._chunk,
        )
        half = int(logits.dtype == torch.float16)
        launch(self._library, "rwkv_sample_adjust", byref(call), count, half, blocks)
        drawn = draw(adjusted, top_k, top_p)
        launch(self._library, "rwkv_sample_record", byref(call), drawn.data_ptr(), count)

    def _input(self, logits: Tensor, slots: Tensor, ids: Tensor, workspace: Tensor | None) -> SampleInput:
        return SampleInput(
            logits.data_ptr(),
            logits.stride(0),
            self.width,
            self.vocab,
            slots.data_ptr(),
            self._records.table.data_ptr(),
            ids.data_ptr(),
            pointer(workspace),
            0,
        )

    def _sampling_record(self, sampling: Sampling) -> _SamplingRecord:
        """Raises ValueError as `params.check` does."""
        of_row = RowSampling.from_sampling(sampling, self.width)
        rule = of_row.penalties or PenaltyRule()
        bias, address, count = None, 0, 0
        if of_row.bias is not None:
            entries = np.zeros(len(of_row.bias[0]), BIAS_ENTRY)
            entries["id"], entries["amount"] = of_row.bias
            bias = as_bytes(entries).to(self.device, non_blocking=True)
            address, count = bias.data_ptr(), len(entries)
        method = GREEDY if of_row.greedy else METHODS[of_row.method]
        scale = math.log2(math.e) / of_row.temperature
        penalties = rule.first, rule.later, rule.decay, rule.flat, rule.per_count
        return _SamplingRecord(
            (of_row.temperature, of_row.noise, of_row.top_p, *penalties),
            (address, count, method, of_row.top_k, scale, bool(rule.uncounted), 0),
            of_row.penalties,
            bias,
            self._draw is not None and flashinfer.draws(of_row),
            _is_plain(of_row, self.vocab),
            (max(of_row.likelihood.min_p, 0.0), max(of_row.likelihood.top_a, 0.0), of_row.repetition),
        )


def _is_plain(sampling: RowSampling, vocab: int) -> bool:
    """Whether rwkv_sample_plain draws such rows."""
    whole = METHODS[sampling.method] in (RAPID, NUCLEUS) and sampling.top_k >= vocab and sampling.top_p >= 1
    return (sampling.greedy or whole) and sampling.bias is None and sampling.penalties is None


def _is_aligned(logits: Tensor) -> bool:
    """Whether rwkv_sample_plain can read them."""
    halves = logits.dtype == torch.float16 and logits.data_ptr() % 16 == 0
    return halves and logits.stride(0) % 8 == 0 and logits.shape[1] % 8 == 0
