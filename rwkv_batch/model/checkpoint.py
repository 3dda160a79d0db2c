"""Checked weights of a model, of any family that can be run; one sentence for what cannot."""

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from rwkv_batch.model.files import CheckpointError, ModelFile, read
from rwkv_batch.model.names import official
from rwkv_batch.model.tensors.description import shapes
from rwkv_batch.model.tensors.rwkv6_description import rwkv6_shapes
from rwkv_batch.ops.mapped import let_go
from rwkv_batch.ops.mole import Mole
from rwkv_batch.ops.torch_ops import HEAD_SIZE
from rwkv_batch.ops.weights.weight import Weight

AGAIN = "the file is damaged or of another model: download it again"
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
ROWS_AT_ONCE = 1024  # of a tensor that is checked: torch makes a copy of them in 32 bits
SAMPLES = 8  # numbers of each tensor that go into the fingerprint
# Layer 0 sets the values that the other layers mix in.
IGNORED = frozenset({"blocks.0.att.v0", "blocks.0.att.v1", "blocks.0.att.v2"})
FOREIGN = (  # a pattern in the tensor names, and what such a file is
    (r"\.qkv\.", "RWKV-7b"),
    (r"\.enn\.|^enn\.", "RWKV-8"),
    (r"\.time_mix_|\.time_first$", "RWKV-4 or 5"),
    (r"\.lora_[AB]|\.bone|\.disha|\.weight\.D$|\.router\.", "an adapter, for --adapter"),
    (r"^init_state\.", "a tuned state"),
    (r"^base_model\.|self_attn|\.attention\.", "of another family than RWKV"),
)
WITHOUT_WEIGHTS = (r"\.time_state$", "a tuned state")  # unless it is merged into a checkpoint
HEADS = {"rwkv7": "r_k", "rwkv7a": "r_k", "rwkv6": "time_faaaa"}  # the tensor [heads, 64] of a layer

Family = Literal["rwkv7", "rwkv7a", "rwkv6"]
TITLES: dict[Family, str] = {"rwkv7": "RWKV-7", "rwkv7a": "RWKV-7a", "rwkv6": "RWKV-6"}
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Checkpoint:
    """Checked weights of one model, by their official names.

    Vectors (`x_*`, `w0`, `k_k`, ...) are flat; layer 0 has no `v0`, `v1`, `v2`. There is no `ln0` where it
    has been applied to the embedding. `att.time_state` `[heads, 64 (value), 64 (key)]`, if there, is the
    state before the first token.

    family: "rwkv7a" is RWKV-7 with DeepEmbed.
    fingerprint: 16 hex digits from names, shapes and a sample of the values, the same for `.pth`,
    `.safetensors` and wider dtypes.
    """

    name: str
    family: Family
    tensors: Mapping[str, Tensor]
    layers: int
    width: int
    heads: int
    vocab: int
    parameters: int
    fingerprint: str
    mole: Mole | None = None  # experts of an adapter
    weights: str = ""  # the format of its matrices; "": as in the file
    packed: Mapping[str, Weight] = field(default_factory=dict)  # these matrices are here, not in `tensors`

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """Of a tensor, packed or not; None: there is none of that name."""
        found = self.packed.get(name, self.tensors.get(name))
        return None if found is None else tuple(found.shape)

    def bytes_held(self, itemsize: int) -> int:
        """What its weights take where those that are not packed take `itemsize` bytes each."""
        packed = self.packed.values()
        return sum(w.nbytes - w.numel() * itemsize for w in packed) + self.parameters * itemsize

    def without_numbers(self) -> "Checkpoint":
        """Names, shapes and formats of its tensors, on the meta device: what is known of a model that runs.

        The state before the first token stays, and so do tensors that are made as they are read.
        """
        if not isinstance(self.tensors, dict):
            return self
        tensors = {
            name: tensor if name.endswith(".att.time_state") else tensor.to("meta")
            for name, tensor in self.tensors.items()
        }
        packed = {name: weight.on_meta() for name, weight in self.packed.items()}
        return replace(self, tensors=tensors, packed=packed)

    @property
    def has_numbers(self) -> bool:
        """Whether it is more than `without_numbers` leaves of it."""
        known = isinstance(self.tensors, dict)
        return not (known and any(tensor.is_meta for tensor in self.tensors.values()))

    def start_state(self) -> Tensor | None:
        """The wkv `[layers, heads, 64 (value), 64 (key)]` fp32 before the first token; None: zero."""
        if "blocks.0.att.time_state" not in self.tensors:
            return None
        states = [self.tensors[f"blocks.{layer}.att.time_state"] for layer in range(self.layers)]
        return torch.stack(states).float()


