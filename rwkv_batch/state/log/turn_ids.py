"""Ids of turns: which one comes next.

A server that has a database to itself counts on from the highest id; after a restart those of removed newest
turns come again. Where several processes share one, each takes blocks of ids at random, in which no turn is
stored. That two of 30 take the same one has a chance below 10^-9. Inside a block ids ascend, so that the rows
of a process lie together.
"""

import secrets
from collections.abc import Callable, Iterator

from rwkv_batch.state.entries import StoreError

BLOCK = 1 << 20  # ids
BLOCKS = 1 << 42  # so that all ids are below 2^62


def count_on(last: int) -> Iterator[int]:
    """The ids after `last`."""
    while True:
        last += 1
        yield last


def in_random_blocks(is_used: Callable[[int, int], bool]) -> Iterator[int]:
    """`is_used`: whether a turn is stored whose id is from the first number on and before the second.

    Where that cannot be read it is taken not to be, as it hardly ever is: no turn fails for that.
    """
    while True:
        first = (1 + secrets.randbelow(BLOCKS - 1)) * BLOCK
        try:
            used = is_used(first, first + BLOCK)
        except StoreError:  # which would end this generator, and no turn would get an id any more
            used = False
        if not used:
            yield from range(first, first + BLOCK)
