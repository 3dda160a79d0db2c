"""Ids of requests and replies, which nobody can guess."""

import os
from collections import deque

DIGITS = 32
AT_ONCE = 256  # that are made

_made: deque[str] = deque()


def new_id() -> str:
    """32 hexadecimal digits. From any thread.

    Many are made at once: a request needs several, and whoever asks the system for random bytes lets other
    threads have Python's lock.
    """
    try:
        return _made.popleft()
    except IndexError:
        digits = os.urandom(DIGITS // 2 * AT_ONCE).hex()
        ids = [digits[at : at + DIGITS] for at in range(0, len(digits), DIGITS)]
        _made.extend(ids[1:])
        return ids[0]
