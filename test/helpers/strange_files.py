"""Files that are given as a checkpoint, a state or an adapter and are none, and what is said of each."""

import gzip
import io
import pickle
import struct
import tarfile
import zipfile
from collections.abc import Callable

import torch
from safetensors.torch import save

NUMBERS = {"head.weight": torch.ones(64, 64)}
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 382\n"
PAGE = b"<!DOCTYPE html>\n<html><head><title>404</title></head></html>"


def saved(tensors: object = NUMBERS, **options) -> bytes:
    """A file of torch.save."""
    file = io.BytesIO()
    torch.save(tensors, file, **options)
    return file.getvalue()


def old(tensors: object = NUMBERS) -> bytes:
    """A file of torch.save before version 1.6."""
    return saved(tensors, _use_new_zipfile_serialization=False)


def zipped(**files: bytes) -> bytes:
    """A zip archive; `__` in a name stands for a dot."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in files.items():
            archive.writestr(name.replace("__", "."), data)
    return file.getvalue()


def tarred() -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("model.pth"))
    return file.getvalue()


def without_record(data: bytes, end: str) -> bytes:
    """The archive without the file whose name ends so."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(file, "w") as target:
        for name in source.namelist():
            if not name.endswith(end):
                target.writestr(name, source.read(name))
    return file.getvalue()


def scratched(data: bytes) -> bytes:
    """The file of torch.save with some bytes of its pickle changed."""
    place = data.index(b"data.pkl") + 40
    return data[:place] + b"\xff" * 20 + data[place + 20 :]


def script() -> bytes:
    return zipped(**{"model/constants.pkl": b"", "model/data.pkl": b"", "model/version": b"3"})


STRANGE: dict[str, tuple[Callable[[], bytes], str]] = {
    "a Git LFS pointer": (lambda: LFS, "Git LFS"),
    "a web page": (lambda: PAGE, "HTML"),
    "a web page behind a byte order mark": (lambda: b"\xef\xbb\xbf\n" + PAGE, "HTML"),
    "an error of an object store": (lambda: b'<?xml version="1.0"?><Error></Error>', "HTML or XML"),
    "an error in JSON": (lambda: b'{"error": "Repository not found"}', "a JSON text"),
    "a text": (lambda: "你好".encode(), "is a text"),
    "nothing": (lambda: b"", "is empty"),
    "zeros": (lambda: bytes(2000), "begins with zeros"),
    "GGUF": (lambda: b"GGUF\x03\0\0\0" + bytes(100), "a GGUF file"),
    "rwkv.cpp": (lambda: struct.pack("<6I", 0x67676D66, 101, 256, 64, 12, 0) + bytes(100), "rwkv.cpp"),
    "gzip": (lambda: gzip.compress(saved()), "gzip; unpack it"),
    "tar": (tarred, "a tar archive; unpack it"),
    "a session": (lambda: b"RWKV7SN\n" + bytes(100), "a session exported"),
    "a zip": (lambda: zipped(readme__txt=b"hello"), "a zip archive without a checkpoint"),
    "a zip with a checkpoint": (lambda: zipped(model__pth=saved()), "holds model.pth; unpack it"),
    "a TorchScript program": (script, "TorchScript"),
    "half a .pth": (lambda: saved()[: len(saved()) // 2], "is cut short"),
    "half an old .pth": (lambda: old()[: len(old()) // 2], "is damaged"),
    "half a .safetensors": (lambda: save(NUMBERS)[:-100], "is cut short"),
    "the head of a .safetensors": (lambda: save(NUMBERS)[:40], "is cut short"),
    "a .safetensors with more": (lambda: save(NUMBERS) + b"more", "is damaged"),
    "a .pth without its numbers": (lambda: without_record(saved(), "data/0"), "is damaged"),
    "a .pth with a scratch": (lambda: scratched(saved()), "is damaged"),
    "pickle protocol 5": (lambda: saved(pickle_protocol=5), "pickle protocol 5"),
    "pickle protocol 4": (lambda: saved(pickle_protocol=4), "pickle protocol 4"),
    "a pickle": (lambda: pickle.dumps({"a": 1}), "a pickle of Python objects"),
    "objects": (lambda: saved({"a": print}), "could run code"),
    "trainer state": (lambda: saved({"model": NUMBERS, "step": 5}), "dictionary of named tensors"),
    "tensors without numbers": (
        lambda: saved({"head.weight": torch.ones(64, 64, device="meta")}),
        "not its numbers",
    ),
    "a sparse tensor": (lambda: saved({"head.weight": torch.eye(64).to_sparse()}), "the sparse tensor"),
}