def load(path: str | Path, progress: Progress | None = None, values: bool = True) -> Checkpoint:
    """Read and check a file, whose suffix may be left out, or a Hugging Face folder. Raises CheckpointError.

    `progress(done_bytes, total_bytes)` is called as the data comes in. The tensors are mapped from the file,
    not copied. values: whether the numbers are read and checked; otherwise who reads them does it.
    """
    return from_file(read(Path(path).expanduser()), progress, values)


def from_file(file: ModelFile, progress: Progress | None = None, values: bool = True) -> Checkpoint:
    """Check what has been read, as `load` does."""
    tensors, normed = official(file)
    return from_tensors(file.name, tensors, str(file.path), progress, normed, values)


def from_tensors(
    name: str,
    given: Mapping[str, Tensor],
    where: str | None = None,
    progress: Progress | None = None,
    normed: bool = False,
    values: bool = True,
) -> Checkpoint:
    """Check tensors that are in memory already. Raises CheckpointError, which names `where` or `name`.

    Of a tensor on the meta device only the shape is checked. normed: ln0 has been applied to the embedding,
    and is missing. values: as of `load`.
    """
    where = where or name
    tensors = {key: value for key, value in given.items() if key not in IGNORED}
    family = _family(where, tensors)
    layers = _layer_count(where, tensors)
    vocab, width = _matrix(where, tensors, "emb.weight")
    heads_key = f"blocks.0.att.{HEADS[family]}"
    heads, head_size = _matrix(where, tensors, heads_key)
    if head_size != HEAD_SIZE:
        raise CheckpointError(
            f"{where}: {heads_key} has heads of {head_size}; only models with heads of {HEAD_SIZE} can be "
            "run."
        )
    if heads * HEAD_SIZE != width:
        raise CheckpointError(
            f"{where}: emb.weight has width {width}, but {heads_key} has {heads} heads of {HEAD_SIZE}; "
            f"{AGAIN}."
        )
    if family == "rwkv6":
        wanted = rwkv6_shapes(layers, width, vocab, lambda key, dim: _size(where, tensors, key, dim))
    else:
        wanted = shapes(layers, width, vocab, lambda key: _matrix(where, tensors, key)[1], family == "rwkv7a")
    if normed:
        wanted = {key: shape for key, shape in wanted.items() if not key.startswith("blocks.0.ln0.")}
    if any(key.endswith(".att.time_state") for key in tensors):
        state = (heads, HEAD_SIZE, HEAD_SIZE)
        wanted |= {f"blocks.{layer}.att.time_state": state for layer in range(layers)}
    for key in sorted(tensors.keys() - wanted.keys()):
        raise CheckpointError(
            f"{where}: {key} is no tensor of {TITLES[family]}; give a checkpoint without additions."
        )
    tensors = {key: _fitted(where, key, tensors, shape) for key, shape in wanted.items()}
    if values:
        _check_values(where, tensors, progress)
    parameters = sum(t.numel() for t in tensors.values())
    return Checkpoint(name, family, tensors, layers, width, heads, vocab, parameters, _fingerprint(tensors))


def _family(where: str, tensors: Mapping[str, Tensor]) -> Family:
    """The family of a checkpoint. Raises CheckpointError for what is none of these, by its name."""
    foreign = FOREIGN if "emb.weight" in tensors else (*FOREIGN, WITHOUT_WEIGHTS)
    for pattern, kind in foreign:
        for key in tensors:
            if re.search(pattern, key):
                raise CheckpointError(
                    f"{where} is {kind} ({key}); this server runs checkpoints of RWKV-7, 7a and 6."
                )
    if any(".att.time_maa_" in key for key in tensors):
        return "rwkv6"
    for key in tensors:
        if re.search(r"\.att\.time_(decay|faaaa)$", key):
            raise CheckpointError(
                f"{where} is RWKV-4 or 5 ({key}); this server runs checkpoints of RWKV-7, 7a and 6."
            )
    return "rwkv7a" if any(".ffn.s_emb" in key for key in tensors) else "rwkv7"


