"""What the trainings of a start state and of an adapter share: the bundled model, which stays as it is."""

import numpy as np
from safetensors import safe_open

from demo.training.evaluate import load
from demo.training.model import TrainingModel
from rwkv_batch.bundled.unpack import KNOWN, MODEL


def frozen() -> TrainingModel:
    """The bundled model, none of whose tensors is trained."""
    model = load(MODEL, "cpu").train()
    for p in model.parameters():
        p.requires_grad_(False)
    return model


def known_ids() -> np.ndarray:
    """The ids that have rows of their own in the packed file."""
    with safe_open(MODEL, "np") as file:
        known: np.ndarray = file.get_tensor(KNOWN)
    return known.astype(np.int64)
