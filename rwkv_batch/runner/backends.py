"""The one place where the backend is chosen. A further backend is a runner of its own and a line here."""

import logging
from collections.abc import Sequence
from typing import get_args

import torch

from rwkv_batch.config import ActivationsName, EngineConfig
from rwkv_batch.model.checkpoint import TITLES, Checkpoint
from rwkv_batch.model.cuda.packed import packing
from rwkv_batch.model.quantization.matrices import is_half
from rwkv_batch.model.stages import layers_of_stages
from rwkv_batch.ops.compiled.libraries import BuildError
from rwkv_batch.ops.cpu.binding import load
from rwkv_batch.ops.cuda import build
from rwkv_batch.ops.cuda.gemms import SPARSE_ROWS
from rwkv_batch.ops.device import DeviceError, allocated_bytes, describe
from rwkv_batch.ops.low_rank import MOST_RANK
from rwkv_batch.runner.cuda_runner import CUDA_MODELS, CudaRunner
from rwkv_batch.runner.protocol import AdapterRoom, Runner
from rwkv_batch.runner.staged_runner import StagedRunner
from rwkv_batch.runner.torch_runner import TorchRunner
from rwkv_batch.sampling.flashinfer import SamplerError

log = logging.getLogger(__name__)


def create_runner(checkpoint: Checkpoint, places: Sequence[torch.device], config: EngineConfig) -> Runner:
    """The model on the device, by the fastest backend that runs there or the one asked for.

    places: several devices have a stage of the model each.

    Raises DeviceError if the backend does not run there, SamplerError if the sampler does not.
    """
    device = places[0]
    _check_activations(checkpoint, device, config)
    _check_coded(checkpoint, device, config)
    _check_speculation(checkpoint, places, config)
    if config.batch_invariant:
        _check_invariant(checkpoint, device, config)
    default = "fp32" if device.type == "cpu" or config.batch_invariant else "fp16"
    wkv_dtype = {"fp16": torch.float16, "fp32": torch.float32}[config.wkv or default]
    if config.max_adapter_rank > MOST_RANK:
        raise DeviceError(
            f"--max-adapter-rank {config.max_adapter_rank} is too large; use {MOST_RANK} or less."
        )
    portable = config.backend == "portable"
    if portable and (device.type != "cuda" or torch.version.hip):
        raise DeviceError("--backend portable needs an NVIDIA GPU; use --backend auto")
    if device.type == "cuda" and config.backend != "torch":
        try:
            return _create_cuda_runner(checkpoint, places, wkv_dtype, config)
        except BuildError as error:
            if portable or config.batch_invariant or checkpoint.packed:
                raise DeviceError(str(error)) from error
            log.warning("%s Until then the slower torch operations run.", error)
    if config.sampler == "flashinfer":
        raise SamplerError("--sampler flashinfer needs a GPU and the kernels in cuda/; use --sampler own")
    kernels = load() if device.type == "cpu" and config.backend != "torch" else None
    room = _room(config)
    return TorchRunner(checkpoint, places, wkv_dtype, room, config.batch_invariant, kernels, config.threads)


def _check_speculation(checkpoint: Checkpoint, places: Sequence[torch.device], config: EngineConfig) -> None:
    """Raises DeviceError where nothing verifies drafts."""
    if not config.speculate:
        return
    if len(places) > 1:
        raise DeviceError("--speculate is not for a model in stages yet; leave it out, or name one device.")
    if places[0].type == "cpu" or config.backend == "torch":
        return
    if checkpoint.family == "rwkv6":
        raise DeviceError(
            "--speculate is not for RWKV-6 on a GPU yet; leave it out, or use --device cpu or --backend "
            "torch."
        )
    if config.sampler != "own":
        raise DeviceError(
            f"--speculate is not for --sampler {config.sampler}; leave one of them out, or use --sampler own."
        )


def _check_activations(checkpoint: Checkpoint, device: torch.device, config: EngineConfig) -> None:
    """Raises DeviceError where activations are asked for that a model does not have on a device."""
    if config.activations is None:
        return
    what = f"--activations {config.activations}"
    if config.activations not in get_args(ActivationsName):
        raise DeviceError(f"There are no activations {config.activations}; use fp8.")
    if device.type == "cpu" or config.backend != "auto":
        where = "a CPU" if device.type == "cpu" else f"--backend {config.backend}"
        raise DeviceError(f"{what} is not for {where}, but for Hopper GPUs (H100, H200); leave it out.")
    if checkpoint.weights not in packing.TILED:
        of = f"in {checkpoint.weights}" if checkpoint.weights else "not rounded"
        raise DeviceError(
            f"{what} is for --weights {', '.join(packing.TILED)}, and {checkpoint.name} is {of}; give one "
            "of these, or leave it out."
        )


