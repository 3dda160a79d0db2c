"""GEMMs by cuBLASLt, or hipBLASLt on an AMD GPU, with any algorithm that it proposes.

Its own first choice is not always the fastest. y = x w^T, all fp16 with sums in fp32. The library's matrices
are column-major, so to it that is y^T = w x^T. x and w may be fp8 (e4m3), with a scale for each of their rows
(cuBLASLt on Hopper alone).
Where K is long and x has few rows, K is split: a batch of GEMMs over neighbouring parts of K, with partial
sums in fp32.
"""

import ctypes
from contextlib import suppress
from ctypes import Structure, byref, c_float, c_int, c_int8, c_int64, c_size_t, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

MAX_ALGORITHMS = 8  # of a shape
WORKSPACE = 4 << 20  # bytes, shared by all GEMMs: they run one after the other; 32 MiB gain nothing
R_32F, R_16F = 0, 2  # types, with the same numbers in both libraries
# Of cuBLASLt alone: fp8; attributes of a GEMM (fewer digits in sums, scales of its matrices); their value.
R_8F_E4M3, FAST_SUMS, SCALES, SCALE_MODES, SCALE_OF_EACH_ROW = 28, 25, (17, 18), (31, 32), 3
INVALID_VALUE = 7  # a status, of versions that have no scales for each row
WORKSPACE_BYTES = 1  # the attribute of a preference, likewise


