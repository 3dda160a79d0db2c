"""What suits a device, where nobody has asked for anything else."""

from dataclasses import dataclass

from rwkv_batch.ops.device import host_bytes

CPU_ROWS = 64  # more rows share a CPU's time without adding to its speed
CPU_STEP_FLOPS = 30e9  # prompt work that a laptop does in about a quarter of a second


@dataclass(frozen=True)
class RunnerLimits:
    """Of one runner on its device."""

    rows: int  # that run at once where nobody says how many
    prefill_tokens: int  # prompt tokens a step that keep the texts of running rows flowing
    memory: int | None  # bytes; None: all that is free
    idle_divisor: int  # sessions that do not run get one part in so many of what is left


# About 1,000 rows of a 7.2B model give its full speed; thousands are as fast, and each waits longer.
GPU_LIMITS = RunnerLimits(rows=1024, prefill_tokens=4096, memory=None, idle_divisor=2)


def cpu_limits(parameters: int) -> RunnerLimits:
    """For a model of that size. It is somebody's computer, and L2 is the same memory as L1."""
    prefill_tokens = max(16, min(1024, int(CPU_STEP_FLOPS / (2 * parameters)) // 16 * 16))
    return RunnerLimits(
        rows=CPU_ROWS,
        prefill_tokens=prefill_tokens,
        memory=host_bytes() // 4,
        idle_divisor=16,
    )
