"""Reads an adapter's file against the model that it changes. The method is found by the names in it.

Names are those of the model's tensors without `.weight`, with a suffix; `model.` may be in front:

    .lora_A [r, in], .lora_B [out, r]       LoRA; with .lora_M [1, in] DoRA
    .init_lora_A, .init_lora_B              in a file of their own: what PiSSA began with
    .bone or .disha [in / r, r, r]          Bone
    .disha [r, out]                         DiSHA "bone"
    .weight.D [out, r]                      MiSS of rwkv_lightning_cuda
    the name of a tensor                    the tensor itself (full, hybrid)
    .router., .expert_0., .moe_info         MoLE: see `experts`

A file that is not understood in whole is refused in whole.
"""

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from rwkv_batch.model.adapters.experts import ExpertLayer, expert_layers, is_of_experts
from rwkv_batch.model.adapters.fitting import WRONG, check, lora_of, part_of, shape_of
from rwkv_batch.model.adapters.parts import FullPart, LoraPart, Part, PissaPart, Scaling, ShardPart
from rwkv_batch.model.checkpoint import DTYPES, IGNORED, Checkpoint
from rwkv_batch.model.files import CheckpointError, read_json, read_tensors

PACKAGE, MANIFEST = "adapter.pth", "adapter.json"  # a folder of rwkv_lightning_cuda
LAYOUT = {"method": "miss", "layout": "modulo_rank_zero_pad"}  # what a manifest must say
SUFFIX = re.compile(r"(.+)\.(lora_A|lora_B|lora_M|bone|disha|weight\.D)$")
INIT = re.compile(r"(.+)\.init_(lora_A|lora_B)$")


@dataclass(frozen=True)
class Adapter:
    """A checked adapter of one model.

    digest: of all names and values, the same for wider dtypes.
    """

    name: str
    where: str
    parts: Mapping[str, Part]  # by the name of the tensor that each changes
    experts: tuple[ExpertLayer, ...]  # of all layers; empty without MoLE
    scaling: Scaling | None  # of an adapter.json; the tensors do not say
    digest: str


def read(path: str | Path, checkpoint: Checkpoint, init: str | Path | None = None) -> Adapter:
    """Read an adapter's file, or folder with adapter.pth and adapter.json, for that model.

    init: the file of what PiSSA began with. Raises CheckpointError for what does not fit.
    """
    file = _found(Path(path).expanduser())
    where, tensors = str(file), _read(file)
    began = {} if init is None else _read(_found(Path(init).expanduser()))
    mixture = {key: tensor for key, tensor in tensors.items() if is_of_experts(key)}
    changes = {key: tensor for key, tensor in tensors.items() if key not in mixture}
    parts = _parts(where, changes, checkpoint, None if init is None else _pairs(str(init), began))
    experts = expert_layers(where, mixture, checkpoint)
    manifest = file.with_name(MANIFEST)
    declared = file.name == PACKAGE and manifest.is_file()
    scaling = _declared_scaling(manifest, parts) if declared else None
    name = file.parent.name if file.name == PACKAGE else file.stem
    return Adapter(name, where, parts, experts, scaling, _digest(tensors | began))


def _found(path: Path) -> Path:
    """The file, or that in a folder. Raises CheckpointError if there is none."""
    try:
        file = path / PACKAGE if path.is_dir() else path
        there = file.is_file()
    except (OSError, ValueError):  # a name that is too long or holds a null
        there = False
    if not there:
        raise CheckpointError(f"There is no adapter {path}; check the path.")
    return file


def _read(file: Path) -> dict[str, Tensor]:
    """Its tensors by names without `model.`, each of finite numbers."""
    tensors: dict[str, Tensor] = {}
    for key, tensor in read_tensors(file).items():
        name = key.removeprefix("model.")
        if name in tensors:
            raise CheckpointError(f"{file}: there are two tensors {name}; give one adapter.")
        if tensor.dtype not in DTYPES:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise CheckpointError(f"{file}: {key} is stored as {kind}; give it in bf16, fp16 or fp32.")
        if not tensor.dim() or not tensor.numel():
            raise CheckpointError(f"{file}: {key} has shape {list(tensor.shape)}; {WRONG}.")
        if not tensor.isfinite().all():
            raise CheckpointError(f"{file}: {key} holds numbers that are not finite; {WRONG}.")
        tensors[name] = tensor
    if not tensors:
        raise CheckpointError(f"{file} holds no tensors; give an adapter.")
    return tensors


