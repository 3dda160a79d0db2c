"""Rows that continue one prompt: one of them feeds it, and the others begin with a copy of its state.

That is the state before the prompt's last token. Each row feeds that itself, and draws its first token then.
"""

from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

LEAST_TOKENS = 16  # of a prompt that is shared; a shorter one is fed as fast as its state is copied


class SharingRow(Protocol):
    """One of the rows, a Sequence."""

    slot: int | None
    fed: int
    waits_for_state: bool


@dataclass(eq=False)
class SharedPrompt:
    """One prompt of several rows."""

    tokens: int  # that the state has seen: all of the prompt but the last
    outside: int  # rows that have had no slot yet
    own_cut: bool = False  # whether nothing else wants the state there
    leader: SharingRow | None = None  # feeds the prompt
    waiting: list[SharingRow] = field(default_factory=list)  # in slots, for the leader
    state: Tensor | None = None  # in host memory, for the rows that are outside
