"""Models with packed matrices: what is packed, what they answer, and by what they are known."""

import os
import subprocess
import sys

import pytest
import torch
from adapter_files import FACTOR
from checkpoints import refusal, tiny
from plain_rwkv7 import plain_logits
from row_adapters import KINDS, SCALED, merged_by_hand, write
from serving import ROOT
from tools import needs_proc

from bench.make_checkpoint import random_checkpoint, random_rwkv6, random_rwkv7a
from rwkv_batch.config import EngineConfig
from rwkv_batch.engine.engine import Engine
from rwkv_batch.model.adapters.low_rank import low_rank
from rwkv_batch.model.adapters.merge import merge
from rwkv_batch.model.adapters.parts import Scaling
from rwkv_batch.model.adapters.reader import read
from rwkv_batch.model.checkpoint import Checkpoint, from_tensors
from rwkv_batch.model.quantization.quantize import quantize
from rwkv_batch.model.rwkv6 import RWKV6
from rwkv_batch.model.rwkv7 import RWKV7
from rwkv_batch.ops.device import DeviceError
from rwkv_batch.ops.low_rank import PreparedAdapter
from rwkv_batch.ops.weights.formats import FORMATS
from rwkv_batch.runner.backends import create_runner
from rwkv_batch.wire.protocol import Sampling

pytestmark = pytest.mark.thorough

FAMILIES = {"rwkv7": random_checkpoint, "rwkv7a": random_rwkv7a, "rwkv6": random_rwkv6}
PACKED = {
    "rwkv7": ["att.receptance", "att.key", "att.value", "att.output", "ffn.key", "ffn.value"],
    "rwkv7a": ["att.receptance", "att.key", "att.value", "att.output", "ffn.key", "ffn.value"],
    "rwkv6": ["att.receptance", "att.key", "att.value", "att.output", "ffn.key", "ffn.value"],
}
PACKED["rwkv6"] += ["att.gate", "ffn.receptance"]
SMALL = [name for name in FORMATS if name not in ("fp16", "bf16")]
EXACT, BF16 = 1e-4, 2e-2  # of the logits' norm: products in fp32, and int8's with activations in bf16
PROMPTS = [[5, 6, 7, 8, 9], [100, 200], [300, 1, 2, 3, 4, 5, 6]]


def off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def logits(checkpoint: Checkpoint, prompts: list[list[int]] = PROMPTS, adapters=()) -> torch.Tensor:
    """After each prompt, all fed at once."""
    model = (RWKV6 if checkpoint.family == "rwkv6" else RWKV7)(checkpoint)
    model.adapters = list(adapters)
    states = model.new_states(len(prompts))
    tokens = torch.tensor([token for prompt in prompts for token in prompt])
    of_rows = [0] * len(prompts) if adapters else []
    return model.forward(tokens, [*map(len, prompts)], range(len(prompts)), states, adapters=of_rows)


def unpacked(checkpoint: Checkpoint) -> Checkpoint:
    """An ordinary model of the numbers that the packed matrices stand for."""
    matrices = {name: weight.dequantize() for name, weight in checkpoint.packed.items()}
    return from_tensors("unpacked", dict(checkpoint.tensors) | matrices)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", FORMATS)
def test_the_large_matrices_are_rounded_and_nothing_else(name, family):
    model = from_tensors("m", {key: t.float() for key, t in FAMILIES[family](2, 128, 300).items()})
    found = quantize(model, name, head=True)
    changed = {f"blocks.{layer}.{matrix}.weight" for layer in (0, 1) for matrix in PACKED[family]}
    for key, before in model.tensors.items():
        if key in changed or key == "head.weight":
            kind = name if key in changed or name in ("fp16", "bf16") else "int8"
            after = found.packed[key].dequantize() if key in found.packed else found.tensors[key]
            assert torch.equal(after.float(), FORMATS[kind].pack(before).dequantize())
        else:
            assert torch.equal(found.tensors[key], before)
    assert len(found.tensors) + len(found.packed) == len(model.tensors)
    assert found.parameters == model.parameters


@pytest.mark.parametrize("name", FORMATS)
def test_the_head_is_packed_with_eight_bits_and_more_unless_told_otherwise(name):
    def head(asked: bool | None) -> torch.Tensor:
        found = quantize(model, name, asked)
        packed = found.packed.get("head.weight")
        return found.tensors["head.weight"].float() if packed is None else packed.dequantize()

    model = from_tensors("m", {key: t.float() for key, t in random_checkpoint(1, 64, 300).items()})
    before = model.tensors["head.weight"]
    wanted = FORMATS[name if name in ("fp16", "bf16") else "int8"].pack(before).dequantize()
    assert torch.equal(head(True), wanted) and torch.equal(head(False), before)
    assert torch.equal(head(None), wanted if name in ("fp16", "bf16", "int8", "fp8") else before)


@pytest.mark.parametrize("name", FORMATS)
def test_logits_are_those_of_the_rounded_matrices(name):
    found = quantize(tiny(), name, head=True)
    tensors = dict(unpacked(found).tensors)
    for row, prompt in zip(logits(found), PROMPTS, strict=True):
        assert off(row, plain_logits(tensors, prompt)) < (EXACT if name in ("fp16", "bf16") else BF16)


@pytest.mark.parametrize("family", ["rwkv7a", "rwkv6"])
@pytest.mark.parametrize("name", SMALL)
def test_other_families_too(name, family):
    found = quantize(from_tensors("m", FAMILIES[family](2, 128, 300)), name, head=False)
    prompts = [[5, 6, 7], [299]]
    tolerance = BF16 if name == "int8" else EXACT
    assert off(logits(found, prompts), logits(unpacked(found), prompts).double()) < tolerance


