"""Reads tuned states: what a sequence's state is before its first token, in place of zero.

A file has `blocks.N.att.time_state` `[heads, 64, 64]` for each layer, or `init_state.N.wkv`, perhaps behind
`model.`. Other keys belong to something else, such as the adapter that was trained together with the state,
and are passed over. "Full" states also have `blocks.N.att.ts_state` and `blocks.N.ffn.ts_state` `[C]`, the
token before the first one for the two token shifts. And they may have `blocks.N.att.time_offset` `[C]`, the
"post_wkv_tuning" of RWKV-LM-RLHF: at every token what the time mix reads out of the state is multiplied with
`1 + time_offset` before its group norm.

A file does not say whether its matrices are [value, key] or [key, value]: see `StateLayout`.
"""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from rwkv_batch.model.files import CheckpointError, read_tensors
from rwkv_batch.ops.torch_ops import HEAD_SIZE

StateLayout = Literal["vk", "kv"]
"""Of a head's matrix. "vk": [value, key], what RWKV-PEFT, RWKV-Runner and the CUDA kernels of RWKV-LM-RLHF
write. "kv": [key, value], what trainers on flash-linear-attention write that do not transpose, and web-rwkv's
converter."""

WKV = re.compile(r"(?:model\.)?(?:blocks\.(\d+)\.att\.time_state|init_state\.(\d+)\.wkv)$")
SHIFT = re.compile(r"(?:model\.)?blocks\.(\d+)\.(att|ffn)\.ts_state$")
OFFSET = re.compile(r"(?:model\.)?blocks\.(\d+)\.att\.time_offset$")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_BYTES = 512 << 20  # more than any model's state takes


@dataclass(frozen=True)
class StartState:
    """wkv `[layers, heads, 64 (value), 64 (key)]`, shift `[layers, 2 (time mix, channel mix), C]`; fp32.

    offsets `[layers, C]`: see `time_offset` above; None: nothing is scaled.
    """

    wkv: Tensor
    shift: Tensor
    offsets: Tensor | None = None

    @property
    def digest(self) -> bytes:
        """16 bytes that follow from the numbers."""
        hashed = hashlib.blake2b(digest_size=16)
        for tensor in (self.wkv, self.shift, *([] if self.offsets is None else [self.offsets])):
            hashed.update(tensor.contiguous().numpy().data)
        return hashed.digest()


def read_start_state(file: Path, layers: int, width: int, layout: StateLayout) -> StartState:
    """A state for a model of this shape. Raises CheckpointError."""
    _check_size(file)
    tensors = read_tensors(file)
    wkv = _by_layer(file, tensors, layers, (width // HEAD_SIZE, HEAD_SIZE, HEAD_SIZE))
    if layout == "kv":
        wkv = wkv.mT.contiguous()
    shift = torch.zeros(layers, 2, width)
    offsets = torch.zeros(layers, width)
    for key, tensor in tensors.items():
        if match := SHIFT.match(key) or OFFSET.match(key):
            if int(match[1]) >= layers or tensor.numel() != width:
                raise CheckpointError(
                    f"{file}: {key} has shape {list(tensor.shape)}, which does not fit a model of {layers} "
                    f"layers and width {width}; give a state of this model."
                )
            target = offsets if match.re is OFFSET else shift[:, int(match[2] == "ffn")]
            target[int(match[1])] = _finite(file, key, tensor).flatten()
    return StartState(wkv, shift, offsets if offsets.any() else None)


def _check_size(file: Path) -> None:
    try:
        size = file.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({error.strerror}); check the path.") from error
    if size > MAX_BYTES:
        raise CheckpointError(
            f"{file} has {size >> 20} MiB, and a state at most {MAX_BYTES >> 20}; give a file of a tuned "
            "state."
        )


def _by_layer(file: Path, tensors: dict[str, Tensor], layers: int, shape: tuple[int, ...]) -> Tensor:
    found: dict[int, Tensor] = {}
    for key, tensor in tensors.items():
        if (match := WKV.match(key)) is None:
            continue
        layer = int(match[1] or match[2])
        if layer in found:
            raise CheckpointError(f"{file} has two states of layer {layer}; give one.")
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"{file}: {key} has shape {list(tensor.shape)} where the model has {list(shape)}; give a "
                "state of this model."
            )
        found[layer] = _finite(file, key, tensor)
    if not found:
        raise CheckpointError(f"{file} has no tensor blocks.N.att.time_state; give a file of a tuned state.")
    if sorted(found) != list(range(layers)):
        raise CheckpointError(
            f"{file} has states of the layers {_ranges(sorted(found))}, and the model has {layers}; give a "
            "state of this model."
        )
    return torch.stack([found[layer] for layer in range(layers)])


def _finite(file: Path, key: str, tensor: Tensor) -> Tensor:
    """In fp32."""
    if tensor.dtype not in DTYPES:
        kind = str(tensor.dtype).removeprefix("torch.")
        raise CheckpointError(f"{file}: {key} is stored as {kind}; give it in bf16, fp16 or fp32.")
    if not tensor.isfinite().all():
        raise CheckpointError(f"{file}: {key} holds numbers that are not finite; give another file.")
    return tensor.float()


def _ranges(numbers: list[int]) -> str:
    return f"{numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else str(numbers[0])
