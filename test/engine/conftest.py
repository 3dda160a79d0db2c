"""Engines of tests that make several."""

from collections.abc import Iterator

import pytest
from engine_driver import Driver


@pytest.fixture
def engines() -> Iterator[list[Driver]]:
    """A list to which a test adds its engines; they are closed behind it."""
    made: list[Driver] = []
    yield made
    for driver in made:
        driver.engine.close()
