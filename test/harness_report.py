#!/usr/bin/env python3
"""The lm-evaluation-harness against a server with the bundled model, and the `rwkv` package beside it.

    make test-harness                      installs the harness into a folder of its own, then runs this
    python test/harness_report.py PATH     PATH: the harness's command, lm_eval

The tasks in test/harness are run as a user would, with the model type local-completions, which finds the
tokenizer's routes by itself. Every log-likelihood that the harness got must be that of the package, to CLOSE.
Prints a report; the exit code is 1 if one differs.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent / "helpers"))

from reference import Reference
from scores import expected
from serving import ROOT, Server

from rwkv_batch.bundled.unpack import tensors

TASKS = ("rwkv_batch_capitals", "rwkv_batch_passages")
CLOSE = 1e-3
OFFLINE = {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"}


def run_harness(command: str, url: str, folder: Path) -> str:
    """What it prints at its end. Raises subprocess.CalledProcessError."""
    arguments = [
        *("--model", "local-completions", "--batch_size", "4"),
        *("--model_args", f"model=rwkv7,base_url={url}/v1/completions,num_concurrent=4"),
        *("--tasks", ",".join(TASKS), "--include_path", "test/harness"),
        *("--log_samples", "--output_path", str(folder)),
    ]
    env = os.environ | OFFLINE | {"HF_HOME": str(folder / "cache")}
    done = subprocess.run(
        [command, *arguments], cwd=ROOT, env=env, capture_output=True, text=True, timeout=600
    )
    if done.returncode:
        sys.exit(done.stderr)
    return done.stdout.strip()


def found(folder: Path) -> Iterator[tuple[str, str, float, bool | None]]:
    """Of each request: context, what follows it, its log-likelihood, and whether greedy decoding gives it."""
    for file in sorted(folder.rglob("samples_*.jsonl")):
        for sample in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
            for arguments, (response,) in zip(sample["arguments"].values(), sample["resps"], strict=True):
                if "arg_1" in arguments:
                    yield arguments["arg_0"], arguments["arg_1"], float(response[0]), response[1] == "True"
                else:
                    yield "", arguments["arg_0"], float(response), None


def truth(reference: Reference, context: str, following: str) -> tuple[float, bool]:
    """What the package computes. The harness encodes both together; without a context, 0 comes first."""
    whole = reference.tokenizer.encode(context + following)
    begin = len(reference.tokenizer.encode(context))
    if not context:
        whole, begin = [0, *whole], 1
    lines = expected(reference, whole)[begin - 1 :]
    scores = [float(line[token]) for line, token in zip(lines, whole[begin:], strict=True)]
    return sum(scores), [int(line.argmax()) for line in lines] == whole[begin:]


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        torch.save(tensors(), folder / "model.pth")
        reference = Reference(folder / "model.pth")
        server = Server("--device", "cpu")
        try:
            print(run_harness(sys.argv[1], server.url, folder / "out"))
        finally:
            server.stop()
        errors, greedy = [], 0
        for context, following, likelihood, is_greedy in found(folder / "out"):
            wanted, likeliest = truth(reference, context, following)
            errors.append(abs(likelihood - wanted))
            greedy += is_greedy in (None, likeliest)
    most = max(errors)
    print(f"\n{len(errors)} log-likelihoods, the largest difference from the rwkv package {most:.1e};")
    print(f"greedy or not is said as the package has it for {greedy} of them.")
    sys.exit(most > CLOSE or greedy < len(errors))


if __name__ == "__main__":
    main()
