"""What a state pool is given: its options, and the agreement about slots."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class PoolSlots:
    """The sizes of the upper tiers, and how slots change hands between the pool and its caller."""

    l1: int  # states on the device
    l2: int  # states in host memory
    free: Callable[[int], None]  # gets each slot that becomes the caller's, inside any method of the pool
    spare: Callable[[], int | None]  # gives a slot of the caller's that it will not need, or None


@dataclass(frozen=True)
class PoolOptions:
    """How sessions are stored, and when their tokens are fed again in place of reading a state."""

    durable: bool  # a turn is done when its tokens are on the disk, otherwise at once
    token_log: bool  # False: states are stored in place of tokens
    replay_tokens: int  # a session is not left with more tokens than that behind its last image
    replay_rate: float  # tokens a second that the model is fed
    replay_on_new_model: bool  # sessions of other models with the same vocabulary are fed to this one
