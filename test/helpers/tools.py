"""Programs that some tests need and not every machine has."""

import os
from pathlib import Path
from typing import NoReturn

import pytest

ALL = "ALL_TEST_TOOLS"  # set in the environment where all of them are installed, as in CI


def absent(reason: str) -> NoReturn:
    """Skip the test that needs what is not there; where everything ought to be there, fail it."""
    if os.environ.get(ALL):
        pytest.fail(f"{reason} With {ALL} set, nothing may be missing.")
    pytest.skip(reason)


def needs_proc() -> None:
    """For tests that read in /proc what a process takes."""
    if not Path("/proc/self/status").exists():
        absent("There is no /proc, which says what a process takes.")
