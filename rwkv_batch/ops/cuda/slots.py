"""What the kernels need to know of states."""

from typing import Protocol

from torch import Tensor

NO_SLOT = -1  # of padding: no state is read or written


class Slots(Protocol):
    """States of all slots, as in rwkv7.States."""

    shift: Tensor  # [slots, layers, 2, C], fp16
    wkv: Tensor  # [slots, layers, heads, 64, 64], fp16 or fp32
