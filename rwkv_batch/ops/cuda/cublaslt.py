"""GEMMs by cuBLASLt with any algorithm that it proposes: its own first choice is not always the fastest.

y = x w^T, all fp16 with sums in fp32. cuBLASLt's matrices are column-major, so to it that is y^T = w x^T.
Where K is long and x has few rows, K is split: a batch of GEMMs over neighbouring parts of K, with partial
sums in fp32.
"""

import ctypes
from ctypes import Structure, byref, c_float, c_int, c_int64, c_size_t, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

MAX_ALGORITHMS = 8  # of a shape
WORKSPACE = 32 << 20  # bytes, shared by all GEMMs: they run one after the other
# Numbers of cublasLt.h: types, attributes of a GEMM, of a matrix and of a preference, a status.
R_32F, R_16F, COMPUTE_32F = 0, 2, 68
TRANSPOSE_A = 3
BATCH_COUNT, BATCH_STRIDE = 5, 6
WORKSPACE_BYTES = 1
NOT_SUPPORTED = 15


class Algorithm(Structure):
    """A proposal: opaque, except the bytes of workspace that it needs and its state (0: valid)."""

    _fields_ = (
        ("data", c_uint64 * 8),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


@dataclass(frozen=True)
class GemmShape:
    """`batch` GEMMs of w `[n, k]` (transposed: stored as `[k, n]`) and x `[m, k]`.

    split_k: they are the parts of one GEMM with K = batch k.
    """

    batch: int
    n: int
    m: int
    k: int
    transposed: bool
    split_k: bool = False


@dataclass(frozen=True)
class _Prepared:
    """cuBLASLt's descriptors of a shape, and its algorithms."""

    gemm: c_void_p
    w: c_void_p
    x: c_void_p
    y: c_void_p
    algorithms: list[Algorithm]


@cache
def for_device(device: torch.device) -> "CublasLt | None":
    """The only instance for that GPU, as its workspace is kept. None if torch came without cuBLASLt."""
    try:
        return CublasLt(device)
    except OSError:
        return None


class CublasLt:
    """cuBLASLt on one GPU. Raises OSError if the library is missing."""

    def __init__(self, device: torch.device) -> None:
        self._library = ctypes.CDLL(f"libcublasLt.so.{(torch.version.cuda or '').split('.')[0]}")
        self._workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=device)
        self._handle = c_void_p()
        self._call("Create", byref(self._handle))
        self._prepare = cache(self._describe)
        self._one, self._zero = c_float(1), c_float(0)

    def algorithm_count(self, shape: GemmShape) -> int:
        """How many algorithms cuBLASLt proposes for it."""
        return len(self._prepare(shape).algorithms)

    def run(self, w: Tensor, x: Tensor, y: Tensor, algorithm: int, transposed: bool = False) -> None:
        """One GEMM, or a batch in tensors of three dimensions; algorithm 0 is cuBLASLt's own choice.

        Where y alone has three, fp32, each y[i] is the product over one part of K.
        """
        batch, split_k = len(y) if y.dim() == 3 else 1, y.dim() > x.dim()
        k = x.shape[-1] // (batch if split_k else 1)
        prepared = self._prepare(GemmShape(batch, y.shape[-1], x.shape[-2], k, transposed, split_k))
        at_w, at_x, at_y = (c_void_p(tensor.data_ptr()) for tensor in (w, x, y))
        inputs = (byref(self._one), at_w, prepared.w, at_x, prepared.x, byref(self._zero))
        outputs = (at_y, prepared.y, at_y, prepared.y, byref(prepared.algorithms[algorithm]))
        workspace = (c_void_p(self._workspace.data_ptr()), c_size_t(WORKSPACE))
        stream = c_void_p(torch.cuda.current_stream().cuda_stream)
        self._call("Matmul", self._handle, prepared.gemm, *inputs, *outputs, *workspace, stream)

    def _describe(self, s: GemmShape) -> _Prepared:
        gemm, preference, count = c_void_p(), c_void_p(), c_int()
        self._call("MatmulDescCreate", byref(gemm), COMPUTE_32F, R_32F)
        if not s.transposed:
            self._set("MatmulDesc", gemm, TRANSPOSE_A, c_int(1))
        w = self._matrix(s, R_16F, s.n, s.k) if s.transposed else self._columns_of_k(s, s.n)
        x, y = self._columns_of_k(s, s.m), self._matrix(s, R_32F if s.split_k else R_16F, s.n, s.m)
        self._call("MatmulPreferenceCreate", byref(preference))
        self._set("MatmulPreference", preference, WORKSPACE_BYTES, c_uint64(WORKSPACE))
        proposals = (Algorithm * MAX_ALGORITHMS)()
        wanted = (self._handle, gemm, w, x, y, y, preference, MAX_ALGORITHMS)
        self._call("MatmulAlgoGetHeuristic", *wanted, proposals, byref(count), accepted=NOT_SUPPORTED)
        self._call("MatmulPreferenceDestroy", preference)
        return _Prepared(gemm, w, x, y, [each for each in proposals[: count.value] if each.state == 0])

    def _columns_of_k(self, s: GemmShape, columns: int) -> c_void_p:
        """A matrix with columns of k numbers; with split-K these are parts of longer ones."""
        strides = (s.batch * s.k, s.k) if s.split_k else (s.k, s.k * columns)
        return self._matrix(s, R_16F, s.k, columns, *strides)

    def _matrix(
        self, s: GemmShape, dtype: int, rows: int, columns: int, column: int = 0, part: int = 0
    ) -> c_void_p:
        """column, part: numbers from a column, or a matrix of the batch, to the next; 0: without gaps."""
        matrix, leading = c_void_p(), c_int64(column or rows)
        self._call("MatrixLayoutCreate", byref(matrix), dtype, c_uint64(rows), c_uint64(columns), leading)
        self._set("MatrixLayout", matrix, BATCH_COUNT, c_int(s.batch))
        self._set("MatrixLayout", matrix, BATCH_STRIDE, c_int64(part or rows * columns))
        return matrix

    def _set(
        self, kind: str, descriptor: c_void_p, attribute: int, value: c_int | c_int64 | c_uint64
    ) -> None:
        size = c_size_t(ctypes.sizeof(value))
        self._call(f"{kind}SetAttribute", descriptor, attribute, byref(value), size)

    def _call(self, name: str, *arguments: object, accepted: int = 0) -> None:
        """Raises RuntimeError on any status but 0 and `accepted`."""
        error = getattr(self._library, "cublasLt" + name)(*arguments)
        if error not in (0, accepted):
            raise RuntimeError(
                f"cublasLt{name} failed (cuBLAS status {error}); check the driver and free GPU memory."
            )
