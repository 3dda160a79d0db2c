"""A GEMM of a step as a record, and the interface of the methods that run it.

A further way to run GEMMs is a subclass of `Method` in the file of its matrices' form, and one line in the
list at the end of that file.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from rwkv_batch.model.cuda.gemms.kinds import LARGE
from rwkv_batch.model.cuda.gemms.low_rank import Small, in_launch, inner_sides
from rwkv_batch.model.cuda.packed.coded import CodedMatrix, LargeMatrix
from rwkv_batch.ops.cuda.abi import IDENTITY, RELU_SQUARE
from rwkv_batch.ops.cuda.binding import Kernels
from rwkv_batch.ops.cuda.buffers import Buffers
from rwkv_batch.ops.cuda.gemms import CodedRows, Codes, Part
from rwkv_batch.ops.cuda.special.blaslt import GemmShape

PREFETCH_ROWS = 64  # the states of more rows would evict prefetched weights before they are used


@dataclass(frozen=True)
class GemmCall:
    """y = f(x w^T) for one matrix w `[N, K]`, or for three of one shape; and small GEMMs beside it."""

    w: LargeMatrix | tuple[CodedMatrix, ...] | None  # [N, K], three in fp16 [3, N, K]; None: small ones alone
    x: Tensor  # [M, K] fp16, of three [3, M, K]
    y: Tensor  # [M, N] fp16, of three [3, M, N]
    scratch: Buffers | None  # partial sums, and x as fp8; None where no method needs it
    activation: int = IDENTITY  # f, or RELU_SQUARE
    transposed: bool = False  # whether w in fp16 lies as [K, N]
    small: Sequence[Part] = ()  # with the same M
    prefetch: Tensor | None = None  # weights that the next kernel reads
    x_fp8: CodedRows | None = None  # x as the norm before has written it; `x` itself is not there
    square: bool = False  # whether relu(x)^2 is to be multiplied in place of x

    @property
    def ahead(self) -> Tensor | None:
        """What is worth a prefetch with so many rows."""
        return self.prefetch if self.x.shape[-2] <= PREFETCH_ROWS else None

    @property
    def xs(self) -> list[Tensor]:
        """x of each matrix."""
        return list(self.x) if self.x.dim() == 3 else [self.x]

    @property
    def ys(self) -> list[Tensor]:
        """y of each matrix."""
        return list(self.y) if self.y.dim() == 3 else [self.y]

    @property
    def tensor(self) -> Tensor:
        """w, which is in fp16."""
        assert isinstance(self.w, Tensor)
        return self.w

    @property
    def halves(self) -> list[Tensor]:
        """Each w, which are in fp16."""
        return list(self.tensor) if self.x.dim() == 3 else [self.tensor]

    @property
    def coded(self) -> Sequence[CodedMatrix]:
        """Each w, all of which are codes in one format."""
        assert self.w is not None and not isinstance(self.w, Tensor)
        return self.w if isinstance(self.w, tuple) else (self.w,)

    @property
    def codes(self) -> Codes:
        """The codes of all w, in the form in which kernels take them."""
        return codes_of(self.coded)

    @property
    def room(self) -> Buffers:
        """The scratch, where a method needs it."""
        assert self.scratch is not None
        return self.scratch


def codes_of(ws: Sequence[CodedMatrix]) -> Codes:
    """Matrices of one format in the form in which kernels take them."""
    return Codes([w.codes for w in ws], [w.scales for w in ws], ws[0].format, ws[0].columns)


@dataclass(frozen=True)
class Product:
    """The GEMM of a kind, as far as a model decides it."""

    kind: str
    w: LargeMatrix  # its matrix, or one of them
    shape: tuple[int, int]  # outputs and inputs
    count: int = 1  # matrices that are multiplied together
    transposed: bool = False  # as of GemmCall

    def of_tokens(self, tokens: int, parts: int = 1, fp8: bool = False) -> GemmShape:
        """The shape for cuBLASLt; with `parts` of K, partial sums of each."""
        n, k = self.shape
        if parts > 1:
            return GemmShape(parts, n, tokens, k // parts, self.transposed, split_k=True)
        return GemmShape(1 if fp8 else self.count, n, tokens, k, self.transposed, fp8=fp8)


class Method(ABC):
    """A way to run the GEMMs of some kinds whose matrices have one form."""

    form: ClassVar[type]  # of the matrices: Tensor, CodedMatrix or BlockMatrix
    reads_fp8 = False  # whether x becomes fp8, which the norm before may do
    skips_units = False  # whether the weights of inactive hidden units are not read
    leaves_square = False  # whether RELU_SQUARE costs a pass of its own, which one that reads fp8 can do

    def __init__(
        self, kernels: Kernels, name: str, kinds: Collection[str] = LARGE, small: Small = inner_sides
    ) -> None:
        """kinds: of kinds.py. small: what runs the small GEMMs of a call."""
        self.kernels, self.name, self.kinds, self._small = kernels, name, kinds, small

    def takes(self, product: Product, tokens: int) -> bool:
        """Whether it can run it for so many tokens."""
        return product.kind in self.kinds and type(product.w) is self.form and self.fits(product, tokens)

    def fits(self, product: Product, tokens: int) -> bool:
        """Whether it can run a product of its kinds and form for so many tokens."""
        return True

    def run(self, call: GemmCall) -> Tensor | None:
        """Launch it. Returns partial sums `[P, M, N]` fp32 whose sum over P is y, or None if y holds it."""
        sums = self.launch(call)
        if self.leaves_square and call.activation == RELU_SQUARE:
            self.kernels.relu_square(call.y)
        self._small(self.kernels, call.small)
        return sums

    @abstractmethod
    def launch(self, call: GemmCall) -> Tensor | None:
        """Launch the large GEMMs alone, without RELU_SQUARE if it leaves that; see `run`."""

    def beside(self, call: GemmCall) -> Sequence[Part]:
        """The small GEMMs that `launch` runs too."""
        return call.small if self._small is in_launch else ()
