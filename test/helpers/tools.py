"""Programs that some tests need and not every machine has."""

import os
from typing import NoReturn

import pytest

ALL = "ALL_TEST_TOOLS"  # set in the environment where all of them are installed, as in CI


def absent(reason: str) -> NoReturn:
    """Skip the test that needs what is not there; where everything ought to be there, fail it."""
    if os.environ.get(ALL):
        pytest.fail(f"{reason} With {ALL} set, nothing may be missing.")
    pytest.skip(reason)
