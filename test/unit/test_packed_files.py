"""`python -m rwkv_batch.quantize` and the files that it writes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from adapter_files import FACTOR
from checkpoints import refusal, tiny, write_pth
from row_adapters import write
from safetensors import safe_open
from safetensors.torch import save_file
from serving import ROOT
from tools import needs_proc

from bench.make_checkpoint import random_checkpoint, random_rwkv6, random_rwkv7a
from rwkv_batch.config import WeightsName
from rwkv_batch.engine.engine import Engine
from rwkv_batch.model.checkpoint import from_tensors
from rwkv_batch.model.quantization.packed_file import format_of, load
from rwkv_batch.model.quantization.packed_file import write as write_packed
from rwkv_batch.model.quantization.quantize import quantize
from rwkv_batch.ops.cpu.memory import PAGE
from rwkv_batch.ops.weights.formats import FORMATS
from rwkv_batch.quantize import main
from rwkv_batch.wire.protocol import Sampling

pytestmark = pytest.mark.thorough

PROMPT = [5, 6, 7]
WEIGHTS = tiny(vocab=400)
KEY = "rwkv_batch"


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    return write_pth(tmp_path_factory.mktemp("models") / "model.pth", dict(WEIGHTS.tensors))


@pytest.fixture(scope="module")
def packed(original) -> Path:
    file = original.with_name("packed.safetensors")
    assert main([str(original), str(file), "--weights", "int8"]) == 0
    return file


def contents(file: Path) -> tuple[dict[str, torch.Tensor], dict]:
    with safe_open(file, "pt") as archive:
        tensors = {name: archive.get_tensor(name).clone() for name in archive.keys()}  # noqa: SIM118
        return tensors, json.loads(archive.metadata()[KEY])


def drawn(*arguments, **options) -> tuple[str, str]:
    engine = Engine(*arguments, device="cpu", prefix_cache_mb=0, **options)
    (row,) = engine.generate([PROMPT], max_tokens=12, stop_ids=[], sampling=Sampling(temperature=0.0))
    return engine.info.fingerprint, row.text


def test_the_command_knows_every_format():
    assert set(WeightsName.__args__) == set(FORMATS)


@pytest.mark.parametrize("name", FORMATS)
def test_a_file_is_the_model_that_would_be_packed_as_it_is_loaded(name, original, tmp_path, capsys):
    file = tmp_path / "out.safetensors"
    assert main([str(original), str(file), "--weights", name]) == 0
    assert name in capsys.readouterr().out and [*tmp_path.iterdir()] == [file]
    found, wanted = load(file), quantize(load(original), name)
    assert (found.weights, found.fingerprint) == (name, wanted.fingerprint)
    assert found.tensors.keys() == wanted.tensors.keys() and found.packed.keys() == wanted.packed.keys()
    assert all(torch.equal(found.tensors[key], wanted.tensors[key]) for key in wanted.tensors)
    for key, weight in wanted.packed.items():
        assert type(found.packed[key]) is type(weight)
        bytes_ = (
            {part: t.view(torch.uint8) for part, t in w.parts.items()} for w in (found.packed[key], weight)
        )
        there, here = bytes_
        assert there.keys() == here.keys() and all(torch.equal(there[part], here[part]) for part in here)
    assert drawn(str(file)) == drawn(str(original), weights=name)
    assert format_of(file) == name and format_of(original) == ""


@pytest.mark.parametrize("make", [random_rwkv7a, random_rwkv6])
def test_other_families_can_be_written(make, tmp_path):
    model = from_tensors("m", make(2, 64, 300))
    found = quantize(model, "int4-128", head=True)
    write_packed(found, model.fingerprint, tmp_path / "out.safetensors")
    assert load(tmp_path / "out").family == model.family
    assert drawn(str(tmp_path / "out")) == drawn(found)


def test_the_file_says_what_it_was_made_from_and_has_its_tensors_at_whole_vectors(packed):
    _, said = contents(packed)
    assert (said["weights"], said["source"]) == ("int8", WEIGHTS.fingerprint)
    first = 8 + int.from_bytes(packed.read_bytes()[:8], "little")
    assert first % 64 == 0
    assert packed.stat().st_size < 0.9 * sum(tensor.nbytes for tensor in WEIGHTS.tensors.values())


def test_the_file_may_be_read_by_those_who_may_read_others(original, tmp_path):
    (tmp_path / "packed.safetensors.partial").touch(0o600)  # of a run that was killed
    before = os.umask(0o027)
    try:
        assert main([str(original), str(tmp_path / "packed.safetensors"), "--weights", "int8"]) == 0
    finally:
        os.umask(before)
    assert (tmp_path / "packed.safetensors").stat().st_mode & 0o777 == 0o640


def test_a_merged_adapter_is_in_the_file(original, tmp_path):
    adapter = write(tmp_path, WEIGHTS, "lora", 1)
    flags = ["--adapter", str(adapter), "--adapter-scaling", str(FACTOR)]
    assert main([str(original), str(tmp_path / "out.safetensors"), "--weights", "int8", *flags]) == 0
    merged = {"adapter": str(adapter), "adapter_scaling": FACTOR, "weights": "int8"}
    assert drawn(str(tmp_path / "out")) == drawn(str(original), **merged)


@pytest.mark.parametrize("place", [0.3, 0.6, 0.999])
def test_a_flipped_bit_is_found(packed, tmp_path, place):
    data = bytearray(packed.read_bytes())
    data[int(place * len(data))] ^= 1
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes(data)
    sentence = refusal(lambda: load(damaged))
    assert str(damaged) in sentence and "damaged" in sentence and "rwkv_batch.quantize" in sentence


def test_half_a_file_is_refused(packed, tmp_path):
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(packed.read_bytes()[:-1000])
    assert "is cut short" in refusal(lambda: load(cut))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors, said: tensors.pop("blocks.1.att.key.weight.scales"), "is missing"),
        (lambda tensors, said: tensors.update(more=torch.zeros(3)), "has been added"),
        (lambda tensors, said: said.update(version=2), "version 2"),
        (lambda tensors, said: said.update(weights="int3"), "format int3"),
        (lambda tensors, said: said.pop("matrices"), "not understood"),
        (lambda tensors, said: said["matrices"].pop("blocks.1.att.key.weight"), "blocks.1.att.key.weight"),
        (lambda tensors, said: said["matrices"].update({"blocks.1.att.key.weight": ["int8", 9, 9]}), "fit"),
        (
            lambda tensors, said: said["matrices"].update({"blocks.1.att.key.weight": ["int4", 128, 128]}),
            "parts",
        ),
    ],
    ids=["missing", "added", "version", "format", "fields", "unnamed", "shape", "kind"],
)
def test_a_foreign_file_is_refused_in_a_sentence(packed, tmp_path, change, words):
    tensors, said = contents(packed)
    change(tensors, said)
    file = tmp_path / "foreign.safetensors"
    save_file(tensors, file, {KEY: json.dumps(said)})
    sentence = refusal(lambda: load(file))
    assert str(file) in sentence and words in sentence


def test_metadata_that_is_nested_too_deeply_is_refused(tmp_path):
    file = tmp_path / "foreign.safetensors"
    save_file({"more": torch.zeros(3)}, file, {KEY: "[" * 9999})
    assert "not understood" in refusal(lambda: load(file))


def test_metadata_of_others_does_not_matter(tmp_path):
    file = tmp_path / "plain.safetensors"
    save_file(dict(WEIGHTS.tensors), file, {"format": "pt"})
    assert load(file).fingerprint == WEIGHTS.fingerprint and format_of(file) == ""


def test_another_format_than_that_of_the_file_is_refused(packed):
    assert drawn(str(packed)) == drawn(str(packed), weights="int8")
    assert "is in int8 already" in refusal(lambda: Engine(str(packed), device="cpu", weights="int4"))


def test_what_cannot_be_written_is_refused_before_anything_is_read(original, packed, tmp_path, capsys):
    for given, out, words in [
        (original, tmp_path / "out.pth", ".safetensors"),
        (original, tmp_path / "nowhere" / "out.safetensors", "no directory"),
        (packed, packed, "the model itself"),
        (packed, tmp_path / "twice.safetensors", "already"),
        (tmp_path / "nothing.pth", tmp_path / "out.safetensors", "no checkpoint"),
    ]:
        assert main([str(given), str(out), "--weights", "int4"]) == 2
        sentence = capsys.readouterr().err.strip()
        assert words in sentence and "\n" not in sentence
    (tmp_path / "folder.safetensors").mkdir()
    assert main([str(original), str(tmp_path / "folder.safetensors"), "--weights", "int4"]) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["folder.safetensors"]


PEAK = """
import ctypes, sys, threading
from pathlib import Path
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: no page of 2 MB for what needs less
import torch
from rwkv_batch.model.quantization.packed_file import load
from rwkv_batch.ops.cpu import binding
from rwkv_batch.runner.torch_runner import TorchRunner