@pytest.mark.parametrize("name", FORMATS)
def test_a_row_generates_the_same_alone_and_among_others(name):
    def texts(prompts: list[list[int]]) -> list[str]:
        with_engine = Engine(tiny(vocab=400), device="cpu", weights=name, max_rows=8, prefix_cache_mb=0)
        rows = with_engine.generate(prompts, max_tokens=12, stop_ids=[], sampling=Sampling(temperature=0.0))
        return [row.text for row in rows]

    together = texts(PROMPTS)
    assert together == [texts([prompt])[0] for prompt in PROMPTS]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_an_adapter_of_a_request_is_added_to_packed_matrices(name, kind, tmp_path):
    model = tiny()
    found = quantize(model, name)
    scaling = Scaling(factor=FACTOR) if kind in SCALED else None
    adapter = low_rank(read(write(tmp_path, model, kind, 1), found), found, scaling, 64, torch.float32)
    prepared = PreparedAdapter.on(adapter, 128, 512, torch.device("cpu"), torch.float32)
    with_adapter = logits(found, adapters=[prepared])
    by_hand = merged_by_hand(unpacked(found), kind, 1)
    assert off(with_adapter, logits(by_hand).double()) < BF16
    assert off(with_adapter, logits(found).double()) > 3 * BF16


def test_an_adapter_is_merged_before_matrices_are_packed(tmp_path):
    model = tiny()
    file = write(tmp_path, model, "lora", 1)
    merged = merge(model, read(file, model), Scaling(factor=0.5))
    found = quantize(merged, "int8")
    name = "blocks.1.ffn.key.weight"
    assert torch.equal(
        found.packed[name].dequantize(), FORMATS["int8"].pack(merged.tensors[name]).dequantize()
    )
    assert name not in found.tensors and set(found.tensors) | set(found.packed) == set(model.tensors)
    engine = Engine(model, device="cpu", adapter=str(file), adapter_scaling=0.5, weights="int8")
    assert engine.info.fingerprint == found.fingerprint
    refused = refusal(lambda: Engine(found, device="cpu", adapter=str(file), adapter_scaling=0.5))
    assert "before" in refused


def test_every_format_has_a_fingerprint_of_its_own():
    model = tiny()
    asked = [(name, head) for name in FORMATS for head in (True, False)]
    found = [quantize(model, *each).fingerprint for each in asked if each[0] != "bf16"]
    assert len({model.fingerprint, *found}) == len(found) + 1
    assert quantize(model, "bf16").fingerprint == model.fingerprint, "it has been bf16 before"
    assert quantize(tiny(seed=1), "int8").fingerprint != quantize(model, "int8").fingerprint
    assert quantize(model, "int8").fingerprint == quantize(model, "int8", True).fingerprint


def test_what_cannot_be_is_refused():
    packed = quantize(tiny(), "int8")
    assert quantize(packed, "int8") is packed
    assert "is in int8 already" in refusal(lambda: quantize(packed, "int4"))
    assert "--quantize-head" in refusal(lambda: quantize(packed, "int8", False))
    assert "int4-128" in refusal(lambda: Engine(tiny(), device="cpu", weights="int3"))
    assert "--weights" in refusal(lambda: Engine(tiny(), device="cpu", quantize_head=True))


def test_packed_matrices_need_the_kernels_on_a_gpu():
    packed, gpu = quantize(tiny(), "nf4"), [torch.device("cuda")]
    with pytest.raises(
        DeviceError, match=r"^--weights nf4 needs the kernels .* leave --backend torch out\.$"
    ):
        create_runner(packed, gpu, EngineConfig(backend="torch"))
    other = quantize(from_tensors("6", random_rwkv6(1, 64, 100)), "int8")
    with pytest.raises(DeviceError, match=r"^--weights int8 is not for RWKV-6 on a GPU"):
        create_runner(other, gpu, EngineConfig())


PEAK = """
import ctypes, sys, threading
from pathlib import Path
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: no page of 2 MB for what needs less
import torch
from rwkv_batch.model.checkpoint import load
from rwkv_batch.model.quantization.quantize import quantize
torch.set_num_threads(1)
checkpoint = load(sys.argv[1])
quantize(load(sys.argv[2]), sys.argv[3])  # what code and libraries take is there by now

def anonymous():
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return 1024 * int(line.split()[1])

ctypes.CDLL(None).malloc_trim(0)  # what has been freed goes back, or it would be taken again unseen
before, seen, done = anonymous(), [], threading.Event()
def look():
    while not done.wait(0.001):  # not all the time: packing needs the interpreter too
        seen.append(anonymous())
thread = threading.Thread(target=look)
thread.start()
found = quantize(checkpoint, sys.argv[3])
done.set()
thread.join()
seen.append(anonymous())
largest = max(weight.numel() * 4 for weight in found.packed.values())
print(max(seen) - before, sum(weight.nbytes for weight in found.packed.values()), largest)
"""


@pytest.mark.parametrize("name", ["int8", "nf4"])
def test_no_more_than_two_matrices_are_in_memory_beside_the_packed_ones(name, tmp_path):
    needs_proc()
    for file, layers, width in (("model.pth", 8, 1024), ("small.pth", 1, 64)):
        torch.save(random_checkpoint(layers, width, 512), tmp_path / file)
    run = [sys.executable, "-c", PEAK, str(tmp_path / "model.pth"), str(tmp_path / "small.pth"), name]
    # What is freed goes back at once: else malloc keeps some of it, the more the busier the machine is.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(1 << 16)}
    done = subprocess.run(run, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250)
    assert not done.returncode, done.stderr
    peak, packed, largest = map(int, done.stdout.split())
    assert 0.7 * packed <= peak <= packed + 2 * largest
