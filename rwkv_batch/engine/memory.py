"""How many rows and sessions fit into memory, and how large the database may be.

A runner counts beforehand all that it can ever hold (`Runner.bytes_needed`); the number of rows is the
largest with which that still fits. On a GPU the largest step is then run once (`runner/warmup.py`): what it
takes stays with torch's allocator. So an engine that has started does not run out of memory.
"""

import logging
import shutil
import time
from bisect import bisect
from dataclasses import dataclass
from pathlib import Path

import torch

from rwkv_batch.config import EngineConfig
from rwkv_batch.model.checkpoint import Checkpoint
from rwkv_batch.model.cuda.packed.packing import fp8_copy_bytes
from rwkv_batch.ops.device import DeviceError, describe, free_bytes, host_bytes, reserve_bytes
from rwkv_batch.runner.protocol import Batch, Runner
from rwkv_batch.state.slots import States
from rwkv_batch.text.tokenizer import END_OF_TEXT

log = logging.getLogger(__name__)

L1 = 16  # sessions in slots of the device, at least, where rows leave room for them
L2 = 32  # sessions in host memory, at least
# Parts of what is free that L2 and the database get, and how many idle sessions there are at most.
HOST_PART = 8  # of all memory
DISK_PART = 2
MOST_IDLE = 4096
MOST_ROWS = 1 << 15  # that are looked for
FILLED_UP = 1.05  # times what weights take on a GPU, as the kernels read them
RATE_TOKENS = 2048  # by which the speed of reading prompts is measured
FEWEST_TOKENS = 512  # prompt tokens a step, unless fewer are asked for
STEPS_PART = 8  # of what is free, which the buffers of a step's prompt tokens take at most


@dataclass(frozen=True)
class MemoryShare:
    """A model's part of the memory where several are served."""

    device: int = 1  # one of so many of what is free on the device
    host: int = 1  # the same of what states get of the host's memory, and databases of the disk
    kept: int = 0  # bytes of the device that steps of the others need at times


WHOLE = MemoryShare()


