"""The one place where the backend is chosen. A further backend is a runner of its own and a line here."""

import logging

import torch

from rwkv_batch.config import SamplerName
from rwkv_batch.model.checkpoint import Checkpoint
from rwkv_batch.ops.cuda.build import BuildError
from rwkv_batch.runner.cuda_runner import CudaRunner
from rwkv_batch.runner.protocol import Runner
from rwkv_batch.runner.torch_runner import TorchRunner
from rwkv_batch.sampling.flashinfer import SamplerError

log = logging.getLogger(__name__)


def create_runner(
    checkpoint: Checkpoint, device: torch.device, wkv: str | None, sampler: SamplerName
) -> Runner:
    """The model on the device, by the fastest backend that runs there.

    wkv: "fp16" or "fp32", how the recurrent state is stored (None: fp32 on a CPU, fp16 on a GPU). Raises
    SamplerError if the sampler does not run there.
    """
    default = "fp32" if device.type == "cpu" else "fp16"
    wkv_dtype = {"fp16": torch.float16, "fp32": torch.float32}[wkv or default]
    if device.type == "cuda" and torch.version.hip:
        log.warning("The kernels for AMD GPUs are not connected yet, so the slower torch operations run.")
    elif device.type == "cuda":
        try:
            return CudaRunner(checkpoint, device, wkv_dtype, sampler)
        except BuildError as error:
            log.warning("%s Until then the slower torch operations run.", error)
    if sampler == "flashinfer":
        raise SamplerError("--sampler flashinfer needs a GPU and the kernels in cuda/; use --sampler own")
    return TorchRunner(checkpoint, device, wkv_dtype)
