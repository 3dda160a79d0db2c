"""A process that saves sessions without end and prints what has been acknowledged, to be killed: python
pool_crash.py FILE.
"""

import itertools
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]

import torch  # noqa: E402
from pools import SNAPSHOT_BYTES, Bench  # noqa: E402

KEYS = 7


def contents(number: int) -> torch.Tensor:
    """The bytes of the state that has seen that many tokens."""
    return torch.randint(
        0, 256, (SNAPSHOT_BYTES - 512,), generator=torch.Generator().manual_seed(number), dtype=torch.uint8
    )


def main(path: Path) -> None:
    bench = Bench(path, l1=2, l2=1)
    for number in itertools.count(1):
        key, slot = f"s{number % KEYS}", bench.slot()
        bench.states._memory[slot] = contents(number)
        bench.pool.save(key, slot, number, bench.callback(number))
        if number >= KEYS:  # several saves are under way, one for each session
            done = number - KEYS + 1
            assert bench.wait(done).error is None
            print(done, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
