"""For programs that measure a GPU: they end where there is none."""

import sys

import torch


def need_gpu() -> None:
    """End the process with one sentence if torch has no GPU."""
    if not torch.cuda.is_available():
        sys.exit("This measures a GPU, and torch finds none; run it on a machine with one.")
