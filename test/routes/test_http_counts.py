"""The files in which front ends count requests."""

import os
import subprocess
import sys
from pathlib import Path

from serving import ROOT

COUNT = """
from routes.http.counts import HttpCounts
counts = HttpCounts()
counts.add("/health", "GET", 200)
(family,) = counts.of_all()
print(sum(sample.value for sample in family.samples))
"""


def test_what_they_count_has_its_room_on_the_disk(tmp_path: Path) -> None:
    """Else a disk that is full later would end the process with SIGBUS."""
    env = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", COUNT], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.stdout.split() == ["1.0"], done.stderr
    (file,) = tmp_path.iterdir()
    found = file.stat()
    assert found.st_blocks * 512 >= found.st_size > 0


def test_a_process_that_died_before_it_counted_spoils_nothing(tmp_path: Path) -> None:
    (tmp_path / "counter_1.db").touch()
    env = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", COUNT], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.stdout.split() == ["1.0"], done.stderr


def test_without_room_there_is_a_warning(tmp_path: Path) -> None:
    env = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path / "nowhere")}
    code = "from routes.http.counts import _reserve; _reserve()"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "no room for counts" in done.stderr
