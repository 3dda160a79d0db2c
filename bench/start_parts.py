#!/usr/bin/env python3
"""What the engine does from the start of app.py until it serves: a table of the parts, and what each takes.

    python bench/start_parts.py -- --model-path rwkv7-g1-7.2b.pth
    python bench/start_parts.py --depth 5 --least 10 -- --model-path rwkv7-g1-7.2b.pth

A thread in the engine's process looks at the stack of the main thread every few milliseconds. A part is the
chain of our own functions that the main thread is in, up to --depth of them, or the package that it imports.
Neighbours that take less than --least milliseconds each are one line, "others". If that is too short as well,
it counts to what comes before.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.stack_samples import BEGAN, FOLDER, HOOK, READY, ROOT
from bench.startup import PATIENCE, launched, own_and_servers

ENGINE = "supervisor.run_engine"  # the function that the engine's process begins with
OUTSIDE, OTHERS = "Python, before the engine's first line", "others"


class StartPart(NamedTuple):
    """What the main thread was doing for a while."""

    begin: float  # seconds since the start of app.py
    end: float
    what: str

    @property
    def seconds(self) -> float:
        return self.end - self.begin


def shown(chain: list[str], depth: int) -> str:
    """A part's name: the outermost functions after the engine's own, or what they import."""
    functions = [name for name in chain if not name.startswith("import ")]
    if ENGINE not in functions:
        return OUTSIDE
    if chain[-1].startswith("import "):
        return chain[-1]
    return " > ".join(functions[functions.index(ENGINE) + 1 :][:depth]) or ENGINE


def parts(samples: list[tuple[float, list[str]]], depth: int, least: float) -> list[StartPart]:
    """In the order of time, without gaps. Those shorter than `least` seconds are OTHERS together."""
    end = samples[-1][0]
    found = _runs([StartPart(seconds, end, shown(chain, depth)) for seconds, chain in samples])
    found = _runs([part if part.seconds >= least else part._replace(what=OTHERS) for part in found])
    return _runs([part for part in found if part.seconds >= least])


def _runs(found: list[StartPart]) -> list[StartPart]:
    """Neighbours of one name joined; each ends where the next one begins."""
    first = [next(run) for _, run in groupby(found, key=lambda part: part.what)]
    ends = [part.begin for part in first[1:]] + [found[-1].end] if found else []
    return [part._replace(end=end) for part, end in zip(first, ends, strict=True)]


def started(flags: list[str]) -> list[tuple[float, list[str]]]:
    """Start a server with an empty database, stop it when it serves, and return the samples of its engine."""
    with tempfile.TemporaryDirectory() as folder:
        hook, samples = Path(folder) / "hook", Path(folder) / "samples"
        hook.mkdir()
        samples.mkdir()
        (hook / "sitecustomize.py").write_text(HOOK, encoding="utf-8")
        path = os.pathsep.join([str(hook), *filter(None, [os.environ.get("PYTHONPATH")])])
        began = time.monotonic()
        environment = os.environ | {"PYTHONPATH": path, FOLDER: str(samples), BEGAN: str(began)}
        with launched(ROOT, flags, folder, environment) as (server, _):
            while server.poll() is None and time.monotonic() - began < PATIENCE:
                time.sleep(0.1)
                for file in samples.iterdir():
                    lines = file.read_text(encoding="utf-8").split("\n")[:-1]
                    if lines and READY in lines[-1]:
                        return [(seconds, chain) for seconds, chain in map(json.loads, lines)]
    sys.exit(f"The server ended, or did not serve within {PATIENCE} s.")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--depth", type=int, default=4, help="functions of a part's name")
    parser.add_argument("--least", type=float, default=20, help="milliseconds of a part")
    own, flags = own_and_servers(sys.argv[1:])
    args = parser.parse_args(own)
    print("| from, s | takes, s | what |\n|---|---|---|")
    for part in parts(started(flags), args.depth, args.least / 1e3):
        print(f"| {part.begin:.2f} | {part.seconds:.2f} | {part.what} |")


if __name__ == "__main__":
    main()
