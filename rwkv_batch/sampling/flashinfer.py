"""The "nucleus" method on a GPU, by FlashInfer: the same distribution as on the host, with random numbers of
its own.
"""

import importlib
import logging
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from rwkv_batch.sampling.reference import LARGEST

log = logging.getLogger(__name__)

Draw = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor
]  # logits [n, vocab], top_k [n], top_p [n] -> ids [n]


def load(device: torch.device) -> Draw | None:
    """FlashInfer's sampler, compiled; None where it is not installed or does not run, and without CUDA."""
    if device.type != "cuda" or torch.version.cuda is None:
        return None
    try:
        sampling = importlib.import_module("flashinfer.sampling")
    except ImportError:
        return None
    log.info("preparing flashinfer's sampler; the first time on a machine this takes a minute or two")
    try:  # the first call compiles it, and may fail
        draw = partial(sampling.top_k_top_p_sampling_from_logits, filter_apply_order="top_k_first")
        sample(draw, torch.zeros(1, 1024, device=device), [], [1.0], [10], [0.5])
    except Exception as error:
        log.warning(
            "flashinfer does not run here (%s); the v2 sampler uses the host instead", type(error).__name__
        )
        return None
    return draw


def sample(
    draw: Draw,
    logits: torch.Tensor,
    changes: Sequence[tuple[int, np.ndarray, np.ndarray]],
    temperatures: Sequence[float],
    top_k: Sequence[int],
    top_p: Sequence[float],
) -> list[int]:
    """One token for each row of logits [n, vocab] fp32, which are changed. `changes`: row, ids, what to add
    to their logits.
    """
    device = logits.device
    logits = torch.nan_to_num(logits, 0.0, LARGEST, -LARGEST, out=logits)
    if changes:
        rows = torch.from_numpy(
            np.repeat([row for row, _, _ in changes], [len(ids) for _, ids, _ in changes])
        ).to(device)
        ids = torch.from_numpy(np.concatenate([ids for _, ids, _ in changes])).to(device)
        amounts = torch.from_numpy(
            np.concatenate([amounts for _, _, amounts in changes]).astype(np.float32)
        ).to(device)
        logits.index_put_((rows, ids), amounts, accumulate=True)
    logits -= logits.amax(1, keepdim=True)  # dividing by a small temperature must not leave the range
    logits /= torch.tensor(temperatures, device=device)[:, None]
    limits = (
        torch.tensor(top_k, dtype=torch.int32, device=device),
        torch.tensor(top_p, dtype=torch.float32, device=device),
    )
    return draw(logits, *limits).tolist()
