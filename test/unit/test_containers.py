"""Files by their contents: every container of tensors is read, and what is none is named in one sentence."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import refusal, tiny
from safetensors.torch import save, save_file
from strange_files import LFS, STRANGE, old, saved

from bench.make_checkpoint import random_checkpoint
from rwkv_batch.model.adapters.reader import read as read_adapter
from rwkv_batch.model.adapters.start_states import read_start_state
from rwkv_batch.model.checkpoint import load
from rwkv_batch.model.files import read_json, read_tensors
from rwkv_batch.model.quantization import packed_file

ROOT = Path(__file__).resolve().parents[2]
TENSORS = random_checkpoint(layers=2, width=64, vocab=100)
MODEL = tiny(layers=2, width=64, vocab=100)
WORDS_OF_LIBRARIES = re.compile(
    r"weights_only|enforce fail|miniz|deserializ|Unpickler|storage|grad|Traceback|Error\b", re.IGNORECASE
)
READERS = {
    "checkpoint": load,
    "state": lambda file: read_start_state(file, 2, 64, "vk"),
    "adapter": lambda file: read_adapter(file, MODEL),
    "packed": packed_file.format_of,
}


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize("kind", STRANGE)
def test_what_is_no_container_is_named_under_every_suffix(kind, suffix, tmp_path):
    make, named = STRANGE[kind]
    file = tmp_path / f"given{suffix}"
    file.write_bytes(make())
    for what in ("checkpoint", "state", "adapter"):
        message = refusal(lambda: READERS[what](file))  # noqa: B023 (it is called here)
        assert message.startswith(f"{file} ") and named in message, what
        assert not WORDS_OF_LIBRARIES.search(message.removeprefix(str(file))), message


@pytest.mark.parametrize("reader", READERS)
def test_a_place_that_is_no_file_is_refused(reader, tmp_path):
    folder = tmp_path / "folder.pth"
    folder.mkdir()
    long = tmp_path / ("x" * 300)
    for place in (folder, tmp_path / "nothing.pth", long):
        assert str(place)[:100] in refusal(lambda: READERS[reader](place))  # noqa: B023 (it is called here)


WRITERS = {
    "torch": saved,
    "torch, pickle protocol 3": lambda tensors: saved(tensors, pickle_protocol=3),
    "old torch": old,
    "safetensors": save,
}


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize("writer", WRITERS)
def test_the_bytes_say_what_it_is_and_not_the_suffix(writer, suffix, tmp_path):
    file = tmp_path / f"model{suffix}"
    file.write_bytes(WRITERS[writer](TENSORS))
    assert load(file).fingerprint == MODEL.fingerprint


@pytest.mark.parametrize("write", [torch.save, save_file])
def test_a_packed_model_may_have_any_suffix(write, tmp_path):
    write(TENSORS, tmp_path / "model.pth")
    assert packed_file.format_of(tmp_path / "model.pth") == ""


def test_a_file_of_torch_is_not_taken_as_one_of_web_rwkv(tmp_path):
    """In which tuned states are transposed."""
    torch.save(TENSORS, tmp_path / "model.st")
    assert "name it .pth" in refusal(lambda: load(tmp_path / "model.st"))


@pytest.mark.parametrize("writer", [saved, old])
@pytest.mark.parametrize("trained", [torch.nn.Parameter, lambda t: t.clone().requires_grad_()])
def test_tensors_that_were_being_trained_are_read(writer, trained, tmp_path):
    draw = torch.Generator().manual_seed(0)
    matrix = {
        "blocks.0.att.key.lora_A": torch.randn(4, 64, generator=draw),
        "blocks.0.att.key.lora_B": torch.randn(64, 4, generator=draw),
    }
    state = {f"blocks.{i}.att.time_state": torch.randn(1, 64, 64, generator=draw) for i in range(2)}
    for name, tensors in {"checkpoint": TENSORS, "adapter": matrix, "state": state}.items():
        plain, file = tmp_path / f"{name}.pth", tmp_path / f"{name}-trained.pth"
        plain.write_bytes(saved(tensors))
        file.write_bytes(writer({key: trained(tensor) for key, tensor in tensors.items()}))
        assert not any(tensor.requires_grad for tensor in read_tensors(file).values())
        read = READERS[name]
        key = "fingerprint" if name == "checkpoint" else "digest"
        assert getattr(read(file), key) == getattr(read(plain), key)


@pytest.mark.parametrize("beginning", [b"", b"\xef\xbb\xbf"])
def test_json_is_utf_8_in_every_locale(beginning, tmp_path):
    """Here it is that of ASCII, which no installation lacks; that of GBK fails in the same way."""
    (tmp_path / "config.json").write_bytes(beginning + '{"author": "彭博 é"}'.encode())
    code = (
        "import locale, sys; from pathlib import Path; from rwkv_batch.model.files import read_json; "
        "print(locale.getencoding(), ascii(read_json(Path(sys.argv[1]) / 'config.json')))"
    )
    env = os.environ | {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, encoding="utf-8", timeout=120)
    name, found = done.stdout.split(" ", 1)
    assert name.lower() != "utf-8" and found.strip() == ascii({"author": "彭博 é"}), done.stderr


def test_a_folder_whose_files_were_not_fetched_names_the_file(tmp_path):
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    for name in ("model.safetensors", "pytorch_model.bin"):
        (tmp_path / name).write_bytes(LFS)
        message = refusal(lambda: load(tmp_path))
        assert f"{tmp_path / name} is a pointer of Git LFS" in message
        (tmp_path / name).unlink()


@pytest.mark.parametrize("data", ['{"author": "彭博"}'.encode("gbk"), b"[1]", b"[" * 100_000, b"", b"{"])
def test_json_that_is_none_is_refused(data, tmp_path):
    file = tmp_path / "config.json"
    file.write_bytes(data)
    assert str(file) in refusal(lambda: read_json(file))


NOT_MAPPED = """
import os, resource, sys
from pathlib import Path
import torch
from rwkv_batch.model.containers.recognize import Unreadable
from rwkv_batch.model.containers.torch_file import read_torch_file

file = Path(sys.argv[1])
torch.save({"weight": torch.zeros(64 << 20, dtype=torch.uint8)}, file)
read_torch_file(file, old=False)
lines = Path("/proc/self/status").read_text().splitlines()
size = next(int(line.split()[1]) for line in lines if line.startswith("VmSize"))
before = os.listdir("/proc/self/fd")
for room, number in ((16 << 20, 3), (resource.RLIM_INFINITY, 1)):
    limit = room if room == resource.RLIM_INFINITY else (size << 10) + room
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    for _ in range(number):
        try:
            print("read", len(read_torch_file(file, old=False)))
        except Unreadable as refused:
            print(refused)
print(os.listdir("/proc/self/fd") == before)
"""


def test_a_file_that_cannot_be_mapped_is_not_left_open(tmp_path):
    """Nor is what else the process has open closed."""
    ran = subprocess.run(
        [sys.executable, "-c", NOT_MAPPED, str(tmp_path / "big.pth")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    refused = "cannot be mapped into memory, as the system refuses it; free memory or raise ulimit -v"
    assert ran.stdout.splitlines() == [refused] * 3 + ["read 1", "True"]
