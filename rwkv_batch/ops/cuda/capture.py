"""Capturing launches into a CUDA graph, and timing them."""

import gc
from collections.abc import Callable
from functools import cache
from typing import Any

import torch


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
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph, collects_garbage = torch.cuda.CUDAGraph(), gc.isenabled()
    gc.disable()  # to free another graph that has become garbage would break the capture
    try:
        # Not by torch.cuda.graph, which gives back what the allocators keep: steps go on behind this. Other
        # threads may go on allocating and copying meanwhile.
        with torch.cuda.stream(stream):
            graph.capture_begin(pool, "thread_local")
            try:
                run()
            finally:
                graph.capture_end()
    finally:
        if collects_garbage:
            gc.enable()
    return graph


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
