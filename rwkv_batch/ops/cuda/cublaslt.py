"""Products by cuBLASLt with any of the algorithms that it proposes for a shape: the one it would take by
itself is not always the fastest.

y = x w^T, all fp16 with sums in fp32. To cuBLASLt, whose matrices run along columns, that is y^T = w x^T.
Where K is long and x has few rows, it is cut into shares that multiply side by side: products whose matrices
lie one beside the other, with results in fp32.
"""

import ctypes
from ctypes import Structure, byref, c_float, c_int, c_int64, c_size_t, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

MOST = 8  # algorithms of a shape
WORKSPACE = 32 << 20  # bytes, shared by all products: they run one after the other
R_32F, R_16F, COMPUTE_32F = 0, 2, 68
TRANSPOSE_A = 3  # attributes of a product,
BATCH_COUNT, BATCH_STRIDE = 5, 6  # of a matrix
WORKSPACE_BYTES = 1  # and of what is asked for
NOT_SUPPORTED = 15  # how cuBLASLt says that it has no algorithm


class Algorithm(Structure):
    """A proposal: opaque, but for the bytes of workspace that it needs and its state (0: valid)."""

    _fields_ = (
        ("data", c_uint64 * 8),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


@dataclass(frozen=True)
class Shape:
    """`parts` products of w `[n, k]` (across: `[k, n]`) and x `[m, k]`; shares: these are pieces of one w and
    one x with K = parts k.
    """

    parts: int
    n: int
    m: int
    k: int
    across: bool
    shares: bool = False


@dataclass(frozen=True)
class _Plan:
    product: c_void_p
    w: c_void_p
    x: c_void_p
    y: c_void_p
    algorithms: list[Algorithm]


@cache
def of(device: torch.device) -> "Lt | None":
    """The one of that GPU, as it holds memory for good. None if torch has come without cuBLASLt."""
    try:
        return Lt(device)
    except OSError:
        return None


class Lt:
    """cuBLASLt on one GPU. Raises OSError if there is none."""

    def __init__(self, device: torch.device) -> None:
        self._library = ctypes.CDLL(f"libcublasLt.so.{(torch.version.cuda or '').split('.')[0]}")
        self._workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=device)
        self._handle = c_void_p()
        self._call("Create", byref(self._handle))
        self._plans: dict[Shape, _Plan] = {}
        self._one, self._zero = c_float(1), c_float(0)

    def count(self, shape: Shape) -> int:
        """How many algorithms there are for it."""
        return len(self._plan(shape).algorithms)

    def run(self, w: Tensor, x: Tensor, y: Tensor, number: int, across: bool = False) -> None:
        """Of one product, or of several in tensors of three dimensions: by algorithm `number`, 0 being
        cuBLASLt's own choice.

        Where y alone has three, fp32, each y[i] is the product of a share of K.
        """
        parts, shares = len(y) if y.dim() == 3 else 1, y.dim() > x.dim()
        shape = Shape(
            parts, y.shape[-1], x.shape[-2], x.shape[-1] // (parts if shares else 1), across, shares
        )
        plan = self._plan(shape)
        algorithm = plan.algorithms[number]
        self._call(
            "Matmul",
            self._handle,
            plan.product,
            byref(self._one),
            c_void_p(w.data_ptr()),
            plan.w,
            c_void_p(x.data_ptr()),
            plan.x,
            byref(self._zero),
            c_void_p(y.data_ptr()),
            plan.y,
            c_void_p(y.data_ptr()),
            plan.y,
            byref(algorithm),
            c_void_p(self._workspace.data_ptr()),
            c_size_t(WORKSPACE),
            c_void_p(torch.cuda.current_stream().cuda_stream),
        )

    def _plan(self, shape: Shape) -> _Plan:
        if shape not in self._plans:
            self._plans[shape] = self._planned(shape)
        return self._plans[shape]

    def _planned(self, s: Shape) -> _Plan:
        product, wanted, found = c_void_p(), c_void_p(), c_int()
        self._call("MatmulDescCreate", byref(product), COMPUTE_32F, R_32F)
        if not s.across:
            self._set("MatmulDesc", product, TRANSPOSE_A, c_int(1))
        w = self._matrix(s, R_16F, s.n, s.k) if s.across else self._along_k(s, s.n)
        x, y = self._along_k(s, s.m), self._matrix(s, R_32F if s.shares else R_16F, s.n, s.m)
        self._call("MatmulPreferenceCreate", byref(wanted))
        self._set("MatmulPreference", wanted, WORKSPACE_BYTES, c_uint64(WORKSPACE))
        algorithms = (Algorithm * MOST)()
        self._call(
            "MatmulAlgoGetHeuristic",
            self._handle,
            product,
            w,
            x,
            y,
            y,
            wanted,
            MOST,
            algorithms,
            byref(found),
            fine=NOT_SUPPORTED,
        )
        self._call("MatmulPreferenceDestroy", wanted)
        return _Plan(
            product, w, x, y, [algorithm for algorithm in algorithms[: found.value] if algorithm.state == 0]
        )

    def _along_k(self, s: Shape, columns: int) -> c_void_p:
        """Columns of k numbers; those of shares are pieces of longer ones."""
        return (
            self._matrix(s, R_16F, s.k, columns, s.parts * s.k, s.k)
            if s.shares
            else self._matrix(s, R_16F, s.k, columns)
        )

    def _matrix(
        self, s: Shape, of: int, rows: int, columns: int, column: int | None = None, part: int | None = None
    ) -> c_void_p:
        """Of numbers of that type. From a column to the next there are `column` numbers, from a matrix to the
        next `part`; unless these are given, they lie one after the other.
        """
        matrix = c_void_p()
        self._call(
            "MatrixLayoutCreate",
            byref(matrix),
            of,
            c_uint64(rows),
            c_uint64(columns),
            c_int64(column or rows),
        )
        self._set("MatrixLayout", matrix, BATCH_COUNT, c_int(s.parts))
        self._set("MatrixLayout", matrix, BATCH_STRIDE, c_int64(part or rows * columns))
        return matrix

    def _set(self, what: str, of: c_void_p, attribute: int, value: c_int | c_int64 | c_uint64) -> None:
        self._call(f"{what}SetAttribute", of, attribute, byref(value), c_size_t(ctypes.sizeof(value)))

    def _call(self, name: str, *arguments: object, fine: int = 0) -> None:
        error = getattr(self._library, "cublasLt" + name)(*arguments)
        if error not in (0, fine):
            raise RuntimeError(
                f"cublasLt{name} failed (cuBLAS status {error}); check the driver and free GPU memory."
            )
