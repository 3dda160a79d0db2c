"""How the tiled product for Hopper (`cuda/product_tile.cu`) cuts a product into blocks."""

from ctypes import Structure, c_int

ROWS_OF_X = (16, 32, 48, 64, 96, 128, 160, 192, 256)  # of a tile
ROWS_OF_W = 64  # for each warpgroup of a block
STRIP = 64  # numbers of k: what a tile's widths are multiples of
MOST_STAGES = 16
MULTIPROCESSORS = 132
SHARED = 232_448  # bytes of shared memory of a block
SHARED_OF_TWO = 115_712  # of each of two blocks on a multiprocessor: the next launch begins beside this one
BARRIERS = 528  # bytes


class TileShape(Structure):
    """rows: of x in a tile; groups: 64 rows of w each; splits: shares of K; stages of the rings
    of w and x.
    """

    _fields_ = (
        ("rows", c_int),
        ("groups", c_int),
        ("splits", c_int),
        ("w_stages", c_int),
        ("x_stages", c_int),
    )


def fits(n: int, k: int) -> bool:
    """Whether the kernel takes weights of n rows and k columns."""
    return n % ROWS_OF_W == 0 and k % STRIP == 0


def tile_shape(parts: int, n: int, k: int, m: int, across: bool) -> TileShape:
    """For `parts` products of m rows of x with n rows of w each. The shares of K follow from the weights
    alone, never from m.

    Measured on an H200 (driver 580.159.04, 2026-11-20): one warpgroup a block while weights are what takes
    time, as more blocks ask memory for more; two where x is brought so often that it takes longer, and there
    are blocks enough.
    """
    x_tiles = -(-m // ROWS_OF_X[-1])
    rows = next(size for size in ROWS_OF_X if size * x_tiles >= m)
    splits = splits_of(parts, n, k)
    pairs = parts * n // (2 * ROWS_OF_W)
    wide = n >= 65536 if rows <= 128 else pairs * x_tiles * splits >= MULTIPROCESSORS * 2 // 3
    groups = 2 if wide and rows > 32 and not across and (splits == 1 or rows <= 160) else 1
    strips = 2 if rows <= 32 else 1
    w_stage, x_stage = (matrix_rows * STRIP * 2 * strips for matrix_rows in (groups * ROWS_OF_W, rows))
    received = -(-rows // 8 // splits) * splits * groups * 128 * 16 if splits > 1 else 0
    # Up to 128 rows two blocks share a multiprocessor, so that the weights of the next launch come while this
    # one ends.
    room = (SHARED_OF_TWO if rows <= 128 else SHARED) - BARRIERS - received
    x_stages = 5 if 32 < rows <= 64 else 4 if splits == 1 or rows <= 64 else 3
    return TileShape(
        rows, groups, splits, max(2, min(MOST_STAGES, (room - x_stages * x_stage) // w_stage)), x_stages
    )


def splits_of(parts: int, n: int, k: int) -> int:
    """A power of two."""
    tiles, splits = parts * n // ROWS_OF_W, 1
    while splits < 8 and 2 * splits * tiles <= MULTIPROCESSORS and k // (2 * splits) >= 4 * STRIP:
        splits *= 2
    return splits
