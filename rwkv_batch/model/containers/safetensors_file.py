"""Files in the format of safetensors: .safetensors, and .st of web-rwkv."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from rwkv_batch.model.containers.recognize import AGAIN, Unreadable, cannot_be_read


def read_safetensors(file: Path) -> dict[str, Tensor]:
    """Its tensors by name, mapped from the file. Raises Unreadable."""
    with _opened(file) as archive:
        return {name: archive.get_tensor(name) for name in archive.keys()}  # noqa: SIM118 (the archive is no mapping)


def read_safetensors_metadata(file: Path) -> dict[str, str]:
    """What its header says beside its tensors. Raises Unreadable."""
    with _opened(file) as archive:
        return archive.metadata() or {}


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt", device="cpu") as archive:
            yield archive
    except OSError as error:
        raise Unreadable(cannot_be_read(error)) from error
    except (SafetensorError, ValueError, AttributeError) as error:
        raise Unreadable(_why(file)) from error


def _why(file: Path) -> str:
    """What is wrong with a file that the library does not read."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length))
        tensors = [entry for name, entry in header.items() if name != "__metadata__"]
        end = 8 + length + max((entry["data_offsets"][1] for entry in tensors), default=0)
        size = file.stat().st_size
        if end > size:
            return f"is cut short; {AGAIN}"
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError):
        pass
    return f"is damaged; {AGAIN}"
