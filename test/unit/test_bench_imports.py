"""What measures finds what it takes from the product."""

from importlib import import_module
from pathlib import Path

import pytest

pytestmark = pytest.mark.thorough

SCRIPTS = sorted(file.stem for file in (Path(__file__).resolve().parents[2] / "bench").glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_imports_what_there_is(script: str) -> None:
    import_module(f"bench.{script}")
