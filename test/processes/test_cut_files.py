"""Power cuts at each operation on the files of batches, of usage and of the audit log.

What a client was told of files and batches is there after each.
"""

from pathlib import Path

import cut_files
import pytest
from power_cut import Cut, Names, missing
from tools import absent

pytestmark = pytest.mark.thorough

NAMES: tuple[Names, ...] = ("synced", "any", "all")


@pytest.mark.parametrize("kind", ["kill -9", "power cut"])
def test_files_and_batches_outlive_a_cut_at_each_operation(tmp_path: Path, kind: str) -> None:
    if reason := missing():
        absent(reason)
    disk, operations = cut_files.record(tmp_path)
    cuts = [
        Cut(position, NAMES[position % len(NAMES)] if kind == "power cut" else None, seed=position)
        for position in range(len(operations) + 1)
    ]
    wrong = [*cut_files.wrong_after(cuts, disk, operations, tmp_path)]
    assert not wrong, "\n".join(wrong[:10])
