"""The kernels for adapters of rows against torch in fp64."""

import numpy as np
import pytest
import torch
from cuda_gpu import DEVICE, needs_gpu, normal, off, poisoned

from rwkv_batch.model.cuda.steps.adapters import NONE, TILE_NUMBERS, fill_tiles, most_tiles
from rwkv_batch.ops import low_rank
from rwkv_batch.ops.cuda import abi
from rwkv_batch.ops.cuda.abi import ADAPTER_ADD, ADAPTER_ADD_FLOAT, ADAPTER_ADD_SQUARE

pytestmark = needs_gpu

MOST_RANK = 48
ROWS = [1, 3, 16, 37]


class Slots:
    """Random adapters of several matrices, each of its own rank, in a run of numbers for each slot."""

    def __init__(self, ranks, shapes):
        """ranks: by slot and matrix; 0: not changed. shapes: outputs and inputs of each matrix."""
        size = sum(MOST_RANK * sum(shape) for shape in shapes)
        self.weights = poisoned(len(ranks), size)
        self.table = torch.zeros(len(ranks), len(shapes), low_rank.ENTRY, dtype=torch.int32)
        self.pairs = {}
        for slot, of_slot in enumerate(ranks):
            place = 0
            for matrix, (rank, (outputs, inputs)) in enumerate(zip(of_slot, shapes, strict=True)):
                self.table[slot, matrix] = torch.tensor([rank, place // low_rank.ALIGNMENT])
                pair = normal(rank, inputs, std=inputs**-0.5), normal(outputs, rank)
                for part in pair:
                    self.weights[slot, place : place + part.numel()] = part.flatten()
                    place += part.numel()
                self.pairs[slot, matrix] = pair
        self.table = self.table.to(DEVICE)

    def launch(self, kernels, rows, xs, ys, output):
        """Both kernels, over `rows`: the slot of each."""
        count = most_tiles(len(self.weights), len(rows))
        tiles = np.zeros((count, TILE_NUMBERS), np.int32)
        fill_tiles(tiles, np.array(rows, np.int32))
        on_device = torch.from_numpy(tiles).to(DEVICE)
        sums = poisoned(len(xs), abi.ADAPTER_SPLITS, count, abi.ADAPTER_TILE, MOST_RANK, dtype=torch.float32)
        inputs = abi.AdapterInput(
            weights=self.weights.data_ptr(),
            slot_stride=self.weights.stride(0),
            tiles=on_device.data_ptr(),
            entry_stride=self.table.shape[1],
            most_rank=MOST_RANK,
        )
        for i, (x, y) in enumerate(zip(xs, ys, strict=True)):
            inputs.part[i] = abi.AdapterPart(
                x=x.data_ptr(),
                y=y.data_ptr(),
                sums=sums[i].data_ptr(),
                entry=self.table[0, i].data_ptr(),
                n=y.shape[-1],
                k=x.shape[-1],
            )
        kernels.adapter_shrink(inputs, len(xs), count)
        kernels.adapter_expand(inputs, len(xs), count, output)
        if DEVICE == "cuda":
            torch.cuda.synchronize()

    def expected(self, rows, xs, ys, output):
        found = []
        for matrix, (x, y) in enumerate(zip(xs, ys, strict=True)):
            want = y.double()
            for row, slot in enumerate(rows):
                if slot != NONE:
                    inner, outer = self.pairs[slot, matrix]
                    want[row] += (x[row].double() @ inner.double().T) @ outer.double().T
            found.append(want.relu().square() if output == ADAPTER_ADD_SQUARE else want)
        return found


def test_constants_are_those_of_what_lies_in_a_slot():
    ours = low_rank.RANK_MULTIPLE, low_rank.MOST_RANK, low_rank.ALIGNMENT
    assert ours == (abi.ADAPTER_RANK, abi.ADAPTER_MOST_RANK, abi.ADAPTER_ALIGNMENT)


@pytest.mark.parametrize("output", [ADAPTER_ADD, ADAPTER_ADD_SQUARE, ADAPTER_ADD_FLOAT])
@pytest.mark.parametrize("count", ROWS)
@pytest.mark.parametrize(("n", "k"), [(64, 64), (256, 1024), (328, 768), (64, 20480)])
def test_rows_with_different_adapters(kernels, output, count, n, k):
    slots = Slots([[16], [48], [0], [32]], [(n, k)])
    rows = [(row * 7) % 5 - 1 for row in range(count)]
    x = [normal(count, k)]
    y = [normal(count, n).float() if output == ADAPTER_ADD_FLOAT else normal(count, n)]
    want = slots.expected(rows, x, y, output)
    slots.launch(kernels, rows, x, y, output)
    assert off(y[0], want[0]) < 1e-3


def test_three_matrices_in_a_launch(kernels):
    slots = Slots([[16, 0, 48], [32, 16, 16]], [(192, 128)] * 3)
    rows = [0, 1, NONE, 1] * 9
    xs, ys = [normal(36, 128) for _ in range(3)], [normal(36, 192) for _ in range(3)]
    want = slots.expected(rows, xs, ys, ADAPTER_ADD)
    slots.launch(kernels, rows, xs, ys, ADAPTER_ADD)
    assert all(off(y, expected) < 1e-3 for y, expected in zip(ys, want, strict=True))


def test_a_row_comes_out_the_same_beside_any_others(kernels):
    slots = Slots([[16], [32]], [(128, 256)])
    x, y = normal(40, 256), normal(40, 128)
    alone, beside = y[5:6].clone(), y.clone()
    slots.launch(kernels, [1], [x[5:6].clone()], [alone], ADAPTER_ADD)
    slots.launch(kernels, [row % 2 for row in range(40)], [x], [beside], ADAPTER_ADD)
    assert torch.equal(beside[5:6], alone)


def test_rows_without_an_adapter_stay_as_they_are(kernels):
    slots = Slots([[16]], [(128, 64)])
    y = normal(20, 128)
    before = y.clone()
    slots.launch(kernels, [NONE] * 20, [poisoned(20, 64)], [y], ADAPTER_ADD)
    assert torch.equal(y, before)


def test_sums_that_fp16_cannot_hold_stay_finite(kernels):
    slots = Slots([[16]], [(64, 64)])
    inner, outer = slots.pairs[0, 0]
    slots.weights[0, : inner.numel()] = 1000.0
    slots.weights[0, inner.numel() :][: outer.numel()] = 0.01
    y = normal(1, 64)
    slots.launch(kernels, [0], [torch.full((1, 64), 60000.0, device=DEVICE).half()], [y], ADAPTER_ADD)
    assert y.isfinite().all() and (y > 10000).all()


@pytest.mark.parametrize("slots", [1, 8])
def test_every_row_is_in_one_tile(slots):
    draw = np.random.default_rng(0)
    for count in (1, 5, 16, 17, 100, 1000):
        rows = draw.integers(-1, slots, count).astype(np.int32)
        tiles = np.zeros((most_tiles(slots, count), TILE_NUMBERS), np.int32)
        fill_tiles(tiles, rows)
        found = [(row, slot) for slot, *members in tiles.tolist() for row in members if row != NONE]
        assert sorted(found) == list(enumerate(rows.tolist()))
        used = (tiles[:, 1] != NONE).tolist()
        assert used == sorted(used, reverse=True)
