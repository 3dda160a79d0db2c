#!/usr/bin/env python3
"""Every shape of tiles for the large GEMMs of a layer in fp16, each timed alone on a Hopper GPU.

Some layers' weights take turns, so that none comes from the cache. A launch begins beside the end of the one
before, as in a step; what lies between two GEMMs there is missing, and the norm that adds up sums over parts
of K. The inner low-rank sides are timed in the launch of r, k and v too, and in one of their own.

    python bench/gemm_shapes.py --width 1024 --rows 320 --ranks 64,64,128,32
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.gpu import need_gpu
from rwkv_batch.model.cuda.steps.capture import capture, gpu_seconds
from rwkv_batch.ops.cuda import gemms, tile
from rwkv_batch.ops.cuda.abi import IDENTITY, RELU_SQUARE, SIGMOID, TANH, TileShape
from rwkv_batch.ops.cuda.binding import Kernels
from rwkv_batch.ops.cuda.buffers import MAX_SPLITS
from rwkv_batch.ops.cuda.gemms import AUTO, Part

LAYERS, RUNS, SHOWN = 24, 15, 8
DEVICE = torch.device("cuda")
ROOMS = (tile.SHARED, tile.SHARED_OF_TWO, tile.SHARED_OF_THREE)
ACTIVATIONS = (TANH, IDENTITY, SIGMOID, IDENTITY)  # of w, a, g and v


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=torch.float16) * 0.05


def microseconds(run: Callable[[int], object]) -> float | None:
    """Of one launch, each for another layer; None of a shape that there is not."""
    try:
        graph = capture(lambda: [run(layer) for layer in range(LAYERS)])
    except RuntimeError:
        return None
    graph.replay()
    return statistics.median(gpu_seconds(graph.replay) for _ in range(RUNS)) * 1e6 / LAYERS


def tile_shapes() -> Iterator[TileShape]:
    for rows in tile.X_ROWS[1:]:
        for groups in (1, 2):
            for split_k in (1, 2, 4, 8):
                for room in ROOMS:
                    for x_stages in (3, 4, 5):
                        shape = TileShape(rows, groups, split_k, 0, x_stages)
                        yield tile._with_stages(shape, 16, 2 if rows <= 32 else 1, room)


def many_shapes() -> Iterator[TileShape]:
    for groups, sizes in tile.MANY_ROWS.items():
        for rows in sizes:
            yield TileShape(rows, groups, 1)


def split_shapes() -> Iterator[TileShape]:
    for split_k in (2, MAX_SPLITS):
        for groups, sizes in tile.SPLIT_ROWS.items():
            for rows in sizes:
                yield TileShape(rows, groups, split_k, partial_sums=1)


def described(shape: TileShape) -> str:
    names = ("x_rows", "groups", "split_k", "w_stages", "x_stages")
    return " ".join(f"{name} {getattr(shape, name)}" for name in names if getattr(shape, name))


def report(kernels: Kernels, kind: str, parts: int, n: int, k: int, rows: int, ranks: list[int]) -> None:
    """Print what the shapes take for `parts` GEMMs of n outputs and k inputs, the fastest first."""
    transposed, activation = kind == "value", RELU_SQUARE if kind == "key" else IDENTITY
    ws = [[numbers(*((k, n) if transposed else (n, k))) for _ in range(parts)] for _ in range(LAYERS)]
    xs, ys = [numbers(rows, k) for _ in range(parts)], [numbers(rows, n) for _ in range(parts)]

    def run(layer: int, many: bool, beside: Sequence[Part] = ()) -> None:
        kernels.gemm_tile(ws[layer], xs, ys, activation, transposed, many, beside)

    found = []
    for many, shapes in ((False, tile_shapes()), (True, many_shapes())):
        name = "many" if many else "tile"
        for shape in shapes:
            with patch.object(gemms, f"{name}_shape", return_value=shape):
                taken = microseconds(partial(run, many=many))
            if taken is not None:
                found.append((taken, f"gemm_{name}, {described(shape)}"))
        found.append((microseconds(partial(run, many=many)) or 0.0, f"gemm_{name} as it is launched"))
    if kind in ("output", "value"):
        sums = torch.empty(MAX_SPLITS, rows, n, device=DEVICE)
        for shape in split_shapes():
            with patch.object(gemms, "many_shape_split", return_value=shape):
                taken = microseconds(
                    lambda layer, to=sums[: shape.split_k]: kernels.gemm_many_split(
                        ws[layer][0], xs[0], to, transposed
                    )
                )
            if taken is not None:
                found.append((taken, f"gemm_many, sums of parts, {described(shape)}"))
    print(f"{kind}, {rows} rows")
    for place, (taken, name) in enumerate(sorted(found)):
        if place < SHOWN or name.endswith("launched"):
            print(f"  {taken:7.2f} us  {name}")
    if parts == 3:
        inner = [[numbers(rank, k) for rank in ranks] for _ in range(LAYERS)]
        low_xs, low = [numbers(rows, k) for _ in ranks], [numbers(rows, rank) for rank in ranks]
        small = [list(zip(of_layer, low_xs, low, ACTIVATIONS, strict=True)) for of_layer in inner]
        both = microseconds(lambda layer: run(layer, True, small[layer]))
        alone = microseconds(lambda layer: kernels.gemm_lowrank(small[layer], AUTO))
        print(f"  {both:7.2f} us  gemm_many with the low-rank sides, which take {alone:.2f} us alone")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=320)
    parser.add_argument("--ranks", default="64,64,128,32", help="of the low-rank functions w, a, g and v")
    args = parser.parse_args()
    need_gpu()
    width, kernels = args.width, Kernels(DEVICE)
    sizes = {
        "r, k, v": (3, width, width),
        "output": (1, width, width),
        "key": (1, 4 * width, width),
        "value": (1, width, 4 * width),
    }
    for kind, shape in sizes.items():
        report(kernels, kind, *shape, args.rows, [int(rank) for rank in args.ranks.split(",")])


if __name__ == "__main__":
    main()
