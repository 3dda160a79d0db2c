"""What fits: the device to run on, its threads, how many rows its memory holds, how many prompt tokens suit
one step.

On a GPU everything that a running engine can ever hold is counted beforehand, and the number of rows is the
largest with which it still fits (`bytes_needed`). After the states are there, `rehearse` runs the largest
step once: what it takes stays with torch's allocator. So an engine that has started does not run out of
memory.
"""

import dataclasses
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from rwkv_batch.model.checkpoint import HEAD_SIZE
from rwkv_batch.model.rwkv7 import RWKV7, States
from rwkv_batch.sampling.logprobs import logprobs
from rwkv_batch.sampling.sampler_cuda import bytes_per_slot

CPU_ROWS = 64  # more rows share a CPU's time without adding to its speed
GPU_ROWS = 1024
CPU_STEP_FLOPS = 30e9  # prompt work that a laptop does in about a quarter of a second
GPU_PREFILL_TOKENS = 4096
SMALL = 64_000_000  # parameters below which two threads wait for each other longer than they work

LOGITS_COPIES = (
    8  # fp32 rows of logits that a step with logprobs of all rows holds at once, two fp16 ones counted as one
)
# float32 vectors of a token that torch's operations hold at once, where the kernels in cuda/ cannot run
TORCH_VECTORS = 64
GRAPH_NODE_BYTES = 4096  # of the driver's for each launch in a CUDA graph
NODES_OF_LAYER = 16  # at most
PREFILL_NODES_OF_LAYER = 28
CGROUP = Path("/sys/fs/cgroup")
RESERVE = (
    1 << 30
)  # of a GPU's memory left alone: cuBLAS workspaces, kernels loaded late, what an allocator cannot use


class DeviceError(Exception):
    """The device asked for is not there, or too small for what it is to hold; the message is one sentence
    with the way out.
    """


def device(name: str) -> torch.device:
    """ "auto" is the first GPU if there is one. Raises DeviceError."""
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(name)
    except RuntimeError:
        raise DeviceError(f"--device {name} is no device; use auto, cpu, cuda or cuda:1") from None
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise DeviceError(
            f"--device {name} is not there: torch sees {torch.cuda.device_count()} GPUs; use --device cpu"
        )
    if place.type not in ("cpu", "cuda"):
        raise DeviceError(f"--device {name} is not supported; use auto, cpu, cuda or cuda:1")
    return torch.device("cuda", place.index or 0) if place.type == "cuda" else place


def describe(place: torch.device) -> str:
    if place.type == "cpu":
        return f"cpu ({torch.get_num_threads()} threads)"
    return f"{place} ({torch.cuda.get_device_name(place)})"


def threads(model: RWKV7) -> int:
    """CPU threads that serve the model best. A single one also keeps its pace beside other busy processes."""
    return 1 if model.checkpoint.parameters < SMALL else torch.get_num_threads()


