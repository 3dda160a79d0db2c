"""Which form matrices of codes have on a GPU: the one place that decides, as products follow from the form.

Hopper GPUs have products of their own for most formats (`coded`); every GPU has those with blocks (`blocks`).
"""

from collections.abc import Collection, Mapping

import torch

from rwkv_batch.model.cuda.packed.blocks import decoded_room, in_blocks
from rwkv_batch.model.cuda.packed.coded import CODED, CodedMatrix, coded, with_fp8_copy
from rwkv_batch.model.quantization.matrices import HEAD
from rwkv_batch.ops.weights.channels import Fp8Weight
from rwkv_batch.ops.weights.weight import Weight

HOPPER = "90a"  # the architecture of its kernels
TILED = tuple(kind.format for kind in CODED)  # that these have products for


def in_tiles(weights: str, architecture: str) -> bool:
    """Whether matrices of a format are in the form of Hopper's own kernels, where those are built for it."""
    return architecture == HOPPER and weights in TILED


def fp8_copy_bytes(packed: Mapping[str, Weight]) -> int:
    """What copies in fp8 of a model's matrices take on a GPU that has them; those of fp8 have none."""
    copied = (w for name, w in packed.items() if name != HEAD and not isinstance(w, Fp8Weight))
    return sum(weight.numel() for weight in copied)


class Packer:
    """Packs the matrices of a model for a GPU."""

    def __init__(
        self, weights: Collection[Weight], device: torch.device, architecture: str, fp8_copies: bool = False
    ) -> None:
        """architecture: of the kernels, as in build.build. fp8_copies: of matrices in tiles."""
        self._device, self._architecture, self._fp8_copies = device, architecture, fp8_copies
        blocks = [weight for weight in weights if not in_tiles(weight.format, architecture)]
        self._decoded = decoded_room(blocks, device)

    def pack(self, weight: Weight, columns: bool = False) -> CodedMatrix:
        """A matrix of a layer. columns: as of `coded`."""
        matrix = self.pack_head(weight, columns)
        copied = self._fp8_copies and in_tiles(weight.format, self._architecture)
        return with_fp8_copy(matrix, weight) if copied else matrix

    def pack_head(self, weight: Weight, columns: bool = False) -> CodedMatrix:
        """A matrix that has no copy, as its errors go right into the logits."""
        if in_tiles(weight.format, self._architecture):
            return coded(weight, self._device, columns)
        return in_blocks(weight, self._decoded)
