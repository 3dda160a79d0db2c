"""How the tiled GEMMs for Hopper divide their work: `cuda/gemm_tile*.cu`."""

from collections.abc import Sequence

from rwkv_batch.ops.cuda.abi import (
    TILE_BARRIER_BYTES,
    TILE_FEW_ROWS,
    TILE_K,
    TILE_MAX_STAGES,
    TILE_W_ROWS,
    TileShape,
)

X_ROWS = (16, 32, 48, 64, 96, 128, 160, 192, 256)  # rows of x that a tile may have
# The same of gemm_many, by warpgroups that share them.
MANY_ROWS = {1: (160, 192, 256), 2: (128, 160, 192, 256), 3: (160, 192, 256), 4: (128, 160)}
BESIDE_ROWS = {1: MANY_ROWS[1], 2: (80, *MANY_ROWS[2])}  # where small GEMMs are in the same launch
SPLIT_ROWS = {1: (80, 160, 192, 256), 2: (80, 128, 160)}  # where the result is sums over parts of K
IN_TURN_ROWS = (128, 160)  # by two warpgroups, where parts of K are added up in their order
# Of those with codes: microseconds of a tile of int8 with K of 4096, among others on a whole H100.
MANY_CODES = {
    1: {160: 22.5, 192: 25.5, 256: 29.3},
    2: {128: 25.4, 160: 30.0, 192: 34.3, 256: 44.6},
    3: {160: 42.2, 192: 50.0, 256: 67.5},
    4: {128: 50.0, 160: 59.0},
}
MULTIPROCESSORS = 132
TILE_BYTES_OF_4_BITS = TILE_W_ROWS * (TILE_K // 2 + 4)
TILE_ALIGNMENT = 1024  # of a ring of x
SHARED = 232_448  # bytes of shared memory of a block
# Of each of two blocks on a multiprocessor: the next launch begins beside this one. Of three and four.
SHARED_OF_TWO, SHARED_OF_THREE, SHARED_OF_FOUR = 115_712, 76_000, 57_000
# Of codes that go through registers: rows of x up to which a warpgroup has a block to itself, and how many
# blocks of two there must be, unless w has as many rows and columns as 7.2B's.
MOST_OF_ONE_GROUP, LEAST_BLOCKS_OF_TWO_GROUPS, LARGE = 96, 96, 4096
MOST_PARTIAL_SUMS = 4  # which a norm adds up
SHARED_BESIDE_ONE = 124_000  # of a block beside which one of a launch with three still fits


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
    split_k = _split_k(parts, n, k, MULTIPROCESSORS)
    pairs = parts * n // (2 * TILE_W_ROWS)
    wide = n >= 65536 if rows <= 128 else pairs * x_tiles * split_k >= MULTIPROCESSORS * 2 // 3
    groups = 2 if wide and rows > 32 and not transposed and (split_k == 1 or rows <= 160) else 1
    # Up to 128 rows two blocks share a multiprocessor: weights of the next launch arrive while this one ends.
    room = SHARED_OF_TWO if rows <= 128 else SHARED
    x_stages = 5 if 32 < rows <= 64 else 4 if split_k == 1 or rows <= 64 else 3
    return _with_stages(TileShape(rows, groups, split_k, 0, x_stages), 16, 2 if rows <= 32 else 1, room)


def adds_in_order(parts: int, n: int, k: int) -> bool:
    """Whether the sums of `tile_shape` go over all of K in order, as those of `many_shape` do."""
    return _split_k(parts, n, k, MULTIPROCESSORS) == 1


def sums_as_many(parts: int, n: int, k: int, m: int) -> bool:
    """Whether gemm_many may take the place of gemm_tile with the same sums, to the bit.

    With K in parts it has no tiles that suit few rows of w and of x.
    """
    tiles = -(-m // IN_TURN_ROWS[-1]) * parts * n // (2 * TILE_W_ROWS)
    return adds_in_order(parts, n, k) or tiles >= MULTIPROCESSORS


def tile_shape_coded(
    parts: int, n: int, k: int, m: int, bits: int, same: bool, partial: bool = False
) -> TileShape:
    """The shape for weights of 8 or 4 bits that become fp16 in registers.

    same: the sums of a row must not depend on m. partial: nothing adds up sums over parts of K. Measured on
    an H200 (driver 580.159.04, 2026-11-24): while weights go through registers warps wait, so a
    multiprocessor needs 8 to 24 of them: three blocks, or two if there are no more. Clusters find no room
    where only two fit.
    """
    sizes = X_ROWS[1:-1] if same else (8, *X_ROWS[:-1])  # more do not fit into the registers
    x_tiles = -(-m // sizes[-1])
    rows = next(size for size in sizes if size * x_tiles >= m)
    if partial:
        return _shape_of_partial_sums(n, k, rows, bits)
    if (bits, rows) == (4, 8):
        return _shape_by_strips(parts, n, k)
    if rows > MOST_OF_ONE_GROUP and not same:
        split_k = _split_k(parts, n // 2, k, MULTIPROCESSORS // 2)
        of_all = x_tiles * split_k * parts * n // (2 * TILE_W_ROWS)
        if of_all >= LEAST_BLOCKS_OF_TWO_GROUPS or min(n, k) >= LARGE:
            # Registers leave room for one block of a multiprocessor.
            room = SHARED_OF_TWO if split_k == 1 else SHARED
            return _with_stages(TileShape(rows, 2, split_k, 0, 3), bits, 1, room)
    few, blocks = rows <= TILE_FEW_ROWS, 4 if (bits, rows, same) == (4, 32, False) else 3
    split_k = _split_k(parts, n, k, blocks * MULTIPROCESSORS, 4)
    of_multiprocessor = -(-parts * n // TILE_W_ROWS * split_k // MULTIPROCESSORS)
    if of_multiprocessor <= 2 and split_k == 1 and rows <= 64:
        room, x_stages = SHARED_OF_TWO, 4
    elif of_multiprocessor <= 3 or few or rows > 32:
        room = SHARED_OF_THREE if rows <= 96 else SHARED_OF_TWO
        x_stages = 4 if 16 < rows <= 32 else 2 if 32 < rows <= 64 else 3
    else:
        room, x_stages = SHARED_OF_FOUR, 3
    strips = 4 if few else 2 if rows <= 64 else 1
    return _with_stages(TileShape(rows, 1, split_k, 0, x_stages), bits, strips, room, 2 if few else 1)


def partial_sums(n: int, k: int) -> int:
    """Parts of K of a GEMM whose result is a sum for each."""
    return _split_k(1, n, k, 2 * MULTIPROCESSORS, MOST_PARTIAL_SUMS)


def _shape_of_partial_sums(n: int, k: int, rows: int, bits: int) -> TileShape:
    """The shape for one GEMM whose result is partial sums: no clusters, so two blocks find room anywhere.

    Measured on an H100 (driver 580.159.04, 2026-11-26).
    """
    few, by_strips = rows <= TILE_FEW_ROWS, (bits, rows) == (4, 8)
    split_k, strips = partial_sums(n, k), 8 if by_strips else 4 if few else 2 if rows <= 64 else 1
    shape = TileShape(rows, 1, split_k, 0, 5 if bits == 4 and not few else 4, 1)
    shape = _with_stages(shape, bits, strips, SHARED_OF_TWO, 2 if few and not by_strips else 1)
    return _within(shape, k, strips)


def _shape_by_strips(parts: int, n: int, k: int) -> TileShape:
    """The shape for weights of 4 bits and up to 8 rows of x, where each warp has strips of its own.

    Measured on an H100 (driver 580.159.04, 2026-11-25). A block that has a multiprocessor to itself has deep
    rings.
    """
    strips = 8  # of a stage
    split_k = _split_k(parts, n, k, 2 * MULTIPROCESSORS, 2)
    alone = parts * n // TILE_W_ROWS * split_k <= MULTIPROCESSORS
    room, x_stages = (SHARED_BESIDE_ONE, 3) if alone else (SHARED_OF_TWO, 4)
    return _within(_with_stages(TileShape(8, 1, split_k, 0, x_stages), 4, strips, room), k, strips)


def _within(shape: TileShape, k: int, strips: int) -> TileShape:
    """With no more stages than a block has steps, of so many strips each."""
    steps = max(2, -(-k // (shape.split_k * strips * TILE_K)))
    shape.w_stages, shape.x_stages = min(shape.w_stages, steps), min(shape.x_stages, steps)
    return shape


def tile_shape_fp8(parts: int, n: int, k: int, m: int, most_rows: int) -> TileShape:
    """The shape with fp8 on both sides, for tiles of at most so many rows of x; dozens of rows and more.

    Two numbers count as one, which is as many bytes. Measured on an H200 (driver 580.159.04, 2026-11-23): two
    warpgroups share the rows of x of a block wherever there are blocks enough; K is split only where half of
    the multiprocessors would idle; one block with deep rings does as well as two that share them.
    """
    x_tiles = -(-m // most_rows)
    rows = next(size for size in X_ROWS if size * x_tiles >= m)
    tiles = parts * n // TILE_W_ROWS * x_tiles
    groups = 2 if rows > 32 and tiles // 2 >= MULTIPROCESSORS * 2 // 3 else 1
    blocks, split_k = tiles // groups, 1
    while (
        groups == 1
        and split_k < 8
        and 2 * split_k * blocks <= MULTIPROCESSORS
        and k // split_k >= 16 * TILE_K
    ):
        split_k *= 2
    two = rows <= 128 and blocks * split_k > MULTIPROCESSORS
    room = (SHARED_OF_TWO if two else SHARED) - groups * rows * 4
    x_stages = 3 if split_k > 1 or (two and groups == 2) else 4 if two or rows * groups == 512 else 5
    return _with_stages(TileShape(rows, groups, split_k, 0, x_stages), 16, 2 if rows <= 32 else 1, room)


def many_shape(
    parts: int, n: int, m: int, most_rows: int = 256, codes: bool = False, beside: Sequence[int] = ()
) -> TileShape:
    """The shape of gemm_many for so many GEMMs, with tiles of at most so many rows of x, a multiple of 128.

    A block on each multiprocessor goes through tiles. Measured with fp8 at 7.2B's sizes on an H100 (driver
    580.159.04, 2026-11-26): a tile takes as long as its rows of w times those of x, and a little for each
    row of both. codes: that become fp16 in registers. beside: rows of w of small GEMMs in the same launch.
    """

    def cost(shape: tuple[int, int]) -> float:
        groups, rows = shape
        w_rows = groups * TILE_W_ROWS
        tiles = -(-m // rows) * (parts * -(-n // w_rows) + sum(-(-small // w_rows) for small in beside))
        of_tile = MANY_CODES[groups][rows] if codes else _cost_of_tile(w_rows, rows)
        return -(-tiles // MULTIPROCESSORS) * of_tile

    sizes = BESIDE_ROWS if beside and not codes else MANY_ROWS
    shapes = [(groups, rows) for groups in sizes for rows in sizes[groups] if rows <= most_rows]
    groups, rows = min(shapes, key=cost)
    return TileShape(rows, groups, 1)


def many_shape_in_turn(parts: int, n: int, k: int, m: int) -> TileShape:
    """The shape of gemm_many with the sums of `tile_shape`, which has K in parts."""

    def cost(rows: int) -> float:
        tiles = -(-m // rows) * parts * -(-n // (2 * TILE_W_ROWS))
        return -(-tiles // MULTIPROCESSORS) * _cost_of_tile(2 * TILE_W_ROWS, rows)

    return TileShape(min(IN_TURN_ROWS, key=cost), 2, _split_k(parts, n, k, MULTIPROCESSORS))


def many_shape_split(n: int, m: int, split_k: int) -> TileShape:
    """The shape of gemm_many for one GEMM whose result is a sum for each of so many parts of K."""

    def cost(shape: tuple[int, int]) -> float:
        groups, rows = shape
        tiles = -(-m // rows) * split_k * -(-n // (groups * TILE_W_ROWS))
        return -(-tiles // MULTIPROCESSORS) * _cost_of_tile(groups * TILE_W_ROWS, rows)

    shapes = [(groups, rows) for groups, sizes in SPLIT_ROWS.items() for rows in sizes]
    groups, rows = min(shapes, key=cost)
    return TileShape(rows, groups, split_k, partial_sums=1)


def _cost_of_tile(w_rows: int, x_rows: int) -> float:
    """How long a tile takes, with numbers that need not become others, in a unit of its own."""
    return w_rows * x_rows + 6.4 * (w_rows + x_rows)


def _with_stages(shape: TileShape, bits: int, strips: int, room: int, halves: int = 1) -> TileShape:
    """With as many stages of w as so many bytes of shared memory hold, at least two.

    bits: of a number of w. strips: of 64 numbers along k in a stage, `halves` of which have their own sums.
    """
    rows, split_k, groups = shape.x_rows, 1 if shape.partial_sums else shape.split_k, shape.groups
    tile = TILE_BYTES_OF_4_BITS if bits == 4 else TILE_W_ROWS * TILE_K * bits // 8
    w_stage, x_stage = groups * tile * strips, rows * TILE_K * 2 * strips
    parts = split_k * halves
    received = -(-rows // 8 // split_k) * parts * groups * 128 * 16 if parts > 1 else 0
    room -= TILE_BARRIER_BYTES + received + (TILE_ALIGNMENT if bits == 4 else 0)
    if bits < 16 and (room - shape.x_stages * x_stage) // w_stage < 2:
        shape.x_stages = 2
    shape.w_stages = max(2, min(TILE_MAX_STAGES, (room - shape.x_stages * x_stage) // w_stage))
    return shape


def _split_k(parts: int, n: int, k: int, blocks: int, most: int = 8) -> int:
    """Parts of K, a power of two: as many as still are at most so many blocks, for one tile of x."""
    tiles, split_k = parts * n // TILE_W_ROWS, 1
    while split_k < most and 2 * split_k * tiles <= blocks and k // (2 * split_k) >= 4 * TILE_K:
        split_k *= 2
    return split_k