def prefill_tokens(model: RWKV7) -> int:
    """Prompt tokens a step that keep the texts of running rows flowing."""
    if model.device.type != "cpu":
        return GPU_PREFILL_TOKENS
    return max(16, min(1024, int(CPU_STEP_FLOPS / (2 * model.checkpoint.parameters)) // 16 * 16))


def rows_that_fit(model: RWKV7, wkv_dtype: torch.dtype, asked: int | None, l1: int, budget: int) -> int:
    """How many rows are to run at once: as many as were asked for, or else what suits the device and fits.

    `l1`: idle sessions that have a slot too. `budget`: prompt tokens a step. Raises DeviceError if they do
    not fit; it names the number that would.
    """
    room, most = free_bytes(model.device), asked or (CPU_ROWS if model.device.type == "cpu" else GPU_ROWS)
    if not asked and model.device.type == "cpu":
        room = min(room, _machine_bytes() // 4)  # it is somebody's computer
    fit = _largest(lambda n: bytes_needed(model, wkv_dtype, n, l1, budget) <= room, most)
    if fit == 0 or (asked and fit < asked):
        raise DeviceError(_does_not_fit(model, asked or 1, l1, fit, room))
    return fit


def bytes_needed(model: RWKV7, wkv_dtype: torch.dtype, rows: int, l1: int, budget: int) -> int:
    """The most that an engine with these many rows holds on the model's device at any time, beside the
    weights.
    """
    shape, slots = model.checkpoint, rows + l1
    state = shape.layers * (
        2 * shape.width * model.dtype.itemsize + shape.heads * HEAD_SIZE**2 * wkv_dtype.itemsize
    )
    total = slots * state + rows * LOGITS_COPIES * 4 * shape.vocab
    if model.cuda is not None:
        total += slots * _pending_bytes(model, wkv_dtype)
        return (
            total
            + RESERVE
            + _graph_bytes(model, slots)
            + slots * bytes_per_slot(shape.vocab)
            + _buffer_bytes(model, slots)
            + _buffer_bytes(model, budget + rows, packed=True)
            + _prefill_bytes(model, budget)
        )
    total += (budget + rows) * TORCH_VECTORS * 4 * shape.width
    return total if model.device.type == "cpu" else total + RESERVE


def free_bytes(place: torch.device) -> int:
    """Memory that can still be had."""
    if place.type == "cpu":
        return _host_bytes()
    with torch.cuda.device(place):
        torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(place)[0]


@contextmanager
def enough(what: str, place: torch.device) -> Iterator[None]:
    """Raises DeviceError when memory runs out inside."""
    try:
        yield
    # torch has a narrower one for a GPU, but not for a CPU, nor for the CUDA calls that are not its own
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and "memory" not in str(error):
            raise
        raise DeviceError(
            f"{what[0].upper()}{what[1:]} do not fit into the {free_bytes(place) / 2**30:.1f} GiB of memory "
            "left on "
            f"{describe(place)}; use a smaller model, --max-rows, or end what else uses this memory."
        ) from error


@torch.inference_mode()
def rehearse(model: RWKV7, states: States, rows: int, budget: int) -> None:
    """Run the largest step that can come, on a GPU: every row decodes but one, which is fed a whole step's
    prompt tokens; and all rows want logprobs. States are zero before and after. Raises RuntimeError when
    memory runs out.
    """
    if model.device.type == "cpu":
        return
    lengths = [1] * (rows - 1) + [budget + 1]
    logits = model.forward(torch.zeros(sum(lengths), dtype=torch.long), lengths, range(rows), states)
    logprobs(
        logits.clone(), torch.zeros(rows, dtype=torch.long, device=model.device), 1
    )  # of a copy, as in a step
    states.clear(range(rows))


def _pending_bytes(model: RWKV7, wkv_dtype: torch.dtype) -> int:
    """Of a slot, for what steps put off."""
    from rwkv_batch.ops.cuda.feed import pending_of

    shape = model.checkpoint
    pending = pending_of(
        torch.empty(1, shape.layers, shape.heads, HEAD_SIZE, HEAD_SIZE, dtype=wkv_dtype, device="meta")
    )
    return 0 if pending is None else pending.nbytes


def _buffer_bytes(model: RWKV7, tokens: int, packed: bool = False) -> int:
    """What a step over that many tokens writes, but for states and logits. Nothing is allocated
    to find out.
    """
    from rwkv_batch.model.gemm import Buffers

    assert model.cuda is not None
    weights, arena = model.cuda.weights, dict[str, torch.Tensor]()
    Buffers(dataclasses.replace(weights, head=weights.head.to("meta")), tokens, arena, packed)
    return sum(tensor.nbytes for tensor in arena.values())


def _prefill_bytes(model: RWKV7, budget: int) -> int:
    """Of the graphs of small prefills and their buffers, and of what the chunks of a step hand from kernel to
    kernel.
    """
    from rwkv_batch.model import prefill_graphs
    from rwkv_batch.ops.cuda import packing

    assert model.cuda is not None
    chunk = model.checkpoint.heads * model.cuda.kernels.item_bytes
    sizes, longest = prefill_graphs.SIZES, -(-(budget + 1) // packing.CHUNK)
    chunks = packing.most_chunks(sizes[-1]) + max(longest, packing.SCRATCH_CHUNKS)
    nodes = len(sizes) * model.checkpoint.layers * PREFILL_NODES_OF_LAYER
    return chunks * chunk + nodes * GRAPH_NODE_BYTES + _buffer_bytes(model, sizes[-1], packed=True)


def _graph_bytes(model: RWKV7, slots: int) -> int:
    from rwkv_batch.model.graphs import ladder

    return len(ladder(slots)) * model.checkpoint.layers * NODES_OF_LAYER * GRAPH_NODE_BYTES


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number from 1 to `most` that fits, 0 if none does. What fits, fits with fewer too."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _does_not_fit(model: RWKV7, asked: int, l1: int, fit: int, room: int) -> str:
    what = (
        f"{asked} row{'s' * (asked != 1)} and {l1} idle sessions do not fit into the {room / 2**30:.1f} GiB "
        "of memory that are free "
        f"on {describe(model.device)}"
    )
    if fit:
        return f"{what}; {fit} rows would: use --max-rows {fit}."
    return f"{what}; use a smaller model, fewer --prefill-tokens, or --l1 0."


def _machine_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _host_bytes() -> int:
    """Memory that this machine can still give, or the container that this runs in."""
    room = _machine_bytes()
    with suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        room = 1024 * int(next(line.split()[1] for line in lines if line.startswith("MemAvailable:")))
    with suppress(OSError, ValueError, StopIteration):  # "max" is no number
        limit = int((CGROUP / "memory.max").read_text())
        used = next(
            int(line.split()[1])
            for line in (CGROUP / "memory.stat").read_text().splitlines()
            if line.startswith("anon ")
        )
        room = min(room, limit - used)
    return room
