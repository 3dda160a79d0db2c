"""A run of bench/serve.py."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

SERVE = Path(__file__).parents[2] / "bench" / "serve.py"


@dataclass
class LoadRun:
    """Runs bench/serve.py: as a call, or as the command that a user types."""

    main: Callable[[list[str]], int]
    flags: list[str]
    file: Path
    capture: pytest.CaptureFixture
    out: str = ""

    def __call__(self, *flags: str, code: int = 0) -> dict:
        """The figures of the line that a run with more flags appends."""
        assert self.main([*self.flags, *flags]) == code
        self.out, err = self.capture.readouterr()
        assert err == ""
        return self.figures()

    def figures(self) -> dict:
        return json.loads(self.file.read_text().splitlines()[-1])

    def refused(self, *flags: str) -> str:
        """The one line on stderr of a run that ends with code 2."""
        with pytest.raises(SystemExit) as ended:
            self.main([*self.flags, *flags])
        out, err = self.capture.readouterr()
        assert (ended.value.code, out, err.count("\n")) == (2, "", 1), err
        return err

    def command(self, *flags: str) -> list[str]:
        return [sys.executable, str(SERVE), *self.flags, *flags]
