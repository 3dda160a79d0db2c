"""Whether bars of progress are shown."""

import sys


def hidden(hide: bool | None = None) -> bool | None:
    """For `disable` of tqdm; None hides a bar unless it is on a terminal.

    A process without a terminal may have no standard error at all, and tqdm draws on that.
    """
    return True if sys.__dict__.get("stderr") is None else hide
