"""Which form matrices of codes have on a GPU: the one place that decides, as products follow from the form.

Hopper GPUs have products of their own for most formats (`coded`); every GPU has those with blocks (`blocks`).
"""

from collections.abc import Collection

import torch

from rwkv_batch.model.cuda.packed.blocks import decoded_room, in_blocks
from rwkv_batch.model.cuda.packed.coded import CODED, CodedMatrix, coded
from rwkv_batch.ops.weights.weight import Weight

HOPPER = "90a"  # the architecture of its kernels
TILED = tuple(kind.format for kind in CODED)  # that these have products for


def in_tiles(weights: str, architecture: str) -> bool:
    """Whether matrices of a format are in the form of Hopper's own kernels, where those are built for it."""
    return architecture == HOPPER and weights in TILED


class Packer:
    """Packs the matrices of a model for a GPU."""

    def __init__(self, weights: Collection[Weight], device: torch.device, architecture: str) -> None:
        """architecture: of the kernels, as in build.build."""
        self._device, self._architecture = device, architecture
        blocks = [weight for weight in weights if not in_tiles(weight.format, architecture)]
        self._decoded = decoded_room(blocks, device)

    def pack(self, weight: Weight, columns: bool = False) -> CodedMatrix:
        """columns: as of `coded`."""
        if in_tiles(weight.format, self._architecture):
            return coded(weight, self._device, columns)
        return in_blocks(weight, self._decoded)
