"""How the tiled GEMMs for Hopper divide their work: `cuda/gemm_tile.cu` and `gemm_tile8.cu`."""

from torch import Tensor

from rwkv_batch.ops.cuda.abi import TILE_BARRIER_BYTES, TILE_K, TILE_MAX_STAGES, TILE_W_ROWS, TileShape

X_ROWS = (16, 32, 48, 64, 96, 128, 160, 192, 256)  # rows of x that a tile may have
MULTIPROCESSORS = 132
SHARED = 232_448  # bytes of shared memory of a block
# Of each of two blocks on a multiprocessor: the next launch begins beside this one. Of three and four.
SHARED_OF_TWO, SHARED_OF_THREE, SHARED_OF_FOUR = 115_712, 76_000, 57_000


def fits(n: int, k: int) -> bool:
    """Whether the kernel takes weights of n rows and k columns."""
    return n % TILE_W_ROWS == 0 and k % TILE_K == 0


def tiles_of_codes(codes: Tensor) -> Tensor:
    """Codes `[N, K]` uint8 as gemm_tile8 reads them: `[N/64, K/64, 64, 64]`."""
    n, k = codes.shape
    tiles = codes.view(n // TILE_W_ROWS, TILE_W_ROWS, k // TILE_K, TILE_K).transpose(1, 2)
    # Of a row's 64: [16 numbers, halves of these, lanes, pairs] to [lanes, 16 numbers, halves, pairs].
    ordered: Tensor = tiles.unflatten(-1, (4, 2, 4, 2)).permute(0, 1, 2, 5, 3, 4, 6)
    return ordered.flatten(3).contiguous()


def tile_shape(parts: int, n: int, k: int, m: int, transposed: bool) -> TileShape:
    """The shape for `parts` GEMMs of m rows of x with n rows of w; split-K follows from the weights alone.

    Measured on an H200 (driver 580.159.04, 2026-11-20): one warpgroup a block while weights are what takes
    time, as more blocks ask memory for more; two where x is loaded so often that it takes longer, and there
    are blocks enough.
    """
    x_tiles = -(-m // X_ROWS[-1])
    rows = next(size for size in X_ROWS if size * x_tiles >= m)
    split_k = _split_k(parts, n, k, MULTIPROCESSORS)
    pairs = parts * n // (2 * TILE_W_ROWS)
    wide = n >= 65536 if rows <= 128 else pairs * x_tiles * split_k >= MULTIPROCESSORS * 2 // 3
    groups = 2 if wide and rows > 32 and not transposed and (split_k == 1 or rows <= 160) else 1
    # Up to 128 rows two blocks share a multiprocessor: weights of the next launch arrive while this one ends.
    room = SHARED_OF_TWO if rows <= 128 else SHARED
    x_stages = 5 if 32 < rows <= 64 else 4 if split_k == 1 or rows <= 64 else 3
    return _with_stages(TileShape(rows, groups, split_k, 0, x_stages), 2, room)


def tile_shape8(parts: int, n: int, k: int, m: int) -> TileShape:
    """The same for weights of 8 bits.

    Measured on an H200 (driver 580.159.04, 2026-11-23): a block does nothing else while its weights go
    through registers, so several share a multiprocessor: three, if then all run at once, otherwise four.
    """
    sizes = X_ROWS[:-1]  # more do not fit into the registers
    x_tiles = -(-m // sizes[-1])
    rows = next(size for size in sizes if size * x_tiles >= m)
    split_k = _split_k(parts, n, k, 3 * MULTIPROCESSORS)
    three = parts * n // TILE_W_ROWS * split_k <= 3 * MULTIPROCESSORS
    room = SHARED_OF_TWO if rows > 96 else SHARED_OF_THREE if three else SHARED_OF_FOUR
    return _with_stages(TileShape(rows, 1, split_k, 0, 3), 1, room)


def _with_stages(shape: TileShape, w_bytes: int, room: int) -> TileShape:
    """With as many stages of w as so many bytes of shared memory hold, at least two."""
    rows, split_k, groups = shape.x_rows, shape.split_k, shape.groups
    strips = 2 if rows <= 32 else 1
    w_stage, x_stage = groups * TILE_W_ROWS * TILE_K * w_bytes * strips, rows * TILE_K * 2 * strips
    received = -(-rows // 8 // split_k) * split_k * groups * 128 * 16 if split_k > 1 else 0
    room -= TILE_BARRIER_BYTES + received
    if w_bytes == 1 and (room - shape.x_stages * x_stage) // w_stage < 2:
        shape.x_stages = 2
    shape.w_stages = max(2, min(TILE_MAX_STAGES, (room - shape.x_stages * x_stage) // w_stage))
    return shape


def _split_k(parts: int, n: int, k: int, blocks: int) -> int:
    """Parts of K, a power of two: as many as still are at most so many blocks, for one tile of x."""
    tiles, split_k = parts * n // TILE_W_ROWS, 1
    while split_k < 8 and 2 * split_k * tiles <= blocks and k // (2 * split_k) >= 4 * TILE_K:
        split_k *= 2
    return split_k
