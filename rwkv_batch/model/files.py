"""Reads the tensors of a model file or folder, by the names in it. Nothing in a file can run code."""

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from rwkv_batch.model.containers.recognize import Container, Unreadable, cannot_be_read, recognize
from rwkv_batch.model.containers.safetensors_file import read_safetensors, read_safetensors_metadata
from rwkv_batch.model.containers.torch_file import read_torch_file

WEB_RWKV = ".st"
SUFFIXES = (".pth", ".safetensors", WEB_RWKV)
FOLDER_FILES = ("model.safetensors", "pytorch_model.bin")  # of Hugging Face: whole, or with an index of parts
INDEX = ".index.json"
CONFIG = "config.json"


class CheckpointError(Exception):
    """A checkpoint that cannot be used; one sentence names the file, what is wrong in it and the way out."""


@dataclass(frozen=True)
class ModelFile:
    """What is in a file or folder."""

    path: Path
    tensors: dict[str, Tensor]  # mapped from the file, not copied
    config: Mapping[str, Any]  # of a Hugging Face folder; otherwise empty
    metadata: Mapping[str, str] = field(default_factory=dict)  # of a single .safetensors or .st file

    @property
    def name(self) -> str:
        """Of the model: a folder may have a dot in its name."""
        return self.path.name if self.path.is_dir() else self.path.stem


def read(path: Path) -> ModelFile:
    """A file, whose suffix may be left out, or a Hugging Face folder. Raises CheckpointError."""
    found = find(path)
    if found.is_dir():
        return ModelFile(found, _read_folder(found), _read_config(found))
    # A part of a Hugging Face folder that is not cut into parts can be given too.
    config = _read_config(found.parent) if found.name in FOLDER_FILES else {}
    if (
        found.suffix == WEB_RWKV and _container(found) != "safetensors"
    ):  # the suffix says which are transposed
        raise CheckpointError(f"{found} is a file of torch.save, and {WEB_RWKV} is web-rwkv's; name it .pth.")
    tensors = read_tensors(found)
    return ModelFile(found, tensors, config, read_metadata(found))


def read_tensors(file: Path) -> dict[str, Tensor]:
    """The tensors of one file with any suffix. Raises CheckpointError."""
    container = _container(file)
    try:
        if container == "safetensors":
            return read_safetensors(file)
        return read_torch_file(file, old=container == "old torch")
    except Unreadable as error:
        raise CheckpointError(f"{file} {error}.") from error


def read_metadata(file: Path) -> dict[str, str]:
    """What the header of a .safetensors or .st file says beside its tensors. Raises CheckpointError."""
    if _container(file) != "safetensors":
        return {}
    try:
        return read_safetensors_metadata(file)
    except Unreadable as error:
        raise CheckpointError(f"{file} {error}.") from error


def _container(file: Path) -> Container:
    """Raises CheckpointError."""
    try:
        return recognize(file)
    except Unreadable as error:
        raise CheckpointError(f"{file} {error}.") from error


def find(path: Path) -> Path:
    """The file or folder that a path means. Raises CheckpointError if there is none."""
    try:
        return _find(path)
    except (OSError, ValueError) as error:  # a name that is too long or holds a null, a folder without rights
        why = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"{str(path)[:200]} cannot be looked for ({why}); check the path.") from error


def _find(path: Path) -> Path:
    for file in (path, *(path.with_name(path.name + suffix) for suffix in SUFFIXES)):
        if file.is_file():
            return file
    if path.is_dir():
        if any((path / (name + end)).is_file() for name in FOLDER_FILES for end in ("", INDEX)):
            return path
        inside = sorted(f.name for f in path.iterdir() if f.suffix in SUFFIXES)
        raise CheckpointError(f"{path} is a directory; name the checkpoint file in it{_one_of(inside)}.")
    if not path.parent.is_dir():
        raise CheckpointError(
            f"There is no checkpoint {path}, nor a directory {path.parent}; check the path."
        )
    beside = {f.stem: f.name for f in path.parent.iterdir() if f.suffix in SUFFIXES}
    stem = path.name
    for suffix in SUFFIXES:
        stem = stem.removesuffix(suffix)
    near = [beside[match] for match in difflib.get_close_matches(stem, beside, n=3)]
    raise CheckpointError(
        f"There is no checkpoint {path} (with or without {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}); "
        f"check the path{_one_of(near)}."
    )


def _one_of(names: list[str]) -> str:
    return f", perhaps {' or '.join(names[:3])}" if names else ""


def _read_folder(folder: Path) -> dict[str, Tensor]:
    for name in FOLDER_FILES:
        if (folder / (name + INDEX)).is_file():
            return _read_parts(folder, folder / (name + INDEX))
    return next(read_tensors(folder / name) for name in FOLDER_FILES if (folder / name).is_file())


def _read_parts(folder: Path, index: Path) -> dict[str, Tensor]:
    """The tensors that the index names, each from the file that it names."""
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise CheckpointError(f"{index} has no weight_map of file names; download it again.")
    tensors: dict[str, Tensor] = {}
    for file in sorted(set(places.values())):
        part = folder / file
        if part.parent != folder:
            raise CheckpointError(f"{index} names {file}, which is outside of the folder; download it again.")
        if not part.is_file():
            raise CheckpointError(f"{part} is missing, which {index.name} names; download it again.")
        inside = read_tensors(part)
        wanted = [key for key, place in places.items() if place == file]
        for key in wanted:
            if key not in inside:
                raise CheckpointError(f"{part}: {key} is missing, which {index.name} names; download both.")
        tensors |= {key: inside[key] for key in wanted}
    return tensors


def _read_config(folder: Path) -> Mapping[str, Any]:
    file = folder / CONFIG
    return read_json(file) if file.is_file() else {}


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises CheckpointError."""
    try:
        found = json.loads(file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise CheckpointError(f"{file} {cannot_be_read(error)}.") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is no JSON text in UTF-8; download it again.") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{file} is no JSON object; download it again.")
    return found
