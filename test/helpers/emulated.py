"""The kernels for AMD GPUs as a library for a CPU, where test/emulator/emulator.h runs their threads."""

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch

from rwkv_batch.model.cuda.steps.graphs import GraphLadder
from rwkv_batch.ops.compiled import hip, libraries
from rwkv_batch.ops.cpu.build import processor
from rwkv_batch.ops.cuda import abi, build, gemms
from rwkv_batch.ops.cuda.special import blaslt
from rwkv_batch.runner import cuda_runner, staged_runner
from rwkv_batch.sampling import sampler_cuda

ROOT = Path(__file__).resolve().parents[2]
EMULATOR = ROOT / "test" / "emulator"
# The machine's own instructions convert fp16. No contraction: sums are rounded as they are written.
FLAGS = ("-x", "c++", "-std=c++17", "-O1", "-march=native", "-ffp-contract=off", "-fPIC", "-w")
# What is no C++: shared memory, static here as blocks run one after the other, and launches.
IN_CPP = {
    r"extern __shared__ (?:__align__\(\w+\) )?(\w+) (\w+)\[\];": (
        r"\1* const \2 = reinterpret_cast<\1*>(emulator::shared);"
    ),
    r"\b__shared__\b": "static",
    r"kernel<<<grid, block, shared, stream>>>\((.*)\);": r"emulator::run(grid, block, [&] { kernel(\1); });",
}


def load(target: str) -> ctypes.CDLL:
    """The kernels for an AMD GPU of build.TILES, compiled first if no checkout has done so."""
    files = [*hip.inputs(), *sorted(EMULATOR.iterdir()), Path(__file__)]
    words = (target, *FLAGS, processor())
    path = libraries.library(
        f"emulated-{target}", libraries.digest(files, words), lambda folder: _compile(folder, target)
    )
    library = ctypes.CDLL(str(path))
    assert abi.mismatch(library) is None
    return library


def launch(library: ctypes.CDLL, kernel: str, *arguments: object) -> None:
    """Launch a kernel as binding.launch does, without a stream."""
    if error := getattr(library, kernel)(*arguments, None):
        raise RuntimeError(f"The kernel {kernel} could not be launched (error {error}).")


class NoEvent:
    """In place of an event or a stream, where all is done at once."""

    cuda_stream = 0

    def __init__(self, *_: object, **__: object) -> None: ...

    def record_event(self) -> "NoEvent":
        return self

    def __getattr__(self, _: str) -> Callable[..., None]:
        return lambda *_: None


def run_models(patch: pytest.MonkeyPatch, target: str) -> None:
    """Let whole models and their samplers run the kernels for an AMD GPU on a CPU, without graphs."""
    patch.setattr(build, "architecture", lambda _: target)
    for module in (gemms, sampler_cuda):
        patch.setattr(module, "launch", launch)
    for name in ("device", "stream"):
        patch.setattr(torch.cuda, name, lambda _: nullcontext())
    patch.setattr(torch.cuda, "Event", NoEvent)
    patch.setattr(torch.cuda, "current_stream", NoEvent)
    patch.setattr(torch.cuda, "get_device_name", lambda _: target)
    patch.setattr(torch.cuda, "Stream", NoEvent)
    for name in ("empty", "tensor", "zeros", "full"):
        patch.setattr(torch, name, partial(_without_pinning, getattr(torch, name)))
    patch.setattr(blaslt, "for_device", lambda _: None)
    for name in ("capture", "capture_all"):
        patch.setattr(GraphLadder, name, lambda *_, **__: None)
    for module in (cuda_runner, staged_runner):  # they are for GPUs, and would take minutes
        for name in ("run_largest_step", "launch_all_kernels"):
            patch.setattr(module, name, lambda *_, **__: None)


def _without_pinning(make: Callable[..., torch.Tensor], *arguments: object, **named: object) -> torch.Tensor:
    named.pop("pin_memory", None)
    return make(*arguments, **named)


def _compile(folder: Path, target: str) -> Path:
    """The library, in `folder`."""
    compiler = shutil.which("c++")
    if compiler is None:
        raise build.BuildError("There is no C++ compiler to build the kernels for a CPU; install g++.")
    for file in hip.inputs():
        text = file.read_text()
        for pattern, replacement in IN_CPP.items():
            text = re.sub(pattern, replacement, text)
        copy = folder / file.relative_to(ROOT)
        copy.parent.mkdir(exist_ok=True)
        copy.write_text(text)
    shutil.copy(EMULATOR / "warp.cuh", folder / "cuda")

    def compile_one(source: Path) -> Path:
        copy = folder / source.relative_to(ROOT)
        command = [compiler, *FLAGS, "-DRWKV_PORTABLE", f"-DRWKV_TILE={build.TILES[target]}"]
        subprocess.run([*command, f"-I{EMULATOR}", "-c", copy, "-o", copy.with_suffix(".o")], check=True)
        return copy.with_suffix(".o")

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, hip.sources()))
    library = folder / "kernels.so"
    subprocess.run([compiler, "-shared", *objects, "-o", library], check=True)
    return library
