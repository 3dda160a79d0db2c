"""Files of torch.save, of every version. Nothing in one can run code."""

import contextlib
import os
import pickle
import pickletools
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rwkv_batch.model.containers.recognize import (
    AGAIN,
    GIVE,
    UNPACK,
    Unreadable,
    cannot_be_read,
    check_bytes,
)

READ_PROTOCOLS = (2, 3)  # of pickle, where nothing may run code
LONGEST_PICKLE = 64 << 20  # bytes, of one that is looked at to say what is wrong with it
DESCRIPTORS = "/dev/fd"  # a folder of those of this process
TENSORS = (".pth", ".pt", ".bin", ".safetensors", ".st", ".gguf")

_mapping = threading.Lock()  # held while torch maps a file


def read_torch_file(file: Path, old: bool) -> dict[str, Tensor]:
    """Its tensors by name, mapped from the file; those of an old file are read. Raises Unreadable."""
    try:
        return _tensors(file, old)
    except Unreadable:  # torch and zipfile call a file damaged, too, where the system refuses a call
        check_bytes(file)
        return _tensors(file, old)


def _tensors(file: Path, old: bool) -> dict[str, Tensor]:
    """Raises Unreadable."""
    if not old and not zipfile.is_zipfile(file):
        raise Unreadable(f"is cut short; {AGAIN}")
    try:
        found: Any = _load(file, mapped=not old and file.suffix != ".safetensors")  # by which torch would go
    except Unreadable:
        raise
    except OSError as error:
        raise Unreadable(cannot_be_read(error)) from error
    except Exception as error:  # a damaged pickle makes torch raise any kind, in words about its own parts
        raise Unreadable(_why(file, old, error)) from error
    if not isinstance(found, dict) or not all(
        isinstance(key, str) and isinstance(value, Tensor) for key, value in found.items()
    ):
        raise Unreadable(
            "is not a plain dictionary of named tensors; give the model's weights without trainer state"
        )
    return {key: _plain(key, tensor) for key, tensor in found.items()}


def _load(file: Path, mapped: bool) -> object:
    """Of a stream torch knows no suffix, and maps nothing."""
    if mapped:
        with _mapping, _closed_if_not_mapped(file):
            return torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    with file.open("rb") as stream:
        return torch.load(stream, map_location="cpu", weights_only=True)


@contextlib.contextmanager
def _closed_if_not_mapped(file: Path) -> Iterator[None]:
    """Close what torch leaves open where the system does not map the file. Raises Unreadable then.

    torch 2.13 (ATen/MapAllocator.cpp) opens the file once more to map it, and does not close it where mmap
    fails. A child would inherit that descriptor, and none that Python has opened (PEP 446): this tells them
    apart.
    """
    try:
        yield
    except Exception as error:
        if _close_inheritable(file):
            raise Unreadable(
                "cannot be mapped into memory, as the system refuses it; free memory or raise ulimit -v"
            ) from error
        raise


def _close_inheritable(file: Path) -> int:
    """Close the descriptors of a file that a child would inherit; how many there were."""
    closed = 0
    with contextlib.suppress(OSError):  # as where there is no such folder
        wanted = os.stat(file)
        for number in map(int, os.listdir(DESCRIPTORS)):
            with contextlib.suppress(OSError):  # the one by which the folder was listed
                if number > 2 and os.get_inheritable(number) and os.path.samestat(os.fstat(number), wanted):
                    os.close(number)
                    closed += 1
    return closed


def _plain(name: str, tensor: Tensor) -> Tensor:
    """Without a gradient. Raises Unreadable for what has no numbers in rows and columns."""
    if tensor.is_nested or tensor.layout is not torch.strided:
        kind = "nested" if tensor.is_nested else "sparse"
        raise Unreadable(f"has the {kind} tensor {name}; save it again as a dense one")
    if tensor.is_meta:
        raise Unreadable(f"has the name and shape of {name} and not its numbers; save it again with them")
    return tensor.detach()


def _why(file: Path, old: bool, error: Exception) -> str:
    """What is wrong with a file that torch does not read."""
    pickled: bytes | None = None
    try:
        if old:
            with file.open("rb") as stream:
                pickled = stream.read(LONGEST_PICKLE)
        else:
            with zipfile.ZipFile(file) as archive:
                names = archive.namelist()
                if reason := _no_checkpoint(names):
                    return reason
                entry = archive.getinfo(next(name for name in names if name.endswith("/data.pkl")))
                if entry.file_size > LONGEST_PICKLE:  # which a small file may say of itself
                    return f"is damaged; {AGAIN}"
                pickled = archive.read(entry)
    except (OSError, zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, ValueError):
        return f"is damaged; {AGAIN}"
    if pickled[:1] == b"\x80" and pickled[1] not in READ_PROTOCOLS:
        known = " and ".join(map(str, READ_PROTOCOLS))
        return (
            f"is saved with pickle protocol {pickled[1]}, and only {known} are read; save it again without "
            "pickle_protocol"
        )
    if isinstance(error, pickle.UnpicklingError) and _is_whole(pickled):
        return (
            "holds Python objects that could run code, not only tensors; give a plain dictionary of tensors"
        )
    return f"is damaged; {AGAIN}"


def _no_checkpoint(names: list[str]) -> str | None:
    """Why a zip archive of these files is none of torch.save, if so."""
    if any(name.endswith("/constants.pkl") for name in names):
        return "is a TorchScript program; give the state_dict of its model"
    if any(name.endswith("/data.pkl") for name in names):
        return None
    for name in names:
        if name.endswith(TENSORS):
            return f"is a zip archive that holds {name.rsplit('/', 1)[-1][:100]}; {UNPACK}"
    return f"is a zip archive without a checkpoint; {GIVE}"


def _is_whole(pickled: bytes) -> bool:
    """Whether it is a pickle from its beginning to its end."""
    try:
        for _ in pickletools.genops(pickled):
            pass
    except Exception:  # the bytes may be anything
        return False
    return True
