"""Reads RWKV-7 checkpoints, `.pth` or `.safetensors`, and refuses in one sentence what cannot be run."""

import difflib
import hashlib
import pickle
import re
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rwkv_batch.model.description import shapes
from rwkv_batch.ops.torch_ops import HEAD_SIZE

SUFFIXES = (".pth", ".safetensors")
AGAIN = "the file is damaged or of another model: download it again"
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
SAMPLES = 8  # numbers of each tensor that go into the fingerprint
# Layer 0 sets the values that the other layers mix in.
IGNORED = frozenset({"blocks.0.att.v0", "blocks.0.att.v1", "blocks.0.att.v2"})
FOREIGN = (  # a pattern in the tensor names, and what such a file is
    (r"(^|\.)(s_emb|s_emb_x)\.", "RWKV-7a (DeepEmbed)"),
    (r"\.qkv\.", "RWKV-7b"),
    (r"\.enn\.|^enn\.", "RWKV-8"),
    (r"\.time_maa|\.time_decay_w1", "RWKV-6"),
    (r"\.time_mix_|\.time_decay$|\.time_first$|\.time_faaaa$", "RWKV-4, 5 or 6"),
    (r"\.lora_[AB]|\.bone_expert|\.router\.", "an adapter"),
    (r"\.time_state$|^init_state\.", "a tuned state"),
    (r"^model\.|_proj\.|_lora\.lora\.", "in the Hugging Face layout"),
)

Progress = Callable[[int, int], None]


class CheckpointError(Exception):
    """A checkpoint that cannot be used; one sentence names the file, what is wrong in it and the way out."""


@dataclass(frozen=True)
class Checkpoint:
    """Checked weights of one model, by their official names.

    Vectors (`x_*`, `w0`, `k_k`, ...) are flat; layer 0 has no `v0`, `v1`, `v2`.

    fingerprint: 16 hex digits from names, shapes and a sample of the values, the same for `.pth`,
    `.safetensors` and wider dtypes.
    """

    name: str
    tensors: dict[str, Tensor]
    layers: int
    width: int
    heads: int
    vocab: int
    parameters: int
    fingerprint: str


def load(path: str | Path, progress: Progress | None = None) -> Checkpoint:
    """Read and check the file, whose suffix may be left out. Raises CheckpointError.

    `progress(done_bytes, total_bytes)` is called as the data comes in. The tensors are mapped from the file,
    not copied. Nothing in the file can run code.
    """
    file = _find(Path(path).expanduser())
    tensors = _read_safetensors(file) if file.suffix == ".safetensors" else _read_pth(file)
    return from_tensors(file.stem, tensors, str(file), progress)


def from_tensors(
    name: str, given: Mapping[str, Tensor], where: str | None = None, progress: Progress | None = None
) -> Checkpoint:
    """Check tensors that are in memory already. Raises CheckpointError, which names `where` or `name`."""
    where = where or name
    tensors = {key: value for key, value in given.items() if key not in IGNORED}
    _refuse_foreign(where, tensors)
    layers = _layer_count(where, tensors)
    vocab, width = _matrix(where, tensors, "emb.weight")
    heads, head_size = _matrix(where, tensors, "blocks.0.att.r_k")
    if head_size != HEAD_SIZE:
        raise CheckpointError(
            f"{where}: blocks.0.att.r_k has heads of {head_size}; only models with heads of {HEAD_SIZE} can "
            "be run."
        )
    if heads * HEAD_SIZE != width:
        raise CheckpointError(
            f"{where}: emb.weight has width {width}, but blocks.0.att.r_k has {heads} heads of {HEAD_SIZE}; "
            f"{AGAIN}."
        )
    wanted = shapes(layers, width, vocab, lambda key: _matrix(where, tensors, key)[1])
    for key in sorted(tensors.keys() - wanted.keys()):
        raise CheckpointError(f"{where}: {key} is no tensor of RWKV-7; give a plain RWKV-7 checkpoint.")
    tensors = {key: _fitted(where, key, tensors, shape) for key, shape in wanted.items()}
    _check_values(where, tensors, progress)
    return Checkpoint(
        name,
        tensors,
        layers,
        width,
        heads,
        vocab,
        sum(t.numel() for t in tensors.values()),
        _fingerprint(tensors),
    )


