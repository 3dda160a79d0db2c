"""A process that takes turns without end and prints what has been acknowledged, to be killed: python
pool_crash.py FILE.
"""

import itertools
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]

from pools import Bench  # noqa: E402

KEYS = 7


def tokens(number: int) -> list[int]:
    """What the turn of this number adds to session number % KEYS."""
    return [number % 65536, *range(number % 5)]


def main(path: Path) -> None:
    bench = Bench(path, l1=2, l2=1)
    names: dict[int, object] = {}
    for number in itertools.count(1):
        names[number] = bench.turn(f"s{number % KEYS}", tokens(number), wait=False)
        if number >= KEYS:  # several are under way, one for each session
            done = number - KEYS + 1
            assert bench.wait(names.pop(done)).error is None
            print(done, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