def run(file):
    checkpoint = load(file)
    runner = TorchRunner(checkpoint, [torch.device("cpu")], torch.float32, kernels=binding.load(), threads=1)
    runner.model.forward(torch.tensor([5, 6]), [2], [0], runner.model.new_states(1))
    return checkpoint, runner

def anonymous():
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return 1024 * int(line.split()[1])

run(sys.argv[2])  # what code and libraries take is there by now
ctypes.CDLL(None).malloc_trim(0)  # what has been freed goes back, or it would be taken again unseen
before, seen, done = anonymous(), [], threading.Event()
def look():
    while not done.is_set():
        seen.append(anonymous())
thread = threading.Thread(target=look)
thread.start()
checkpoint, runner = run(sys.argv[1])
done.set()
thread.join()
others = 4 * sum(t.numel() for name, t in checkpoint.tensors.items() if name != "emb.weight")
largest = max(weight.nbytes for weight in checkpoint.packed.values())
print(max(seen) - before, sum(weight.nbytes for weight in checkpoint.packed.values()) + others, largest)
"""


def test_a_model_from_a_file_takes_one_copy_of_its_matrices_and_none_of_its_embedding(tmp_path):
    needs_proc()
    for name, layers, width, vocab in (("large", 6, 512, 65536), ("small", 1, 64, 512)):
        plain = from_tensors(name, random_checkpoint(layers, width, vocab))
        write_packed(quantize(plain, "int8"), plain.fingerprint, tmp_path / f"{name}.safetensors")
    run = [
        sys.executable,
        "-c",
        PEAK,
        *(str(tmp_path / f"{name}.safetensors") for name in ("large", "small")),
    ]
    # What is freed goes back at once: else malloc keeps some of it, the more the busier the machine is.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(1 << 16)}
    done = subprocess.run(run, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250)
    assert not done.returncode, done.stderr
    peak, held, largest = map(int, done.stdout.split())
    # Last pages of blocks are there whole, and what `small` has freed may come again or not. A matrix of all
    # layers or the embedding, held twice, takes more.
    pages = 4 * PAGE
    assert peak <= held + largest + pages
