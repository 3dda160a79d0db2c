"""Files of packed matrices: .safetensors whose metadata says the format, and what it was made from.

The parts of a matrix `NAME.weight` are the tensors `NAME.weight.PART`; all others are as in the checkpoint.
The metadata `rwkv_batch` is a JSON object: see `PackedHeader`. Tensors are mapped, so a model is there as
soon as it has been read once, for its checksums.
"""

import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import msgspec
import torch
from safetensors.torch import save_file
from torch import Tensor

from rwkv_batch.model.checkpoint import Checkpoint, Progress, from_file, from_tensors
from rwkv_batch.model.files import CheckpointError, ModelFile, find, read, read_metadata
from rwkv_batch.model.quantization.matrices import HEAD, formats_of
from rwkv_batch.ops.mapped import let_go
from rwkv_batch.ops.weights.formats import FORMATS
from rwkv_batch.ops.weights.weight import Weight

KEY = "rwkv_batch"
VERSION = 1
ALIGNED = 64  # bytes: a cache line, so that products can read matrices where they are mapped
AGAIN = "write it again with python -m rwkv_batch.quantize"


@dataclass(frozen=True)
class PackedHeader:
    """What the metadata says.

    matrices: the format and shape of each that is packed. checksums: CRC-32 of the bytes of every tensor.
    """

    version: int
    weights: str
    source: str  # the fingerprint of the model that it was made from
    fingerprint: str  # of this one, the same as of that model quantized as it is loaded
    normed: bool  # as in `from_tensors`
    matrices: dict[str, tuple[str, int, int]]
    checksums: dict[str, int]


def load(path: str | Path, progress: Progress | None = None, values: bool = True) -> Checkpoint:
    """Read and check a checkpoint as `checkpoint.load` does, also one of packed matrices."""
    file = read(Path(path).expanduser())
    return _checkpoint_of(file, progress) if KEY in file.metadata else from_file(file, progress, values)


def format_of(path: str | Path) -> str:
    """The format that a file of packed matrices is in; of any other "". Raises CheckpointError."""
    file = find(Path(path).expanduser())
    metadata = {} if file.is_dir() else read_metadata(file)
    return _header(file, metadata[KEY]).weights if KEY in metadata else ""


def write(checkpoint: Checkpoint, source: str, file: Path) -> None:
    """A model from `quantize` as a file. source: the fingerprint of what it was made from.

    Raises CheckpointError if the file cannot be written.
    """
    if checkpoint.mole:
        raise CheckpointError(
            f"{checkpoint.name} has experts, which no file holds; merge them when it is loaded."
        )
    tensors = {name: tensor.contiguous() for name, tensor in checkpoint.tensors.items()}
    for name, weight in checkpoint.packed.items():
        tensors |= {f"{name}.{part}": tensor for part, tensor in weight.parts.items()}
    header = PackedHeader(
        version=VERSION,
        weights=checkpoint.weights,
        source=source,
        fingerprint=checkpoint.fingerprint,
        normed="blocks.0.ln0.weight" not in tensors,
        matrices={name: (weight.format, *weight.shape) for name, weight in checkpoint.packed.items()},
        checksums={name: _checksum(tensor) for name, tensor in tensors.items()},
    )
    partial = file.with_name(file.name + ".partial")  # so that nobody takes half a file for a whole one
    try:
        text = json.dumps(asdict(header))
        partial.unlink(missing_ok=True)  # of a run that was killed
        partial.touch()
        mode = partial.stat().st_mode  # as the user's other files; safetensors makes one for its owner alone
        save_file(tensors, partial, {KEY: text})
        if missing := -_first_byte(partial) % ALIGNED:  # which nobody knows before it is written
            save_file(tensors, partial, {KEY: text + " " * missing})
        partial.chmod(mode)
        os.replace(partial, file)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise CheckpointError(f"{file} cannot be written ({error.strerror}).") from error


def _first_byte(file: Path) -> int:
    """Where the tensors of a .safetensors file begin."""
    with file.open("rb") as stream:
        return 8 + int.from_bytes(stream.read(8), "little")


def _checkpoint_of(file: ModelFile, progress: Progress | None) -> Checkpoint:
    header = _header(file.path, file.metadata[KEY])
    _check_sums(file, header, progress)
    tensors, packed = dict(file.tensors), {}
    for name, (kind, outputs, inputs) in header.matrices.items():
        prefix = f"{name}."
        parts = {key.removeprefix(prefix): tensors.pop(key) for key in file.tensors if key.startswith(prefix)}
        packed[name] = _weight(file.path, name, kind, (outputs, inputs), parts)
        tensors[name] = torch.empty(outputs, inputs, dtype=torch.bfloat16, device="meta")
    found = from_tensors(file.name, tensors, str(file.path), normed=header.normed)
    allowed = formats_of(found.family, found.layers, header.weights, head=True)
    for name in sorted(packed.keys() - allowed.keys()):
        raise CheckpointError(f"{file.path}: {name} is packed, which is never done here; {AGAIN}.")
    for name in sorted(allowed.keys() - {HEAD} - packed.keys() if packed else []):
        raise CheckpointError(f"{file.path}: {name} is not packed as the others are; {AGAIN}.")
    rest = {name: tensor for name, tensor in found.tensors.items() if name not in packed}
    return replace(found, tensors=rest, packed=packed, weights=header.weights, fingerprint=header.fingerprint)


def _header(file: Path, text: str) -> PackedHeader:
    try:
        version = msgspec.json.decode(text)["version"]
        if version != VERSION:
            raise CheckpointError(
                f"{file} is of version {version}, and this server knows {VERSION}; {AGAIN}."
            )
        header = msgspec.json.decode(text, type=PackedHeader)
    except (msgspec.MsgspecError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{file} has metadata that is not understood; {AGAIN}.") from error
    for kind in (header.weights, *(kind for kind, _, _ in header.matrices.values())):
        if kind not in FORMATS:
            raise CheckpointError(
                f"{file} is in the format {kind}, and known are {', '.join(FORMATS)}; {AGAIN}."
            )
    return header


def _check_sums(file: ModelFile, header: PackedHeader, progress: Progress | None) -> None:
    """Raises CheckpointError if a tensor has changed since the file was written, is missing or was added."""
    done, total = 0, sum(tensor.nbytes for tensor in file.tensors.values())
    for name in sorted(header.checksums.keys() ^ file.tensors.keys()):
        wrong = "is missing" if name in header.checksums else "has been added"
        raise CheckpointError(f"{file.path}: {name} {wrong}; {AGAIN}.")
    for name, tensor in file.tensors.items():
        if _checksum(tensor) != header.checksums[name]:
            raise CheckpointError(f"{file.path} is damaged ({name} has another checksum); {AGAIN}.")
        let_go(tensor)
        done += tensor.nbytes
        if progress:
            progress(done, total)


def _weight(file: Path, name: str, kind: str, shape: tuple[int, int], parts: Mapping[str, Tensor]) -> Weight:
    try:
        return FORMATS[kind](shape, parts)
    except ValueError as error:
        raise CheckpointError(f"{file}: {name} {error}; {AGAIN}.") from error


def _checksum(tensor: Tensor) -> int:
    return zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data)