def _find(path: Path) -> Path:
    for file in (path, *(path.with_name(path.name + suffix) for suffix in SUFFIXES)):
        if file.is_file():
            return file
    if path.is_dir():
        inside = sorted(f.name for f in path.iterdir() if f.suffix in SUFFIXES)
        raise CheckpointError(f"{path} is a directory; name the checkpoint file in it{_one_of(inside)}.")
    if not path.parent.is_dir():
        raise CheckpointError(
            f"There is no checkpoint {path}, nor a directory {path.parent}; check the path."
        )
    beside = {f.stem: f.name for f in path.parent.iterdir() if f.suffix in SUFFIXES}
    near = [
        beside[stem]
        for stem in difflib.get_close_matches(
            path.name.removesuffix(".pth").removesuffix(".safetensors"), beside, n=3
        )
    ]
    raise CheckpointError(
        f"There is no checkpoint {path} (with or without .pth or .safetensors); check the "
        f"path{_one_of(near)}."
    )


def _one_of(names: list[str]) -> str:
    return f", perhaps {' or '.join(names[:3])}" if names else ""


def _read_pth(file: Path) -> Mapping[str, Tensor]:
    if not zipfile.is_zipfile(file):
        with file.open("rb") as stream:
            cut = stream.read(2) == b"PK"
        raise CheckpointError(
            f"{file} is cut short; download it again."
            if cut
            else f"{file} is no file of torch.save (a zip archive); give a .pth or .safetensors checkpoint."
        )
    try:
        tensors: Any = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{file} holds Python objects that could run code, not only tensors; "
            "give a checkpoint that is a plain dictionary of tensors."
        ) from error
    except (RuntimeError, OSError, ValueError, EOFError, KeyError) as error:
        raise CheckpointError(f"{file} cannot be read ({_first_line(error)}); download it again.") from error
    if not isinstance(tensors, dict) or not all(
        isinstance(k, str) and isinstance(v, Tensor) for k, v in tensors.items()
    ):
        raise CheckpointError(
            f"{file} is not a plain dictionary of named tensors; give the model's weights without trainer "
            "state."
        )
    return tensors


def _read_safetensors(file: Path) -> Mapping[str, Tensor]:
    try:
        with safe_open(file, framework="pt", device="cpu") as archive:
            return {name: archive.get_tensor(name) for name in archive.keys()}  # noqa: SIM118 (the archive is no mapping)
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read ({_first_line(error)}); download it again.") from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")


def _refuse_foreign(where: str, tensors: Mapping[str, Tensor]) -> None:
    for pattern, kind in FOREIGN:
        for key in tensors:
            if re.search(pattern, key):
                raise CheckpointError(
                    f"{where} is {kind} ({key}); this server runs plain RWKV-7 checkpoints in the official "
                    "layout."
                )


def _layer_count(where: str, tensors: Mapping[str, Tensor]) -> int:
    found = [int(match[1]) for match in (re.match(r"blocks\.(\d+)\.", key) for key in tensors) if match]
    if not found:
        raise CheckpointError(
            f"{where} has no tensors blocks.0.*; give an RWKV-7 checkpoint in the official layout."
        )
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
    done, total = 0, sum(tensor.nbytes for tensor in tensors.values())
    for key, tensor in tensors.items():
        # A sum meets every infinity and NaN at a fraction of the cost; only a strange one asks for the exact
        # look.
        if not tensor.sum(dtype=torch.float32).isfinite() and not tensor.isfinite().all():
            raise CheckpointError(f"{where}: {key} holds numbers that are not finite; {AGAIN}.")
        done += tensor.nbytes
        if progress is not None:
            progress(done, total)


def _fingerprint(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for key in sorted(tensors):
        flat = tensors[key].reshape(-1)
        sample = flat[:: max(1, flat.numel() // SAMPLES)].float()
        digest.update(f"{key}{list(tensors[key].shape)}".encode() + sample.numpy().tobytes())
    return digest.hexdigest()[:16]
