"""Several engines of one database, and the process that writes for them, are killed and stopped at random.

bench/crash_points.py does the same for longer.
"""

from pathlib import Path

import pytest
from host_crash import Rounds

pytestmark = pytest.mark.thorough


def test_nothing_acknowledged_is_lost_and_no_session_has_two_histories(tmp_path: Path) -> None:
    rounds = Rounds(tmp_path / "rounds", engines=3, seed=3, stop_seconds=(0.2, 0.5))
    for _ in rounds.run(events=30):
        pass
    assert rounds.tally.failures == []
    assert rounds.tally.turns["stored"] and rounds.tally.turns["refused"]
