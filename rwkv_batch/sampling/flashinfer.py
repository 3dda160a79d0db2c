"""FlashInfer, which can draw the rows of method "nucleus" in place of our own kernel: `--sampler flashinfer`.

It draws from the same distribution, with random numbers of its own. So rows with a seed, whose draws are
reproducible, stay with our own kernel, and so do greedy rows.
"""

import logging
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from rwkv_batch import packages
from rwkv_batch.packages import PackageError
from rwkv_batch.sampling.params import RowSampling

log = logging.getLogger(__name__)

# Logits [rows, width] fp32, top_k [rows] int32, top_p [rows] fp32 -> ids [rows] int32, all on the device.
Draw = Callable[[Tensor, Tensor, Tensor], Tensor]


class SamplerError(Exception):
    """The sampler asked for cannot run here; the message is one sentence with the way out."""


def draws(sampling: RowSampling) -> bool:
    """Whether FlashInfer may draw such a row."""
    plain = sampling.likelihood.off and sampling.repetition == 1
    return sampling.method == "nucleus" and plain and not sampling.seeded and not sampling.greedy


def load(device: torch.device, width: int) -> Draw:
    """FlashInfer's sampler for logits of `width` ids, compiled and loaded. Raises SamplerError.

    It neither synchronises with the host nor can it be captured in a graph, since the host counts its random
    numbers.
    """
    try:
        sampling = packages.load("--sampler flashinfer needs", packages.CUDA, "flashinfer.sampling")
    except PackageError as error:
        raise SamplerError(f"{error}, or use --sampler own") from error
    log.info("preparing FlashInfer's sampler; the first time on a machine it is compiled, in a minute or two")
    try:
        generator = torch.Generator(device)
        generator.seed()
        draw: Draw = partial(
            sampling.top_k_top_p_sampling_from_logits, filter_apply_order="top_k_first", generator=generator
        )
        top_k, top_p = torch.ones(1, dtype=torch.int32, device=device), torch.ones(1, device=device)
        draw(torch.zeros(1, width, device=device), top_k, top_p).tolist()
    except Exception as error:  # of its build or of a first launch, of any class
        log.exception("FlashInfer's sampler failed")
        raise SamplerError(
            f"--sampler flashinfer does not run here ({type(error).__name__}, see the log); its kernels are "
            "compiled once, by the CUDA toolkit (13.0): install that, or use --sampler own"
        ) from error
    return draw
