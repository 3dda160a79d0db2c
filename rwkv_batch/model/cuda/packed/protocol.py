"""What the weights of every family have in common on a GPU."""

from typing import Protocol

from rwkv_batch.model.cuda.packed.coded import LargeMatrix
from rwkv_batch.model.description import Norm
from rwkv_batch.ops.cuda.buffers import BufferShape


class PackedWeights(Protocol):
    """What every family has of a model's weights on one GPU."""

    @property
    def norm_out(self) -> Norm: ...

    @property
    def head(self) -> LargeMatrix:
        """`[vocab and rows of zeros, C]`."""

    @property
    def buffer_shape(self) -> BufferShape:
        """The sizes of a step's buffers."""