def prompt_tokens(runner: Runner, config: EngineConfig, share: MemoryShare = WHOLE) -> int:
    """Prompt tokens a step: as configured, or as many as suit the device.

    They are halved while their buffers take more than a part of what is free, or what rows asked for need.
    """
    tokens = runner.limits.prefill_tokens
    if config.prefill_tokens:
        return config.prefill_tokens
    rows, idle = config.max_rows or 1, L1 if config.l1 is None else config.l1
    free = _usable(runner, config.max_rows, share)
    while tokens > FEWEST_TOKENS:
        needed = runner.bytes_needed(rows, idle, tokens)
        buffers = needed - runner.bytes_needed(rows, idle, FEWEST_TOKENS)
        if needed <= free and buffers <= free // STEPS_PART:
            break
        tokens = max(tokens // 2, FEWEST_TOKENS)
    if tokens < runner.limits.prefill_tokens:
        log.info("prompt tokens of a step: %d, as memory is scarce", tokens)
    return tokens


def rows_and_idle_slots(
    runner: Runner, config: EngineConfig, prefill_tokens: int, share: MemoryShare = WHOLE
) -> tuple[int, int]:
    """Rows that run at once, and sessions that keep their states on the device besides.

    As configured, or as many as suit the device. Raises DeviceError if what was asked for does not fit.
    """
    if config.l1 is not None:
        return rows_that_fit(runner, config.max_rows, config.l1, prefill_tokens, share), config.l1

    def needed(idle: int) -> int:
        return runner.bytes_needed(config.max_rows or 1, idle, prefill_tokens)

    least = bisect(range(1, L1 + 1), _usable(runner, config.max_rows, share), key=needed)
    rows = rows_that_fit(runner, config.max_rows, least, prefill_tokens, share)
    return rows, idle_slots(runner, rows, least, prefill_tokens, share)


def rows_that_fit(
    runner: Runner, asked: int | None, idle_slots: int, prefill_tokens: int, share: MemoryShare = WHOLE
) -> int:
    """How many rows run at once: as many as were asked for, or else what suits the device and the share.

    `idle_slots`: slots of sessions that do not run. Raises DeviceError if the rows asked for do not fit; it
    names the number that would. Logs where the number comes from.
    """

    def needed(rows: int) -> int:
        return runner.bytes_needed(rows, idle_slots, prefill_tokens)

    free, limits = _usable(runner, asked, share), runner.limits
    fit = bisect(range(1, (asked or limits.rows) + 1), free, key=needed)
    if fit == 0 or (asked and fit < asked):
        raise DeviceError(_does_not_fit(runner.device, asked or 1, idle_slots, fit, free))
    why = "as asked for"
    if not asked:
        all_that_fit = bisect(range(1, MOST_ROWS + 1), free, key=needed)
        why = f"what the memory holds, at most {limits.rows}; --max-rows {all_that_fit} would fit"
    log.info("rows that run at once: %d (%s)", fit, why)
    return fit


def idle_slots(runner: Runner, rows: int, least: int, prefill_tokens: int, share: MemoryShare = WHOLE) -> int:
    """How many sessions keep their states on the device besides the rows: a share of what is left there."""
    needed = [runner.bytes_needed(rows, idle, prefill_tokens) for idle in (least, least + 1)]
    free = (_free_bytes(runner) - share.kept) // share.device
    left = max(0, free - needed[0]) // runner.limits.idle_divisor
    return min(least + left // (needed[1] - needed[0]), MOST_IDLE)


def check_weights(
    weights: Checkpoint, device: torch.device, kept: int, part: float = 1.0, fp8_copies: bool = False
) -> None:
    """Before weights go to a GPU where others serve, whose steps must not run out of memory meanwhile.

    What is not packed is in fp16 there. `kept`: as in MemoryShare. part: what the stages on this device have
    of the weights. fp8_copies: whether matrices of codes lie there in fp8 too. Raises DeviceError.
    """
    if device.type == "cpu":
        return
    held = weights.bytes_held(torch.float16.itemsize)
    if fp8_copies:
        held += fp8_copy_bytes(weights.packed)
    needed = int(part * held * FILLED_UP) + reserve_bytes(device)
    free = free_bytes(device) - kept
    if needed > free:
        raise DeviceError(
            f"The weights of {weights.name} take {needed / 2**30:.1f} GiB, and "
            f"{max(free, 0) / 2**30:.1f} GiB are left beside the models on {describe(device)}; remove one, "
            "or start with fewer --max-rows."
        )


def step_bytes(runner: Runner, rows: int, idle_slots: int, prefill_tokens: int) -> int:
    """What steps need beside the slots, which torch may have given back to the device in between."""
    if runner.device.type == "cpu":
        return 0  # where nothing is counted beforehand
    needed, more = (runner.bytes_needed(rows, idle, prefill_tokens) for idle in (idle_slots, idle_slots + 1))
    return needed - (rows + idle_slots) * (more - needed)


def host_states(states: States, share: MemoryShare = WHOLE) -> int:
    """How many states of sessions are kept in host memory."""
    most = host_bytes() // HOST_PART // share.host
    return max(L2, min(most // states.shape.nbytes, MOST_IDLE))


def database_limit(path: Path, taken: int, share: MemoryShare = WHOLE) -> int:
    """Bytes that a database with its images may take: a share of the free disk and of what it takes now.

    `path`: of what lies in the same folder.

    Never less than that, so that no session is dropped because others have filled the disk.
    """
    return max(taken, (shutil.disk_usage(path.parent).free + taken) // DISK_PART // share.host)


def prefill_rate(runner: Runner, prefill_tokens: int) -> float:
    """Tokens a second that one prompt is read at, measured. States are as before any token, then too."""
    tokens = min(prefill_tokens, RATE_TOKENS)
    batch = Batch(tokens=[END_OF_TEXT] * tokens, counts=[tokens], slots=[0], draws=[])
    seconds = float("inf")
    for _ in range(2):  # the first may have to load kernels
        began = time.perf_counter()
        runner.run(batch).wait()
        seconds = min(seconds, time.perf_counter() - began)
    runner.states.clear([0])
    return tokens / seconds


def _free_bytes(runner: Runner) -> int:
    """Of the device that has least."""
    return min(map(free_bytes, {*runner.devices}))


def _usable(runner: Runner, asked: int | None, share: MemoryShare) -> int:
    """Memory for slots and steps: all that is free for rows that were asked for, or else the share."""
    free, most = _free_bytes(runner) - share.kept, runner.limits.memory
    if asked:
        return free
    free //= share.device
    return free if most is None else min(free, most // share.host)


def _does_not_fit(device: torch.device, asked: int, idle_slots: int, fit: int, free: int) -> str:
    what = (
        f"{asked} row{'s' * (asked != 1)} and {idle_slots} idle sessions do not fit into the "
        f"{free / 2**30:.1f} GiB of memory that are free on {describe(device)}"
    )
    if fit:
        return f"{what}; {fit} rows would: use --max-rows {fit}."
    return f"{what}; use a smaller model, fewer --prefill-tokens or --max-adapters, or --l1 0."
