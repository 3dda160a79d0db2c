"""What fits: the device to run on, its threads, how many rows its memory holds, how many prompt tokens suit one step."""
import os

import torch

from rwkv_batch.checkpoint import HEAD_SIZE
from rwkv_batch.rwkv7 import RWKV7

CPU_ROWS = 64             # more rows share a CPU's time without adding to its speed
GPU_ROWS = 1024
CPU_STEP_FLOPS = 30e9     # prompt work that a laptop does in about a quarter of a second
GPU_PREFILL_TOKENS = 4096
SMALL = 64_000_000        # parameters below which two threads wait for each other longer than they work
LOGITS_COPIES = 6         # float32 rows of logits that sampling holds at once, at most


class DeviceError(Exception):
    """The device asked for is not there."""


def device(name: str) -> torch.device:
    """ "auto" is the first GPU if there is one. Raises DeviceError."""
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(name)
    except RuntimeError:
        raise DeviceError(f"--device {name} is no device; use auto, cpu, cuda or cuda:1") from None
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise DeviceError(f"--device {name} is not there: torch sees {torch.cuda.device_count()} GPUs; use --device cpu")
    if place.type not in ("cpu", "cuda"):
        raise DeviceError(f"--device {name} is not supported; use auto, cpu, cuda or cuda:1")
    return torch.device("cuda", place.index or 0) if place.type == "cuda" else place


def describe(place: torch.device) -> str:
    if place.type == "cpu":
        return f"cpu ({torch.get_num_threads()} threads)"
    return f"{place} ({torch.cuda.get_device_name(place)})"


def rows_that_fit(model: RWKV7, wkv_dtype: torch.dtype) -> int:
    """How many rows' states and logits half of a GPU's free memory, or a quarter of a machine's, holds; at least 1."""
    shape = model.checkpoint
    shift = shape.layers * 2 * shape.width * model.dtype.itemsize
    wkv = shape.layers * shape.heads * HEAD_SIZE**2 * wkv_dtype.itemsize
    row = shift + wkv + LOGITS_COPIES * 4 * shape.vocab
    if model.device.type == "cpu":
        room, most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4, CPU_ROWS
    else:
        room, most = torch.cuda.mem_get_info(model.device)[0] // 2, GPU_ROWS
    return max(1, min(most, room // row))


def threads(model: RWKV7) -> int:
    """CPU threads that serve the model best. A single one also keeps its pace beside other busy processes."""
    return 1 if model.checkpoint.parameters < SMALL else torch.get_num_threads()


def prefill_tokens(model: RWKV7) -> int:
    """Prompt tokens a step that keep the texts of running rows flowing."""
    if model.device.type != "cpu":
        return GPU_PREFILL_TOKENS
    return max(16, min(1024, int(CPU_STEP_FLOPS / (2 * model.checkpoint.parameters)) // 16 * 16))