def _layer_count(where: str, tensors: Mapping[str, Tensor]) -> int:
    found = [int(match[1]) for match in (re.match(r"blocks\.(\d+)\.", key) for key in tensors) if match]
    if not found:
        raise CheckpointError(f"{where} has no tensors blocks.0.*; give an RWKV checkpoint.")
    layers = len(set(found))
    if max(found) >= layers:  # also keeps one absurd number from asking for a billion layers
        raise CheckpointError(
            f"{where}: blocks.{max(found)} is there, but only {layers} layers in all; {AGAIN}."
        )
    return layers


def _matrix(where: str, tensors: Mapping[str, Tensor], key: str) -> tuple[int, int]:
    if key not in tensors:
        raise CheckpointError(f"{where}: {key} is missing; {AGAIN}.")
    if tensors[key].dim() != 2 or not tensors[key].numel():
        raise CheckpointError(
            f"{where}: {key} has shape {list(tensors[key].shape)} in place of two dimensions; {AGAIN}."
        )
    rows, columns = tensors[key].shape
    return rows, columns


def _size(where: str, tensors: Mapping[str, Tensor], key: str, dimension: int) -> int:
    if key not in tensors:
        raise CheckpointError(f"{where}: {key} is missing; {AGAIN}.")
    shape = list(tensors[key].shape)
    if len(shape) <= dimension or not tensors[key].numel():
        raise CheckpointError(f"{where}: {key} has shape {shape}, which has too few dimensions; {AGAIN}.")
    return shape[dimension]


def _fitted(where: str, key: str, tensors: Mapping[str, Tensor], shape: tuple[int, ...]) -> Tensor:
    """The tensor in the wanted shape; vectors come as `[1, 1, width]` or `[width]`."""
    tensor = tensors.get(key)
    if tensor is None:
        raise CheckpointError(f"{where}: {key} is missing; {AGAIN}.")
    if tensor.dtype not in DTYPES:
        kind = str(tensor.dtype).removeprefix("torch.")
        raise CheckpointError(f"{where}: {key} is stored as {kind}; give the weights in bf16, fp16 or fp32.")
    plain = tensor.squeeze() if len(shape) == 1 else tensor
    if tuple(plain.shape) != shape:
        raise CheckpointError(
            f"{where}: {key} has shape {list(tensor.shape)} in place of {list(shape)}; {AGAIN}."
        )
    return plain


def _check_values(where: str, tensors: Mapping[str, Tensor], progress: Progress | None) -> None:
    """Raises CheckpointError if a number is not finite.

    Reading them all is what loading from a disk takes, so this is where progress is reported.
    """
    there = {key: tensor for key, tensor in tensors.items() if not tensor.is_meta}
    done, total = 0, sum(tensor.nbytes for tensor in there.values())
    for key, tensor in there.items():
        for rows in tensor.split(ROWS_AT_ONCE):
            # A sum meets every infinity and NaN at a fraction of the cost; only a strange one asks for the
            # exact look.
            if not rows.sum(dtype=torch.float32).isfinite() and not rows.isfinite().all():
                raise CheckpointError(not_finite(where, key))
        let_go(tensor)
        done += tensor.nbytes
        if progress is not None:
            progress(done, total)


def not_finite(where: str, key: str) -> str:
    """What is wrong with a tensor, in one sentence."""
    return f"{where}: {key} holds numbers that are not finite; {AGAIN}."


def _fingerprint(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for key in sorted(key for key in tensors if not tensors[key].is_meta):
        flat = tensors[key].reshape(-1)
        sample = flat[:: max(1, flat.numel() // SAMPLES)].float()
        digest.update(f"{key}{list(tensors[key].shape)}".encode() + sample.numpy().tobytes())
        let_go(tensors[key])
    return digest.hexdigest()[:16]
