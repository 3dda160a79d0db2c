"""The parts of bench/serve.py, which import each other as a program's own modules."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

BENCH = str(Path(__file__).parents[2] / "bench")


def modules(name: str) -> ModuleType:
    """A module beside bench/serve.py."""
    if BENCH not in sys.path:
        sys.path.append(BENCH)
    return importlib.import_module(name)
