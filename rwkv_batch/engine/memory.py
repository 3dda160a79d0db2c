"""How many rows fit, and how many prompt tokens suit one step.

A runner counts beforehand all that it can ever hold (`Runner.bytes_needed`); the number of rows is the
largest with which that still fits. On a GPU `rehearse` then runs the largest step once: what it takes stays
with torch's allocator. So an engine that has started does not run out of memory.
"""

from bisect import bisect

import torch

from rwkv_batch.ops.device import DeviceError, describe, free_bytes, host_bytes
from rwkv_batch.runner.protocol import Runner

CPU_ROWS = 64  # more rows share a CPU's time without adding to its speed
GPU_ROWS = 1024
CPU_STEP_FLOPS = 30e9  # prompt work that a laptop does in about a quarter of a second
GPU_PREFILL_TOKENS = 4096


def default_prefill_tokens(parameters: int, device: torch.device) -> int:
    """Prompt tokens a step that keep the texts of running rows flowing."""
    if device.type != "cpu":
        return GPU_PREFILL_TOKENS
    return max(16, min(1024, int(CPU_STEP_FLOPS / (2 * parameters)) // 16 * 16))


def rows_that_fit(runner: Runner, asked: int | None, idle_slots: int, prefill_tokens: int) -> int:
    """How many rows run at once: as many as were asked for, or else what suits the device and fits.

    `idle_slots`: slots of sessions that do not run. Raises DeviceError if the rows asked for do not fit; it
    names the number that would.
    """
    on_cpu = runner.device.type == "cpu"
    free, most = free_bytes(runner.device), asked or (CPU_ROWS if on_cpu else GPU_ROWS)
    if not asked and on_cpu:
        free = min(free, host_bytes() // 4)  # it is somebody's computer
    fit = bisect(range(1, most + 1), free, key=lambda n: runner.bytes_needed(n, idle_slots, prefill_tokens))
    if fit == 0 or (asked and fit < asked):
        raise DeviceError(_does_not_fit(runner.device, asked or 1, idle_slots, fit, free))
    return fit


def _does_not_fit(device: torch.device, asked: int, idle_slots: int, fit: int, free: int) -> str:
    what = (
        f"{asked} row{'s' * (asked != 1)} and {idle_slots} idle sessions do not fit into the "
        f"{free / 2**30:.1f} GiB of memory that are free on {describe(device)}"
    )
    if fit:
        return f"{what}; {fit} rows would: use --max-rows {fit}."
    return f"{what}; use a smaller model, fewer --prefill-tokens, or --l1 0."
