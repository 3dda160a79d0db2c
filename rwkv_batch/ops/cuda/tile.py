"""How the tiled GEMM for Hopper (`cuda/gemm_tile.cu`) divides its work among blocks."""

from rwkv_batch.ops.cuda.abi import TILE_BARRIER_BYTES, TILE_K, TILE_MAX_STAGES, TILE_W_ROWS, TileShape

X_ROWS = (16, 32, 48, 64, 96, 128, 160, 192, 256)  # rows of x that a tile may have
MULTIPROCESSORS = 132
SHARED = 232_448  # bytes of shared memory of a block
SHARED_OF_TWO = 115_712  # of each of two blocks on a multiprocessor: the next launch begins beside this one


def fits(n: int, k: int) -> bool:
    """Whether the kernel takes weights of n rows and k columns."""
    return n % TILE_W_ROWS == 0 and k % TILE_K == 0


def tile_shape(parts: int, n: int, k: int, m: int, transposed: bool) -> TileShape:
    """The shape for `parts` GEMMs of m rows of x with n rows of w; split-K follows from the weights alone.

    Measured on an H200 (driver 580.159.04, 2026-11-20): one warpgroup a block while weights are what takes
    time, as more blocks ask memory for more; two where x is loaded so often that it takes longer, and there
    are blocks enough.
    """
    x_tiles = -(-m // X_ROWS[-1])
    rows = next(size for size in X_ROWS if size * x_tiles >= m)
    split_k = _split_k(parts, n, k)
    pairs = parts * n // (2 * TILE_W_ROWS)
    wide = n >= 65536 if rows <= 128 else pairs * x_tiles * split_k >= MULTIPROCESSORS * 2 // 3
    groups = 2 if wide and rows > 32 and not transposed and (split_k == 1 or rows <= 160) else 1
    strips = 2 if rows <= 32 else 1
    w_stage, x_stage = (matrix_rows * TILE_K * 2 * strips for matrix_rows in (groups * TILE_W_ROWS, rows))
    received = -(-rows // 8 // split_k) * split_k * groups * 128 * 16 if split_k > 1 else 0
    # Up to 128 rows two blocks share a multiprocessor: weights of the next launch arrive while this one ends.
    room = (SHARED_OF_TWO if rows <= 128 else SHARED) - TILE_BARRIER_BYTES - received
    x_stages = 5 if 32 < rows <= 64 else 4 if split_k == 1 or rows <= 64 else 3
    w_stages = max(2, min(TILE_MAX_STAGES, (room - x_stages * x_stage) // w_stage))
    return TileShape(rows, groups, split_k, w_stages, x_stages)


def _split_k(parts: int, n: int, k: int) -> int:
    """Parts of K, a power of two: as many as give every multiprocessor a tile."""
    tiles, split_k = parts * n // TILE_W_ROWS, 1
    while split_k < 8 and 2 * split_k * tiles <= MULTIPROCESSORS and k // (2 * split_k) >= 4 * TILE_K:
        split_k *= 2
    return split_k
