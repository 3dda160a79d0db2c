"""What waits on the host for its slot's record on the device, where a CPU stands in for the device if there
is no GPU.
"""

import numpy as np
import pytest
import torch
from host_kernels import AtOnce

from rwkv_batch.ops.cuda.inputs import staging
from rwkv_batch.ops.cuda.inputs.staging import Records

RECORD = np.dtype([("weight", "f8"), ("count", "i4"), ("ids", "i4", 3)])


@pytest.fixture(
    params=[
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
            ],
        ),
    ]
)
def records(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Records:
    if request.param == "cpu":
        monkeypatch.setattr(staging, "Uploads", AtOnce)
    return Records(6, RECORD, torch.device(request.param))


def known(records: Records) -> list[tuple]:
    """What the device knows: (weight, count) of each slot."""
    return [
        (float(row["weight"]), int(row["count"])) for row in records.table.cpu().numpy().view(RECORD).ravel()
    ]


def test_records_reach_their_slots_together_and_the_last_of_a_slot_counts(records: Records):
    for slot, weight in ((4, 1.0), (1, 2.0), (4, 3.0), (0, 4.0)):
        records.put(slot, (weight, slot, (7, 8, 9)))
    assert known(records) == [(0.0, 0)] * 6
    records.flush()
    assert known(records) == [(4.0, 0), (2.0, 1), (0.0, 0), (0.0, 0), (3.0, 4), (0.0, 0)]
    assert records.table.cpu().numpy().view(RECORD)["ids"][1].tolist() == [[7, 8, 9]]


def test_what_the_device_has_written_stays_until_another_row_begins(records: Records):
    records.put(2, (1.0, 5, (0, 0, 0)))
    records.put(3, (2.0, 6, (0, 0, 0)))
    records.flush()
    records.table.zero_()
    records.put(3, (8.0, 9, (0, 0, 0)))
    records.flush()
    records.flush()
    assert known(records) == [(0.0, 0), (0.0, 0), (0.0, 0), (8.0, 9), (0.0, 0), (0.0, 0)]


def test_all_slots_begin_again_and_again(records: Records):
    for turn in range(10):
        for slot in range(6):
            records.put(slot, (turn, slot, (0, 0, 0)))
        records.flush()
        records.put(turn % 6, (-1.0, 0, (0, 0, 0)))
        records.put(turn % 6, (turn, turn % 6, (0, 0, 0)))
        records.flush()
        assert known(records) == [(turn, slot) for slot in range(6)]
