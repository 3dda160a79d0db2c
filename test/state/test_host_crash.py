"""Several engines of one database, and the process that writes for them, are killed and stopped at random.

bench/crash_points.py does the same for longer.
"""

from pathlib import Path

import pytest
from host_crash import Rounds, Tally

pytestmark = pytest.mark.thorough


def test_nothing_acknowledged_is_lost_and_no_session_has_two_histories(tmp_path: Path) -> None:
    tally = Tally()
    for seed in range(3, 13):
        rounds = Rounds(tmp_path / f"{seed}", engines=3, seed=seed, stop_seconds=(0.2, 0.5), tally=tally)
        for _ in rounds.run(events=30):
            pass
        assert tally.failures == []
        if tally.turns["stored"] and tally.turns["refused"]:
            return
    raise AssertionError("no turn comes too late")  # as they do in one round where engines are not slow