def _pairs(where: str, tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """What PiSSA began with: lora_A and lora_B of every prefix."""
    pairs: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        match = INIT.match(key)
        if match is None:
            raise CheckpointError(
                f"{where}: {key} is no .init_lora_A or .init_lora_B; give PiSSA's init file."
            )
        pairs.setdefault(match[1], {})[match[2]] = tensor
    return pairs


def _parts(
    where: str,
    tensors: Mapping[str, Tensor],
    checkpoint: Checkpoint,
    began: dict[str, dict[str, Tensor]] | None,
) -> dict[str, Part]:
    groups: dict[str, dict[str, Tensor]] = {}
    parts: dict[str, Part] = {}
    for key, tensor in tensors.items():
        if match := SUFFIX.match(key):
            groups.setdefault(match[1], {})[match[2]] = tensor
        elif key not in IGNORED:
            parts[key] = _full(where, key, tensor, checkpoint)
    for prefix, found in groups.items():
        target = f"{prefix}.weight"
        shape = shape_of(where, target, f"{prefix}.{min(found)}", checkpoint)
        if target in parts:
            raise CheckpointError(
                f"{where} both replaces and changes {target}; give an adapter that does one."
            )
        parts[target] = part_of(where, prefix, found, shape)
        if began is not None:
            parts[target] = _pissa(where, prefix, parts[target], began, shape)
    if began and (unused := began.keys() - groups.keys()):
        raise CheckpointError(
            f"{where} has no {min(unused)}, which its init file has; give those of one training."
        )
    return parts


def _full(where: str, key: str, tensor: Tensor, checkpoint: Checkpoint) -> FullPart:
    if key.endswith(".att.time_state"):
        raise CheckpointError(f"{where} also holds a tuned state ({key}); give it as a file of its own.")
    shape = shape_of(where, key, key, checkpoint)
    plain = tensor.squeeze() if len(shape) == 1 else tensor  # vectors may be [1, 1, width]
    check(where, key, plain, shape)
    return FullPart(plain)


def _pissa(
    where: str, prefix: str, part: Part, began: Mapping[str, Mapping[str, Tensor]], shape: tuple[int, ...]
) -> PissaPart:
    if not isinstance(part, LoraPart) or len(began.get(prefix, {})) != 2:
        raise CheckpointError(
            f"{where}: {prefix} is no pair lora_A, lora_B with init_lora_A, init_lora_B in the init file; "
            "give both files of one training by PiSSA."
        )
    return PissaPart(part, lora_of(where, f"{prefix} (init)", began[prefix], shape))


def _declared_scaling(manifest: Path, parts: Mapping[str, Part]) -> Scaling:
    """The scale of an adapter.json. Raises CheckpointError for one that is of another adapter or layout."""
    declared = read_json(manifest)
    for field, wanted in LAYOUT.items():
        if declared.get(field) != wanted:
            raise CheckpointError(
                f"{manifest} has {field} {declared.get(field)!r}; only {wanted!r} is known."
            )
    rank, scale = declared.get("rank"), declared.get("scale")
    if not isinstance(scale, int | float) or isinstance(scale, bool) or not math.isfinite(scale):
        raise CheckpointError(f"{manifest} has no number as its scale; export the adapter again.")
    for target, part in parts.items():
        if not (isinstance(part, ShardPart) and part.scaled and part.rank == rank):
            raise CheckpointError(f"{manifest} is for MiSS of rank {rank}, but {target} is not; {WRONG}.")
    return Scaling(factor=float(scale))


def _digest(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for key in sorted(tensors):
        digest.update(f"{key}{list(tensors[key].shape)}".encode())
        digest.update(tensors[key].float().contiguous().numpy().data)
    return digest.hexdigest()
