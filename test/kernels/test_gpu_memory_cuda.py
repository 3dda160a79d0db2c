"""A server that may take a part of the GPU's memory only."""

import gc

import pytest
import torch
from checkpoints import tiny
from cuda_gpu import needs_gpu

from rwkv_batch.engine.engine import Engine
from rwkv_batch.model.checkpoint import Checkpoint
from rwkv_batch.ops.device import DeviceError

pytestmark = [*needs_gpu, pytest.mark.many_launches]
ROOM = 3 << 30  # of which one GiB stays free for what nobody counts
DEVICE = torch.device("cuda", 0)


@pytest.fixture
def limit():
    torch.cuda.empty_cache()
    yield torch.cuda.memory_reserved(DEVICE) + ROOM
    torch.cuda.set_per_process_memory_fraction(1.0, DEVICE)


def refused(weights: Checkpoint, **options: int) -> str:
    """The sentence. What was loaded is gone behind it."""
    try:
        Engine(weights, device="cuda", **options)
    except DeviceError as error:
        return str(error)
    finally:
        gc.collect()
    raise AssertionError("too many rows were accepted")


def test_rows_fill_the_limit_and_all_of_them_run_within_it(limit):
    weights, options = tiny(layers=8, width=2048, vocab=300), {"l1": 0, "prefill_tokens": 256}
    rows = int(refused(weights, gpu_memory=limit, max_rows=5000, **options).split("--max-rows ")[1][:-1])
    assert rows > 50
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(DEVICE)
    engine = Engine(weights, device="cuda", gpu_memory=limit, max_rows=rows, **options)
    found = engine.generate([[1 + number % 200] for number in range(rows)], max_tokens=3, stop_ids=[])
    assert len(found) == rows
    assert torch.cuda.max_memory_reserved(DEVICE) <= limit
