#!/usr/bin/env python3
"""Speed of weight formats on a CPU, beside the same model as it is in the file, each as the server runs it.

The models take turns, round by round, so that other load on the machine affects all. It prints the medians.

    python bench/cpu_weights.py                      # random weights of the published 0.1B shape
    python bench/cpu_weights.py --model rwkv7-g1-0.1b.pth --threads 1 --weights int8,int4
"""

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.cpu_decode import Case  # noqa: E402
from bench.make_checkpoint import SIZES, random_checkpoint  # noqa: E402
from rwkv_batch.evaluate.report import table  # noqa: E402
from rwkv_batch.model.checkpoint import Checkpoint, load  # noqa: E402
from rwkv_batch.model.quantization.quantize import quantize  # noqa: E402
from rwkv_batch.ops.cpu import binding  # noqa: E402
from rwkv_batch.ops.weights.formats import FORMATS  # noqa: E402
from rwkv_batch.runner.torch_runner import TorchRunner  # noqa: E402

STEPS = 4  # decode steps in one measurement
ROWS = (1, 8)
PROMPT = 64
AS_IN_FILE = "as in the file"


def cases(checkpoint: Checkpoint) -> list[Case]:
    """Decoding so many rows, and reading a prompt."""
    threads = torch.get_num_threads()
    place, dtype = torch.device("cpu"), torch.float32
    model = TorchRunner(checkpoint, place, dtype, kernels=binding.load(), threads=threads).model
    states = model.new_states(max(ROWS))
    ids = torch.randint(1, checkpoint.vocab, (PROMPT,), generator=torch.Generator().manual_seed(0))

    def decode(rows: int) -> Callable[[], None]:
        def run() -> None:
            for _ in range(STEPS):
                model.forward(ids[:rows], [1] * rows, range(rows), states)

        return run

    decoding = [Case(rows * STEPS, STEPS, decode(rows), None) for rows in ROWS]
    return [*decoding, Case(PROMPT, 1, lambda: model.forward(ids, [PROMPT], [0], states), None)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--weights", default=",".join(FORMATS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        if (path := args.model) is None:
            path = Path(folder) / "model.pth"
            torch.save(random_checkpoint(*SIZES["0.1b"], 65536), path)
        checkpoint = load(path)
        models = {AS_IN_FILE: cases(checkpoint)}
        models |= {name: cases(quantize(checkpoint, name)) for name in args.weights.split(",")}
        for _ in range(args.rounds + 1):
            for each in models.values():
                for case in each:
                    case.measure()
    for each in models.values():
        for case in each:
            del case.seconds[0]  # the first warms up
    heads = [f"{rows} row{'s' * (rows > 1)}, tokens/s" for rows in ROWS] + [f"prompt of {PROMPT}, tokens/s"]
    rows = [("weights", *(part for head in heads for part in (head, "times the file")))]
    for name, each in models.items():
        found = [name]
        for case, plain in zip(each, models[AS_IN_FILE], strict=True):
            found += [f"{case.tokens / median(case.seconds):.0f}", f"{case.times(plain):.2f}"]
        rows.append(tuple(found))
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {args.rounds} rounds\n")
    print(table(rows))


if __name__ == "__main__":
    main()