def _proposal(name: str, opaque: int) -> type[Structure]:
    """The structure of a proposed algorithm that begins with so many bytes of the library's own.

    Then the bytes of workspace that it needs, and its state (0: valid).
    """
    fields = (
        ("data", c_uint64 * (opaque // 8)),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )
    return type(name, (Structure,), {"_fields_": fields})


@dataclass(frozen=True)
class LtNames:
    """Where a library is, and the numbers of its header: cublasLt.h and hipblaslt.h, which are alike."""

    prefix: str  # of its functions
    files: tuple[str, ...]
    proposal: type[Structure]
    compute_32f: int
    transpose_w: int  # attribute of a GEMM: how its first matrix is stored
    transposed: int  # value of that attribute
    batch_count: int  # attributes of a matrix
    batch_stride: int
    not_supported: int  # status


CUBLASLT = LtNames(
    "cublasLt",
    (f"libcublasLt.so.{(torch.version.cuda or '').split('.')[0]}",),
    _proposal("CublasLtProposal", 64),
    compute_32f=68,
    transpose_w=3,
    transposed=1,
    batch_count=5,
    batch_stride=6,
    not_supported=15,
)
HIPBLASLT = LtNames(
    "hipblasLt",
    # Torch brings its own; otherwise that of ROCm.
    (str(Path(torch.__file__).parent / "lib" / "libhipblaslt.so"), "libhipblaslt.so", "libhipblaslt.so.1"),
    _proposal("HipblasLtProposal", 24),
    compute_32f=2,
    transpose_w=0,
    transposed=112,
    batch_count=0,
    batch_stride=1,
    not_supported=7,
)


@dataclass(frozen=True)
class GemmShape:
    """`batch` GEMMs of w `[n, k]` (transposed: stored as `[k, n]`) and x `[m, k]`.

    split_k: they are the parts of one GEMM with K = batch k. fp8: of w and x; then neither batches nor
    `transposed`.
    """

    batch: int
    n: int
    m: int
    k: int
    transposed: bool
    split_k: bool = False
    fp8: bool = False


@dataclass(frozen=True)
class _Prepared:
    """The library's descriptors of a shape, and its algorithms."""

    gemm: c_void_p
    w: c_void_p
    x: c_void_p
    y: c_void_p
    algorithms: list[Any]


def for_device(device: torch.device) -> "BlasLt | None":
    """An instance for one model on that GPU. None if torch came without the library.

    Its workspace is not shared: while a model is loaded, it runs on another stream than those that serve.
    """
    wanted = HIPBLASLT if torch.version.hip else CUBLASLT
    for file in wanted.files:
        with suppress(OSError):
            return BlasLt(wanted, ctypes.CDLL(file), device)
    return None


class BlasLt:
    """One of the two libraries on one GPU."""

    def __init__(self, names: LtNames, library: Any, device: torch.device) -> None:
        self._names, self._library = names, library
        self._workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=device)
        self._handle = c_void_p()
        self._call("Create", byref(self._handle))
        self._prepare = cache(self._describe)
        self._one, self._zero = c_float(1), c_float(0)

    def algorithm_count(self, shape: GemmShape) -> int:
        """How many algorithms the library proposes for it."""
        return len(self._prepare(shape).algorithms)

    def run_fp8(
        self, w: Tensor, w_scales: Tensor, x: Tensor, x_scales: Tensor, y: Tensor, algorithm: int
    ) -> None:
        """One GEMM of fp8 codes `w [N, K]` and `x [M, K]`, times the scales `[N]` and `[M]`, in fp32."""
        prepared = self._prepare(GemmShape(1, len(w), len(x), x.shape[1], False, fp8=True))
        self._set_scales(prepared.gemm, w_scales, x_scales)
        self._multiply(prepared, w, x, y, algorithm)

    def run(self, w: Tensor, x: Tensor, y: Tensor, algorithm: int, transposed: bool = False) -> None:
        """One GEMM, or a batch in tensors of three dimensions; algorithm 0 is the library's own choice.

        Where y alone has three, fp32, each y[i] is the product over one part of K.
        """
        batch, split_k = len(y) if y.dim() == 3 else 1, y.dim() > x.dim()
        k = x.shape[-1] // (batch if split_k else 1)
        prepared = self._prepare(GemmShape(batch, y.shape[-1], x.shape[-2], k, transposed, split_k))
        self._multiply(prepared, w, x, y, algorithm)

    def _multiply(self, prepared: _Prepared, w: Tensor, x: Tensor, y: Tensor, algorithm: int) -> None:
        at_w, at_x, at_y = (c_void_p(tensor.data_ptr()) for tensor in (w, x, y))
        self._call(
            "Matmul",
            self._handle,
            prepared.gemm,
            byref(self._one),
            at_w,
            prepared.w,
            at_x,
            prepared.x,
            byref(self._zero),
            at_y,
            prepared.y,
            at_y,
            prepared.y,
            byref(prepared.algorithms[algorithm]),
            c_void_p(self._workspace.data_ptr()),
            c_size_t(WORKSPACE),
            c_void_p(torch.cuda.current_stream().cuda_stream),
        )

    def _describe(self, s: GemmShape) -> _Prepared:
        gemm, preference, count = c_void_p(), c_void_p(), c_int()
        self._call("MatmulDescCreate", byref(gemm), self._names.compute_32f, R_32F)
        if not s.transposed:
            self._set("MatmulDesc", gemm, self._names.transpose_w, c_int(self._names.transposed))
        if s.fp8:
            self._set("MatmulDesc", gemm, FAST_SUMS, c_int8(1))
            for mode in SCALE_MODES:
                self._set("MatmulDesc", gemm, mode, c_int(SCALE_OF_EACH_ROW))
            self._set_scales(gemm, self._workspace, self._workspace)  # which proposals ask for, not read yet
        w = self._matrix(s, R_16F, s.n, s.k) if s.transposed else self._columns_of_k(s, s.n)
        x, y = self._columns_of_k(s, s.m), self._matrix(s, R_32F if s.split_k else R_16F, s.n, s.m)
        self._call("MatmulPreferenceCreate", byref(preference))
        self._set("MatmulPreference", preference, WORKSPACE_BYTES, c_uint64(WORKSPACE))
        proposals: Any = (self._names.proposal * MAX_ALGORITHMS)()
        self._call(
            "MatmulAlgoGetHeuristic",
            self._handle,
            gemm,
            w,
            x,
            y,
            y,
            preference,
            MAX_ALGORITHMS,
            proposals,
            byref(count),
            accepted=(self._names.not_supported, *([INVALID_VALUE] if s.fp8 else [])),
        )
        self._call("MatmulPreferenceDestroy", preference)
        return _Prepared(gemm, w, x, y, [each for each in proposals[: count.value] if each.state == 0])

    def _columns_of_k(self, s: GemmShape, columns: int) -> c_void_p:
        """A matrix with columns of k numbers; with split-K these are parts of longer ones."""
        dtype = R_8F_E4M3 if s.fp8 else R_16F
        column, part = (s.batch * s.k, s.k) if s.split_k else (s.k, s.k * columns)
        return self._matrix(s, dtype, s.k, columns, column, part)

    def _matrix(
        self, s: GemmShape, dtype: int, rows: int, columns: int, column: int = 0, part: int = 0
    ) -> c_void_p:
        """column, part: numbers from a column, or a matrix of the batch, to the next; 0: without gaps."""
        matrix, leading = c_void_p(), c_int64(column or rows)
        self._call("MatrixLayoutCreate", byref(matrix), dtype, c_uint64(rows), c_uint64(columns), leading)
        self._set("MatrixLayout", matrix, self._names.batch_count, c_int(s.batch))
        self._set("MatrixLayout", matrix, self._names.batch_stride, c_int64(part or rows * columns))
        return matrix

    def _set_scales(self, gemm: c_void_p, *scales: Tensor) -> None:
        for attribute, tensor in zip(SCALES, scales, strict=True):
            self._set("MatmulDesc", gemm, attribute, c_uint64(tensor.data_ptr()))

    def _set(
        self, kind: str, descriptor: c_void_p, attribute: int, value: c_int8 | c_int | c_int64 | c_uint64
    ) -> None:
        size = c_size_t(ctypes.sizeof(value))
        self._call(f"{kind}SetAttribute", descriptor, attribute, byref(value), size)

    def _call(self, name: str, *arguments: object, accepted: tuple[int, ...] = ()) -> None:
        """Raises RuntimeError on any status but 0 and those `accepted`."""
        function = self._names.prefix + name
        error = getattr(self._library, function)(*arguments)
        if error not in (0, *accepted):
            raise RuntimeError(f"{function} failed (status {error}); check the driver and free GPU memory.")
