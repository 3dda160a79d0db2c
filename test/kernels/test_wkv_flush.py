"""The flush of deferred writes against torch in fp32."""

import pytest
import torch
from cuda_gpu import DEVICE, needs_gpu, normal, off

from rwkv_batch.ops.cuda.abi import DEFERRED_VECTORS, MAX_LAG
from rwkv_batch.ops.cuda.inputs.feed import RECORD

pytestmark = needs_gpu
SLOTS, LAYERS, HEADS = 12, 2, 3


@pytest.mark.parametrize("counted", [None, 0, 5], ids=["all", "none counted", "some counted"])
def test_a_flush_writes_what_is_deferred(kernels, counted):
    """Of the slots named alone; a negative slot is padding."""
    states = normal(SLOTS, LAYERS, HEADS, 64, 64, std=0.3)
    deferred = normal(SLOTS, LAYERS, HEADS, MAX_LAG, DEFERRED_VECTORS, 64, std=0.3)
    lag = torch.arange(SLOTS, device=DEVICE, dtype=torch.int32) % (MAX_LAG + 1)
    records = torch.zeros(SLOTS, RECORD.itemsize // 4, device=DEVICE, dtype=torch.int32)
    column = RECORD.names.index("lag")
    records[:, column] = lag
    slots = torch.tensor([3, 8, -1, 0, 10, 5, 1, 11], device=DEVICE, dtype=torch.int32)
    count = torch.tensor([counted or 0], device=DEVICE, dtype=torch.int32)
    named = slots.tolist()[: len(slots) if counted is None else counted]
    want, want_lag = states.float(), lag.clone()
    for slot in named:
        if slot < 0:
            continue
        for token in range(int(lag[slot])):
            lost, key, removal, value, removed = deferred[slot, :, :, token].float().unbind(2)
            decayed = want[slot] * (1 - lost).unsqueeze(-2)
            written = value.unsqueeze(-1) * key.unsqueeze(-2) - removed.unsqueeze(-1) * removal.unsqueeze(-2)
            want[slot] = decayed + written
        want_lag[slot] = 0
    before = states.clone()
    address = None if counted is None else count.data_ptr()
    kernels.wkv_flush(slots.data_ptr(), address, len(slots), records, states, deferred)
    assert off(states, want) < 1e-3 and torch.equal(records[:, column], want_lag)
    others = [slot for slot in range(SLOTS) if slot not in named]
    assert torch.equal(states[others], before[others])
    records[:, column] = 0
    assert not records.any()
