"""What the weights of every family have in common on a GPU."""

from abc import abstractmethod
from dataclasses import dataclass

from torch import Tensor

from rwkv_batch.model.cuda.packed.coded import LargeMatrix
from rwkv_batch.model.tensors.description import Norm
from rwkv_batch.ops.cuda.buffers import BufferShape


@dataclass(frozen=True)
class PackedWeights:
    """A model's weights on one GPU, but for its layers; of a stage, those that it has.

    A stage that is not the first has a row of zeros in place of the embedding, and one that is not the last
    in place of the head: what is made for every model need not ask.
    """

    embedding: Tensor  # [vocab, C], its layer norm applied; of some formats in pinned host memory
    norm_out: Norm
    head: LargeMatrix  # [vocab, C]; rows of zeros are added up to a multiple

    @property
    @abstractmethod
    def buffer_shape(self) -> BufferShape:
        """The sizes of a step's buffers."""
