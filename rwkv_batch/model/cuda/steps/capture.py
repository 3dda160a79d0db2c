"""Capturing launches into a CUDA graph, and timing them."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from threading import Lock
from typing import Any

import torch

_capturing = Lock()  # one at a time, as while a model is loaded beside others


def capture(run: Callable[[], object], pool: Any = None) -> torch.cuda.CUDAGraph:
    """Run once, then once more into a graph.

    Both on a stream of our own. cuBLAS has one workspace for each stream, allocated when it is first used:
    were that inside a capture, it would belong to that graph, and graphs captured later would use it after it
    is gone.
    """
    current = torch.cuda.current_stream()
    stream = _stream(torch.cuda.current_device(), current.cuda_stream)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        run()
    current.wait_stream(stream)
    current.synchronize()  # what other threads have queued goes on
    graph = torch.cuda.CUDAGraph()
    # Not by torch.cuda.graph, which gives back what the allocators keep: steps go on behind this. Other
    # threads may go on allocating and copying meanwhile.
    with _without_collection(), torch.cuda.stream(stream):
        graph.capture_begin(pool, "thread_local")
        try:
            run()
        finally:
            graph.capture_end()
    return graph


@contextmanager
def _without_collection() -> Iterator[None]:
    """To free another graph that has become garbage would break a capture. One thread at a time."""
    with _capturing:
        collects_garbage = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if collects_garbage:
                gc.enable()


def gpu_seconds(run: Callable[[], object], count: int = 1) -> float:
    """Of one call on the GPU, between two events around `count` of them."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(count):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / count


@cache
def _stream(device: int, behind: int) -> torch.cuda.Stream:
    """For captures where the current stream is `behind`.

    Graphs that run on different streams, as while a model is loaded beside others, share no workspace.
    """
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        for dtype in (torch.float16, torch.float32):  # the workspaces of cuBLAS and cuBLASLt
            ones = torch.ones(64, 64, device="cuda", dtype=dtype)
            torch.addmm(torch.mm(ones, ones)[0], ones, ones)
    stream.synchronize()
    return stream
