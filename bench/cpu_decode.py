#!/usr/bin/env python3
"""Speed of the model alone on a CPU, beside the `rwkv` package on the same weights in the same process.

The two take turns, round by round, so that other load on the machine affects both. It prints the medians of
the rounds.

    python bench/cpu_decode.py                       # random weights of the published 0.1B shape
    python bench/cpu_decode.py --model rwkv7-g1-0.1b.pth --threads 1
    python bench/cpu_decode.py --speculate 7         # an engine with drafts beside one without, bundled model

With --speculate, figures are of CPU seconds, as drafts are measured beside the same steps on one thread.
"""

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.make_checkpoint import SIZES, random_checkpoint  # noqa: E402
from rwkv_batch.engine.engine import Engine  # noqa: E402
from rwkv_batch.model.checkpoint import load  # noqa: E402
from rwkv_batch.model.rwkv7_cpu import CpuRWKV7  # noqa: E402
from rwkv_batch.ops.cpu import binding  # noqa: E402
from rwkv_batch.wire.protocol import Sampling  # noqa: E402

TALE = "User: Tell me a story about a dog.\n\nAssistant:"
STEPS = 8  # decode steps in one measurement
ROWS = (1, 2, 4, 8, 16, 32, 64)
PIECES = (16, 64, 256, 1000)  # prompt tokens in one call
PACKAGE_PIECE = 64


@dataclass
class Case:
    """One line of the table."""

    tokens: int  # in one measurement
    calls: int  # of the model in one measurement
    action: Callable[[], object]
    baseline: str | None  # the line it is compared with
    seconds: list[float] = field(default_factory=list)

    def measure(self) -> None:
        start = time.perf_counter()
        self.action()
        self.seconds.append(time.perf_counter() - start)

    def times(self, other: "Case") -> float:
        """Tokens/s in multiples of the other's, median over the rounds, each of which measured both."""
        return (
            median(b / a for a, b in zip(self.seconds, other.seconds, strict=True))
            * self.tokens
            / other.tokens
        )


def cases(path: Path) -> dict[str, Case]:
    """The lines of the table by their names."""
    os.environ.update(RWKV_V7_ON="1", RWKV_JIT_ON="1", RWKV_CUDA_ON="0")
    from rwkv.model import RWKV

    model = CpuRWKV7(load(path), kernels=binding.load())
    package = RWKV(str(path.with_suffix("")), "cpu fp32")
    states = model.new_states(max(ROWS))
    ids = torch.randint(1, 65529, (max(PIECES),), generator=torch.Generator().manual_seed(0))

    def package_decode() -> None:
        state = None
        for token in ids[:STEPS].tolist():
            _, state = package.forward([token], state)

    def package_prefill() -> None:
        package.forward(ids[:PACKAGE_PIECE].tolist(), None)

    def decode(rows: int) -> Callable[[], None]:
        def steps() -> None:
            for step in range(STEPS):
                model.forward(ids[step : step + rows], [1] * rows, range(rows), states)

        return steps

    def prefill(length: int) -> Callable[[], object]:
        return lambda: model.forward(ids[:length], [length], [0], states)

    one, piece = "`rwkv`, 1 row", f"`rwkv`, prefill {PACKAGE_PIECE}"
    return (
        {one: Case(STEPS, STEPS, package_decode, None)}
        | {
            f"{rows} row{'s' if rows > 1 else ''}": Case(STEPS * rows, STEPS, decode(rows), one)
            for rows in ROWS
        }
        | {piece: Case(PACKAGE_PIECE, 1, package_prefill, None)}
        | {f"prefill {length}": Case(length, 1, prefill(length), piece) for length in PIECES}
    )


@dataclass
class Text:
    """What an engine writes: prompts, and how."""

    prompts: list[str]
    options: dict[str, object]
    seconds: dict[int, list[float]] = field(default_factory=dict)  # by what --speculate is


def drafts(model: Path | None, most: int, rounds: int) -> None:
    """Print the speed of an engine with drafts beside that of one without, of texts by how they repeat."""
    fields = {"device": "cpu", "max_rows": 8, "l1": 0, "prefix_cache_mb": 0, "threads": 1}
    engines = {each: Engine(model, **fields, speculate=each) for each in (0, most)}
    greedy, free = Sampling(temperature=0), Sampling(temperature=1, seed=1)
    told = engines[0].generate([TALE], sampling=greedy)[0].text
    edit = f"{TALE}{told}\n\n{TALE.replace('dog', 'cat')}"
    texts = {
        "edit of the prompt's text": Text([edit], {"sampling": greedy}),
        "the same, 4 rows": Text([edit] * 4, {"sampling": greedy}),
        "`prediction`, one word differs": Text(
            [TALE], {"sampling": greedy, "prediction": told.replace("dog", "fox")}
        ),
        "free text": Text(["Once upon"], {"sampling": free, "stop_ids": [], "max_tokens": 100}),
        "free text, 4 rows": Text(["Once upon"] * 4, {"sampling": free, "stop_ids": [], "max_tokens": 100}),
    }
    print(
        "| text | tokens | accepted | rejected | tokens/s without | with | times |\n"
        "|---|---|---|---|---|---|---|"
    )
    for name, text in texts.items():
        found = {}
        for number in range(rounds):
            for each in sorted(engines, reverse=number % 2 == 1):
                begun = time.process_time()
                found[each] = engines[each].generate(text.prompts, **text.options)
                text.seconds.setdefault(each, []).append(time.process_time() - begun)
        assert [row.text for row in found[0]] == [row.text for row in found[most]], "the same text"
        tokens, plain, drafted = sum(row.tokens for row in found[0]), text.seconds[0], text.seconds[most]
        times = median(a / b for a, b in zip(plain, drafted, strict=True))
        print(
            f"| {name} | {tokens} | {sum(row.accepted for row in found[most])} "
            f"| {sum(row.rejected for row in found[most])} | {tokens / median(plain):.0f} "
            f"| {tokens / median(drafted):.0f} | {times:.2f} |"
        )


def machine() -> str:
    names = [
        line.split(":")[1].strip()
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if line.startswith("model name")
    ]
    return f"{names[0] if names else platform.processor()}, {torch.get_num_threads()} threads"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", type=Path, help="a .pth checkpoint; without it, random weights of the 0.1B shape"
    )
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--speculate", type=int, default=0, help="tokens of a draft: measure drafts only")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    if args.speculate:
        drafts(args.model, args.speculate, args.rounds)
        return
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        path = args.model
        if path is None:
            path = Path(folder) / "random-0.1b.pth"
            torch.save(random_checkpoint(*SIZES["0.1b"]), path)
        table = cases(path)
    for case in table.values():
        case.action()
    for _ in range(args.rounds):
        for case in table.values():
            case.measure()

    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    print(
        f"{datetime.now(UTC):%Y-%m-%d}, commit {commit}, {machine()}, torch {torch.__version__}, "
        f"{args.rounds} rounds, load {os.getloadavg()[0]:.1f}\n"
    )
    print(
        "| | tokens/s, median | times `rwkv` | times 1 row | ms a call, median | best "
        "|\n|---|---|---|---|---|---|"
    )
    for name, case in table.items():
        of_package = f"{case.times(table[case.baseline]):.2f}" if case.baseline else ""
        middle = median(case.seconds)
        print(
            f"| {name} | {case.tokens / middle:.0f} | {of_package} | {case.times(table['1 row']):.2f} "
            f"| {middle / case.calls * 1e3:.1f} | {min(case.seconds) / case.calls * 1e3:.1f} |"
        )


if __name__ == "__main__":
    main()
