"""What Python and the kernels in `cuda/` must agree on: structures and constants.

A library carries the same numbers (`cuda/abi.cu`); they are compared when it is loaded (`build.load`). Every
pointer is an address on the device.
"""

from ctypes import CDLL, POINTER, Structure, byref, c_char_p, c_int, c_longlong, c_size_t, c_void_p, sizeof

from rwkv_batch.ops.torch_ops import HEAD_SIZE

IDENTITY, TANH, SIGMOID, RELU_SQUARE = range(4)  # activations in the epilogue of a GEMM
HEAD = HEAD_SIZE
CHUNK = 16  # tokens that a prefill's recurrence takes together
MAX_LAG = 2  # tokens that an fp16 state may be behind
DEFERRED_VECTORS = 5  # of HEAD numbers, noted for each of those tokens and each head
DEFERRED_HALF, SINGLE, ROUNDED_HALF = range(3)  # how states are stored: see cuda/wkv.cuh
STOPS = 13  # ids that may end a sequence on the device
SPARSE_SPLITS = 8  # parts of K in gemm_sparse
TILE_W_ROWS = 64  # of a tile of gemm_tile, for each warpgroup
TILE_K = 64  # of a strip of gemm_tile
TILE_FEW_ROWS = 16  # of x, for which two warpgroups share each stage of codes, at most
TILE_MAX_STAGES = 16  # of each of gemm_tile's rings
TILE_BARRIER_BYTES = 528  # of shared memory that gemm_tile uses besides rings and partial sums
ADAPTER_TILE = 16  # rows that adapters are applied to together
ADAPTER_RANK = 16  # of which ranks are multiples
ADAPTER_PARTS = 3  # matrices of a launch
ADAPTER_SPLITS = 16  # parts of K
ADAPTER_MOST_RANK = 256
ADAPTER_ALIGNMENT = 8  # numbers of which the place of a matrix is a multiple
# Formats of gemm_codes.
CODES_INT8, CODES_FP8, CODES_INT4, CODES_NF4, CODES_FP6, CODES_FP5, CODES_WIDE_INT4 = range(7)
ROW_FUNCTIONS = 4  # low-rank functions of a layer
ROW_POINTERS = 34  # matrices and vectors of a layer
ROW_INT4, ROW_WIDE_INT4, ROW_INT8, ROW_INT8_COLUMNS, ROW_HALF = range(5)  # how matrices lie for decode_row
ROW_INNER = 24  # outputs of inner low-rank sides of a block of decode_row, at most
ROW_HALF_WAYS = 2  # sums for each output of a channel mix in decode_row_half
ADAPTER_ADD, ADAPTER_ADD_SQUARE, ADAPTER_ADD_FLOAT = range(3)  # what becomes of y: see cuda/adapter_expand.cu

CONSTANTS = {
    name: int(globals()[name])
    for name in (
        *("IDENTITY", "TANH", "SIGMOID", "RELU_SQUARE", "HEAD", "CHUNK", "MAX_LAG", "DEFERRED_VECTORS"),
        *("DEFERRED_HALF", "SINGLE", "ROUNDED_HALF"),
        *("STOPS", "SPARSE_SPLITS", "TILE_W_ROWS", "TILE_K", "TILE_FEW_ROWS", "TILE_MAX_STAGES"),
        *("TILE_BARRIER_BYTES", "ADAPTER_TILE", "ADAPTER_RANK", "ADAPTER_PARTS", "ADAPTER_SPLITS"),
        *("CODES_INT8", "CODES_FP8", "CODES_INT4", "CODES_NF4", "CODES_FP6", "CODES_FP5", "CODES_WIDE_INT4"),
        *("ROW_FUNCTIONS", "ROW_POINTERS", "ROW_INNER", "ROW_HALF_WAYS"),
        *("ROW_INT4", "ROW_WIDE_INT4", "ROW_INT8", "ROW_INT8_COLUMNS", "ROW_HALF"),
        *("ADAPTER_MOST_RANK", "ADAPTER_ALIGNMENT", "ADAPTER_ADD", "ADAPTER_ADD_SQUARE", "ADAPTER_ADD_FLOAT"),
    )
}


