"""Packs the matrices of a checkpoint, one after the other."""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from rwkv_batch.model.checkpoint import Checkpoint, Progress
from rwkv_batch.model.files import CheckpointError
from rwkv_batch.model.quantization.matrices import HEAD, formats_of, is_half
from rwkv_batch.ops.mapped import let_go
from rwkv_batch.ops.weights.formats import FORMATS
from rwkv_batch.ops.weights.weight import Weight

Pack = Callable[[str, str, Tensor], Weight]  # a name, its format and the matrix -> the matrix packed


class ChangedTensors(Mapping[str, Tensor]):
    """Some tensors of a checkpoint, each changed as it is read and not kept."""

    def __init__(
        self, tensors: Mapping[str, Tensor], names: list[str], change: Callable[[str, Tensor], Tensor]
    ) -> None:
        self._tensors, self._names, self._change = tensors, dict.fromkeys(names), change

    def __getitem__(self, name: str) -> Tensor:
        self._names[name]  # raises KeyError for one that is not among them
        return self._change(name, self._tensors[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def quantize(
    checkpoint: Checkpoint,
    weights: str,
    head: bool | None = None,
    progress: Progress | None = None,
    pack: Pack | None = None,
    device: torch.device | str = "cpu",
) -> Checkpoint:
    """The model with its matrices in a format, and a fingerprint of its own.

    Beside the packed matrices there is no more in memory at a time than one of them unpacked. head: as for
    `formats_of`. pack: what packs in place of `Weight.pack`; then the fingerprint is that of the result.
    device: where a matrix is packed; the result is in the host's memory in any case.
    Raises CheckpointError if the model is in another format already.
    """
    formats = formats_of(checkpoint.family, checkpoint.layers, weights, head)
    if checkpoint.weights:
        _check_same(checkpoint, weights, head)
        return checkpoint
    if is_half(weights):
        return _in_half(checkpoint, weights, formats)
    packed: dict[str, Weight] = {}
    done, total = 0, sum(_count(checkpoint, name) for name in formats)
    for name, kind in formats.items():
        given = checkpoint.tensors[name]
        matrix = given.to(device)
        packed[name] = pack(name, kind, matrix) if pack else FORMATS[kind].pack(matrix)
        let_go(given)
        done += matrix.numel()
        del matrix, given
        if progress:
            progress(done, total)
    rest = [name for name in checkpoint.tensors if name not in packed]
    if isinstance(checkpoint.tensors, dict):  # so that the others are freed where they are not mapped
        tensors: Mapping[str, Tensor] = {name: checkpoint.tensors[name] for name in rest}
    else:
        tensors = ChangedTensors(checkpoint.tensors, rest, lambda _, tensor: tensor)
    fingerprint = _fingerprint(checkpoint, weights, formats, _digest(packed) if pack else "")
    return replace(checkpoint, tensors=tensors, packed=packed, weights=weights, fingerprint=fingerprint)


def _in_half(checkpoint: Checkpoint, weights: str, formats: Mapping[str, str]) -> Checkpoint:
    """With matrices in 16 bits, which stay tensors: whoever reads one packs it for its device anyway."""
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[weights]
    if isinstance(checkpoint.tensors, dict) and all(checkpoint.tensors[n].dtype == dtype for n in formats):
        return replace(checkpoint, weights=weights)  # it is in that format, so sessions go on

    def rounded(name: str, tensor: Tensor) -> Tensor:
        if name not in formats:
            return tensor
        values = FORMATS[weights].pack(tensor).parts["values"]
        let_go(tensor)
        return values

    tensors = ChangedTensors(checkpoint.tensors, list(checkpoint.tensors), rounded)
    fingerprint = _fingerprint(checkpoint, weights, formats, "")
    return replace(checkpoint, tensors=tensors, weights=weights, fingerprint=fingerprint)


def _check_same(checkpoint: Checkpoint, weights: str, head: bool | None) -> None:
    if checkpoint.weights != weights:
        raise CheckpointError(
            f"{checkpoint.name} is in {checkpoint.weights} already, not in {weights}; leave --weights "
            "out, or give the model that it was made from."
        )
    if head is not None and not is_half(weights) and head != (HEAD in checkpoint.packed):
        raise CheckpointError(
            f"{checkpoint.name} has been written {'without' if head else 'with'} a quantized head; leave "
            "--quantize-head out, or write it again."
        )


def _digest(packed: Mapping[str, Weight]) -> str:
    """Of all that is packed."""
    digest = hashlib.sha256()
    for part in (part for weight in packed.values() for part in weight.parts.values()):
        digest.update(part.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _count(checkpoint: Checkpoint, name: str) -> int:
    rows, columns = checkpoint.shape_of(name) or (0, 0)
    return rows * columns


def _fingerprint(checkpoint: Checkpoint, weights: str, formats: Mapping[str, str], digest: str) -> str:
    identity = f"{checkpoint.fingerprint} {weights} head {formats.get(HEAD)} {digest}"
    return hashlib.sha256(identity.encode()).hexdigest()[:16]
