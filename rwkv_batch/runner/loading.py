"""A model from its file to its device: read, with an adapter merged and matrices packed as configured."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from rwkv_batch.bundled import unpack
from rwkv_batch.config import EngineConfig
from rwkv_batch.model import checkpoint
from rwkv_batch.model.adapters import reader as adapters
from rwkv_batch.model.adapters.assumed import assume
from rwkv_batch.model.adapters.merge import merge
from rwkv_batch.model.adapters.parts import Scaling
from rwkv_batch.model.checkpoint import Checkpoint
from rwkv_batch.model.cuda.packed.uploading import UploadedTensors
from rwkv_batch.model.files import CheckpointError
from rwkv_batch.model.quantization import packed_file
from rwkv_batch.model.quantization.quantize import quantize
from rwkv_batch.model.stages import layers_of_stages, stage_of
from rwkv_batch.ops import device as devices
from rwkv_batch.ops.progress import hidden
from rwkv_batch.ops.weights.formats import FORMATS
from rwkv_batch.runner import backends
from rwkv_batch.runner.protocol import Runner
from rwkv_batch.text.tokenizer import tokenizer_of

log = logging.getLogger(__name__)
CONTEXT = 1 << 30  # bytes that are left to CUDA by each of several engines on one GPU
DEMO_NAME = "rwkv7-demo"  # of the bundled model


@dataclass(frozen=True)
class LoadedModel:
    """A model on its device, before there are rows."""

    weights: Checkpoint
    runner: Runner
    name: str
    device_bytes: int  # that the weights take


def load_model(
    model: str | Path | Checkpoint | None,
    config: EngineConfig,
    progress: Callable[[int, int], None] | None = None,
) -> LoadedModel:
    """Read and prepare a model, as an Engine takes it. Raises CheckpointError, DeviceError, SamplerError."""
    places = devices.find_devices(config.device)
    place = places[0]
    on_cpu = place.type == "cpu"
    if config.gpu_memory is not None:
        for device in places:
            devices.limit_memory(device, config.gpu_memory)
    elif config.on_device > 1 and not on_cpu:
        for device in places:
            devices.limit_memory(device, devices.memory(device)[1] // config.on_device - CONTEXT)
    if on_cpu:
        devices.give_freed_memory_back()
    reads = on_cpu or config.weights is not None  # before anything goes to the device
    weights = load_weights(model, config, progress if reads else None, on_cpu, place)
    before = sum(map(devices.allocated_bytes, {*places}))
    with devices.out_of_memory_as_error(f"the weights of {weights.name}", place):
        if on_cpu:
            runner = backends.create_runner(weights, places, config)
        else:
            parts = layers_of_stages(weights, len(places))
            uploaded = UploadedTensors(
                weights, place, None if reads else progress, lambda name: places[stage_of(name, parts)]
            )
            runner = backends.create_runner(replace(weights, tensors=uploaded), places, config)
            uploaded.finish()
    taken = sum(map(devices.allocated_bytes, {*places})) - before or weights.bytes_held(runner.dtype.itemsize)
    if on_cpu:
        weights = weights.without_numbers()
    return LoadedModel(weights, runner, config.model_name or weights.name, taken)


def load_weights(
    model: str | Path | Checkpoint | None,
    config: EngineConfig,
    progress: Callable[[int, int], None] | None,
    values: bool = True,
    packing: torch.device | None = None,
    assumed: list[str] | None = None,
) -> Checkpoint:
    """A checkpoint, that of a file, or the bundled one, with the adapter merged, in the configured format.

    values: as of checkpoint.load, where nothing is packed. packing: where matrices are packed, which takes
    up to 2 GiB there; None: on the CPU. assumed: gets what is assumed of an adapter in place of a refusal,
    and the warning about a vocabulary. Raises CheckpointError.
    """
    if config.weights:
        if config.weights not in FORMATS:
            raise CheckpointError(f"There are no weights {config.weights}; use {', '.join(FORMATS)}.")
    elif config.quantize_head is not None:
        raise CheckpointError("--quantize-head needs a format of 8 bits or fewer; give one with --weights.")
    reading = _share(progress, 0) if config.weights else progress
    model = model or config.model_path or unpack.MODEL
    if isinstance(model, Checkpoint):
        weights = model
    elif unpack.is_packed(Path(model)):
        weights = checkpoint.from_tensors(DEMO_NAME, unpack.tensors(Path(model)))
    else:
        weights = packed_file.load(model, reading, values or config.weights is not None)
    if (note := _of_vocabulary(weights)) and not isinstance(model, Checkpoint):
        log.warning("%s", note)
        if assumed is not None:
            assumed.append(note)
    weights = _with_adapter(weights, config, assumed)
    if config.weights is None:
        return weights
    pack = partial(quantize, weights, config.weights, config.quantize_head, _share(progress, 1))
    if packing is None:
        return pack()
    try:
        return pack(device=packing)  # a GPU is much faster
    except torch.OutOfMemoryError:
        log.info("the matrices are packed on the CPU, as there is too little room on %s", packing)
        return pack()


def _share(progress: Callable[[int, int], None] | None, half: int) -> Callable[[int, int], None] | None:
    """For the first (0) or second half of what is reported: what is read, and then what is packed."""
    if progress is None:
        return None
    return lambda done, total: progress(half * total + done, 2 * total)


def _of_vocabulary(weights: Checkpoint) -> str:
    """The warning about a model whose ids are not World's; empty for others.

    Raises CheckpointError if there are too many.
    """
    try:
        if tokenizer_of(weights.vocab).has_texts:
            return ""
    except ValueError as error:
        raise CheckpointError(f"{weights.name} {error}.") from error
    return (
        f"{weights.name} has {weights.vocab:,} tokens, which are not those of the World vocabulary: only "
        "token ids work, and texts are refused."
    )


def _with_adapter(weights: Checkpoint, config: EngineConfig, assumed: list[str] | None) -> Checkpoint:
    alpha, factor = config.adapter_alpha, config.adapter_scaling
    if config.adapter is None:
        options = {
            "--adapter-alpha": alpha,
            "--adapter-scaling": factor,
            "--adapter-init": config.adapter_init,
            "--mole-router": config.mole_router,
        }
        for flag in (flag for flag, value in options.items() if value is not None):
            raise CheckpointError(f"{flag} needs an adapter; give its file with --adapter.")
        return weights
    if weights.weights:
        raise CheckpointError(
            f"{weights.name} is in {weights.weights}, and an adapter is merged before that; give the model "
            "that it was made from with --adapter and --weights, or load the adapter for requests."
        )
    if alpha is not None and factor is not None:
        raise CheckpointError("--adapter-alpha and --adapter-scaling say the same; give one of them.")
    adapter = adapters.read(config.adapter, weights, config.adapter_init)
    scaling = Scaling(factor, alpha) if alpha is not None or factor is not None else None
    router = config.mole_router
    if assumed is not None:
        scaling, router, notes = assume(adapter, scaling, router)
        assumed += notes
    return merge(weights, adapter, scaling, router)


@contextmanager
def loading_bar(name: str) -> Iterator[Callable[[int, int], None]]:
    """A bar for (bytes read, bytes in all) of a checkpoint."""
    bar = tqdm(unit="B", unit_scale=True, desc=f"loading {name}", disable=hidden(), leave=False)
    with logging_redirect_tqdm(), bar:  # log lines above the bar, not inside it

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)
            if done == total:
                bar.close()  # before the lines and bars of what follows

        yield progress