class NormInput(Structure):
    """A residual stream, what is added to it, and the weights of a norm: `cuda/norm.cuh`."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "y", "partials")),
        *((name, c_int) for name in ("partial_count", "partial_rows")),
        *((name, c_void_p) for name in ("tokens", "table", "gather", "weight", "bias")),
        ("width", c_int),
    )


class PackedRowsInput(Structure):
    """Where the tokens of packed rows belong: `cuda/norm.cuh`."""

    _fields_ = tuple((name, c_void_p) for name in ("row_of", "first", "last", "slots", "kept"))


class GemmPart(Structure):
    """One of several GEMMs in a launch: `cuda/gemm.cuh`."""

    _fields_ = (
        *((name, c_void_p) for name in ("w", "x", "y")),
        *((name, c_int) for name in ("n", "k", "activation")),
    )


class TileShape(Structure):
    """How gemm_tile divides a GEMM among blocks: `cuda/gemm_tile.cuh`."""

    _fields_ = tuple(
        (name, c_int) for name in ("x_rows", "groups", "split_k", "w_stages", "x_stages", "partial_sums")
    )


class TimeMixInput(Structure):
    """A layer's time mix between its GEMMs: `cuda/wkv.cuh`."""

    _fields_ = (
        *((name, c_void_p) for name in ("r", "k", "v", "w", "a", "mix", "g", "v_first", "w0", "a0", "v0")),
        *((name, c_void_p) for name in ("k_k", "k_a", "r_k", "norm_weight", "norm_bias", "out", "state")),
        ("slot_stride", c_size_t),
        ("width", c_int),
        *((name, c_void_p) for name in ("tile_counter", "deferred")),
        ("deferred_stride", c_size_t),
        ("lag", c_void_p),
    )


class ReadoutInput(Structure):
    """By what the WKV's output of some rows is scaled: `cuda/wkv.cuh`."""

    _fields_ = (("offsets", c_void_p), ("slot_stride", c_size_t), ("slot_of", c_void_p))


class Wkv6Input(Structure):
    """The time mix of a layer of RWKV-6 between its GEMMs: `cuda/wkv6.cuh`."""

    _fields_ = (
        *((name, c_void_p) for name in ("r", "k", "v", "w", "g", "decay", "bonus", "norm_weight")),
        *((name, c_void_p) for name in ("norm_bias", "out", "state")),
        ("slot_stride", c_size_t),
        ("width", c_int),
    )


class ChunksInput(Structure):
    """Which tokens make up the chunks of a prefill: `cuda/wkv_prefill.cuh`."""

    _fields_ = tuple(
        (name, c_void_p)
        for name in ("counts", "chunk_token", "chunk_tokens", "row_chunk", "row_chunks", "row_slot")
    )


class AdapterPart(Structure):
    """A matrix that adapters change: `cuda/adapter.cuh`."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "y", "sums", "entry")),
        *((name, c_int) for name in ("n", "k")),
    )


class AdapterInput(Structure):
    """Matrices that adapters change in one launch, the slots of adapters, and rows: `cuda/adapter.cuh`."""

    _fields_ = (
        ("part", AdapterPart * ADAPTER_PARTS),
        ("weights", c_void_p),
        ("slot_stride", c_size_t),
        ("tiles", c_void_p),
        *((name, c_int) for name in ("entry_stride", "most_rank")),
    )


class RowInput(Structure):
    """What a step of one row by one launch reads and writes: `cuda/decode_row_input.cuh`."""

    _fields_ = (
        *((name, c_void_p) for name in ("layers", "tokens", "slots", "lag", "table", "x", "shift", "state")),
        ("deferred", c_void_p),
        *((name, c_size_t) for name in ("shift_stride", "state_stride", "deferred_stride")),
        *((name, c_void_p) for name in ("sums", "inner", "launches")),
        ("rank", c_int * ROW_FUNCTIONS),
        *((name, c_int) for name in ("layer_count", "model_layers", "heads", "slices", "head_rows", "form")),
        *((name, c_void_p) for name in ("norm_weight", "norm_bias", "normed", "ahead")),
        ("ahead_bytes", c_size_t),
    )


STRUCTURES = (
    *(NormInput, PackedRowsInput, GemmPart, TileShape, TimeMixInput, ReadoutInput, Wkv6Input),
    *(ChunksInput, AdapterPart, AdapterInput, RowInput),
)


class _AbiEntry(Structure):
    _fields_ = (("name", c_char_p), ("value", c_longlong))


def exported(library: CDLL) -> dict[str, int]:
    """A library's constants and sizes of structures by name, and offsets by "structure.member"."""
    library.rwkv_abi.restype, count = POINTER(_AbiEntry), c_int()
    entries = library.rwkv_abi(byref(count))
    return {entries[i].name.decode(): entries[i].value for i in range(count.value)}


def layout(structure: type[Structure]) -> dict[str, int]:
    """Size and offsets of a ctypes structure in bytes, as in `exported`."""
    members = [field[0] for field in structure._fields_]
    offsets = {f"{structure.__name__}.{member}": getattr(structure, member).offset for member in members}
    return {structure.__name__: sizeof(structure), **offsets}


def mismatch(library: CDLL) -> str | None:
    """The first number in which a library differs from this module, in words; None if there is none."""
    expected = dict(CONSTANTS)
    for structure in STRUCTURES:
        expected |= layout(structure)
    found = exported(library)
    different = (name for name, value in expected.items() if found.get(name) != value)
    return next((f"{name} is {found.get(name)} there and {expected[name]} here" for name in different), None)
