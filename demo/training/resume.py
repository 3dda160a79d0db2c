"""What a training run that was cut off goes on from, in one small file.

Weights are kept in fp16. Of the optimizer only the second moments are kept, as steps of a quarter of a power of
two; the first moments are rebuilt within some ten steps. Three bytes a weight, so that the file is easily moved
from machine to machine.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

SMALLEST = 2.0**-60  # of a second moment; 0 stands for 0


@dataclass(frozen=True)
class TrainingProgress:
    """How far a run is: steps and seconds of training, calls so far, and the known ids."""

    steps: int
    seconds: float
    calls: int
    known: np.ndarray


def save(
    path: Path, progress: TrainingProgress, weights: Mapping[str, Tensor], moments: Mapping[str, Tensor]
) -> None:
    """Write all of it beside `path` and rename, so that the file is always whole."""
    data = {
        "steps": progress.steps,
        "seconds": progress.seconds,
        "calls": progress.calls,
        "known": torch.from_numpy(progress.known),
        "weights": {name: p.detach().half().cpu() for name, p in weights.items()},
        "moments": {name: packed(square).cpu() for name, square in moments.items()},
    }
    beside = path.with_suffix(".new")
    torch.save(data, beside)
    os.replace(beside, path)


def load(path: Path) -> tuple[TrainingProgress, dict[str, Tensor], dict[str, Tensor]]:
    """TrainingProgress, weights and second moments by the names of the parameters."""
    data = torch.load(path, weights_only=True)
    progress = TrainingProgress(data["steps"], data["seconds"], data["calls"], data["known"].numpy())
    return progress, data["weights"], {name: unpacked(code) for name, code in data["moments"].items()}


def packed(square: Tensor) -> Tensor:
    """uint8: 0 for 0, else 1 + four times the power of two above SMALLEST."""
    steps = (4 * torch.log2(square.clamp(min=SMALLEST) / SMALLEST)).round().clamp(0, 254) + 1
    return torch.where(square > 0, steps, 0).to(torch.uint8)


def unpacked(code: Tensor) -> Tensor:
    return torch.where(code > 0, SMALLEST * torch.exp2((code.float() - 1) / 4), 0.0)
