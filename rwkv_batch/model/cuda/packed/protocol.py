"""What the weights of every family have in common on a GPU."""

from abc import abstractmethod
from dataclasses import dataclass

from torch import Tensor

from rwkv_batch.model.cuda.packed.coded import LargeMatrix
from rwkv_batch.model.tensors.description import Norm
from rwkv_batch.ops.cuda.buffers import BufferShape


@dataclass(frozen=True)
class PackedWeights:
    """A model's weights on one GPU, but for its layers."""

    embedding: Tensor  # [vocab, C], its layer norm applied; of some formats in pinned host memory
    norm_out: Norm
    head: LargeMatrix  # [vocab, C]; rows of zeros are added up to a multiple

    @property
    @abstractmethod
    def buffer_shape(self) -> BufferShape:
        """The sizes of a step's buffers."""