def _check_coded(checkpoint: Checkpoint, device: torch.device, config: EngineConfig) -> None:
    """Raises DeviceError where a GPU is not to run by the kernels that have products for a format."""
    if not checkpoint.weights or is_half(checkpoint.weights) or device.type == "cpu":
        return
    what = f"--weights {checkpoint.weights}"
    if config.backend == "torch":
        raise DeviceError(f"{what} needs the kernels on a GPU; leave --backend torch out.")
    if checkpoint.family == "rwkv6" or checkpoint.mole:
        title = "MoLE" if checkpoint.mole else TITLES[checkpoint.family]
        raise DeviceError(f"{what} is not for {title} on a GPU; leave it out, or use --device cpu.")


def _create_cuda_runner(
    checkpoint: Checkpoint, places: Sequence[torch.device], wkv_dtype: torch.dtype, config: EngineConfig
) -> Runner:
    """With own kernels. Raises BuildError if there are none for a GPU or the model."""
    if checkpoint.mole:
        raise BuildError("There are no kernels for MoLE yet.")
    if torch.version.hip:
        log.warning(
            "The kernels for AMD GPUs have been compiled and checked, but never run on one; "
            "--backend torch does without them."
        )
    portable = config.backend == "portable"
    architectures = [(build.portable_architecture if portable else build.architecture)(p) for p in places]
    architecture = architectures[-1]
    if config.activations:
        _check_fp8(checkpoint, places, architectures)
    if checkpoint.packed and not packing.in_tiles(checkpoint.weights, architecture):
        log.warning(
            "--weights %s is made for few rows on this GPU: many rows and long prompts are slower than with "
            "fp16 (docs/weights.md).",
            checkpoint.weights,
        )
    elif checkpoint.packed and config.batch_invariant:
        log.warning(
            "--weights %s with --batch-invariant is faster than fp16 on this GPU up to about 90 rows, and "
            "slower beyond (docs/weights.md).",
            checkpoint.weights,
        )
    room, few = _room(config), config.max_rows is not None and config.max_rows <= SPARSE_ROWS[-1]
    cuda_model, fp8_copies = CUDA_MODELS[checkpoint.family], config.activations == "fp8"
    if len(places) > 1:
        models = []
        parts = layers_of_stages(checkpoint, len(places))
        for place, kind, part in zip(places, architectures, parts, strict=True):
            before = allocated_bytes(place)
            model = cuda_model(checkpoint, place, kind, config.batch_invariant, few, part, fp8_copies)
            models.append(model)
            taken = (allocated_bytes(place) - before) / 2**30
            log.info("layers %d to %d: %s, %.1f GiB", part[0], part[-1], describe(place), taken)
        return StagedRunner(models, wkv_dtype, config.sampler, room)
    model = cuda_model(checkpoint, places[0], architecture, config.batch_invariant, few, None, fp8_copies)
    return CudaRunner(model, wkv_dtype, config.sampler, room, config.speculate)


def _check_fp8(checkpoint: Checkpoint, places: Sequence[torch.device], architectures: Sequence[str]) -> None:
    """Raises DeviceError for a GPU without kernels for activations in fp8. Logs what these cost."""
    for place, architecture in zip(places, architectures, strict=True):
        if architecture != packing.HOPPER:
            raise DeviceError(
                f"--activations fp8 is for Hopper GPUs (H100, H200), not for {describe(place)}; leave it out."
            )
    copies = packing.fp8_copy_bytes(checkpoint.packed) / 2**30
    if copies:
        log.info("activations of more than 64 tokens are fp8; copies of the matrices take %.1f GiB", copies)
    else:
        log.info("--activations fp8 changes nothing: those of --weights fp8 are fp8 with many tokens anyway")


def _check_invariant(checkpoint: Checkpoint, device: torch.device, config: EngineConfig) -> None:
    """Raises DeviceError for what --batch-invariant does not hold with."""
    if config.activations:
        raise DeviceError("--batch-invariant keeps activations in fp16; leave --activations out.")
    if config.wkv == "fp16" and device.type == "cpu":
        raise DeviceError("--batch-invariant keeps states in fp32 on a CPU; leave --wkv fp16 out.")
    if config.wkv == "fp16" and checkpoint.family == "rwkv6":
        raise DeviceError("--batch-invariant keeps states of RWKV-6 in fp32; leave --wkv fp16 out.")
    if config.max_adapters:
        raise DeviceError(
            "--batch-invariant does not hold for adapters of requests; leave --max-adapters out, and merge "
            "one with --adapter."
        )
    if checkpoint.mole:
        raise DeviceError("--batch-invariant does not hold for MoLE; leave one of them out.")
    if config.sampler != "own":
        raise DeviceError(
            f"--batch-invariant does not hold for --sampler {config.sampler}; use --sampler own."
        )
    if device.type == "cuda" and config.backend == "torch":
        raise DeviceError("--batch-invariant needs the kernels in cuda/ on a GPU; leave --backend torch out.")


def _room(config: EngineConfig) -> AdapterRoom:
    return AdapterRoom(config.max_adapters, config.max_adapter_rank)
