"""A log that cannot be written, or that nobody reads, ends nothing and delays nothing for good."""

import fcntl
import logging
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tqdm import tqdm

from rwkv_batch.processes import streams
from rwkv_batch.processes.streams import kept

ROOT = Path(__file__).resolve().parents[2]
LINES = 5000  # more than a pipe holds


def full_disk() -> Iterator[int]:
    descriptor = os.open("/dev/full", os.O_WRONLY)
    yield descriptor
    os.close(descriptor)


def reader_that_has_ended() -> Iterator[int]:
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


def reader_that_does_not_read() -> Iterator[int]:
    reader, writer = os.pipe()
    yield writer
    os.close(reader)
    os.close(writer)


def terminal_that_has_closed() -> Iterator[int]:
    screen, terminal = pty.openpty()
    os.close(screen)
    yield terminal
    os.close(terminal)


def terminal_that_nobody_reads() -> Iterator[int]:
    screen, terminal = pty.openpty()
    yield terminal
    os.close(screen)
    os.close(terminal)


BROKEN = [
    full_disk,
    reader_that_has_ended,
    reader_that_does_not_read,
    terminal_that_has_closed,
    terminal_that_nobody_reads,
]


@pytest.fixture(params=BROKEN, ids=lambda kind: kind.__name__)
def broken(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(streams, "PATIENCE", 0.05)
    yield from request.param()


def test_what_is_written_to_a_broken_log_is_dropped(broken: int) -> None:
    stream = kept(broken)
    handler = logging.StreamHandler(stream)
    record = logging.LogRecord("x", logging.INFO, "", 0, "a line of a log that is not short", (), None)
    with tqdm(total=LINES, file=stream, mininterval=0) as bar:
        for _ in range(LINES):
            print("a line that is printed", file=stream, flush=True)
            handler.emit(record)
            bar.update()
    stream.flush()
    assert bar.n == LINES


def test_a_reader_that_reads_again_gets_what_comes_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "PATIENCE", 0.05)
    reader, writer = os.pipe()
    stream = kept(writer)
    for number in range(LINES):
        print("line", number, "of many that fill the pipe", file=stream)
    os.read(reader, 1 << 20)
    print("the newest line", file=stream)
    assert os.read(reader, 1 << 20).endswith(b"the newest line\n")
    assert not fcntl.fcntl(writer, fcntl.F_GETFL) & os.O_NONBLOCK, (
        "it would hold for everybody who writes there"
    )
    os.close(reader)
    os.close(writer)


def test_a_log_that_is_read_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "PATIENCE", 60.0)  # for a reader that has no core just now
    for place in ("pipe", "file"):
        file = tmp_path / place
        reading = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=file.open("wb"))
        descriptor = os.open(file, os.O_WRONLY) if place == "file" else reading.stdin.fileno()
        stream = kept(descriptor)
        for number in range(LINES):
            print("line", number, "päß 中", file=stream)
        stream.close()
        reading.communicate()
        assert file.read_text("utf-8").splitlines() == [f"line {number} päß 中" for number in range(LINES)]


# Says what its three descriptors and a file that is opened afterwards are.
CLOSED = """
import os, sys
from rwkv_batch.processes.streams import keep_streams
keep_streams()
print("out"); print("error", file=sys.stderr)
opened = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)
kinds = [os.readlink(f"/proc/self/fd/{number}") for number in range(3)]
os.write(opened, repr((opened > 2, kinds, [os.get_inheritable(number) for number in range(3)])).encode())
"""


@pytest.mark.parametrize("closed", ["2>&-", ">&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_a_closed_descriptor_is_not_that_of_the_next_file(closed: str, tmp_path: Path) -> None:
    command = f'exec "$0" -c "$1" "$2" {closed}'
    words = ["sh", "-c", command, sys.executable, CLOSED, str(tmp_path / "file")]
    done = subprocess.run(
        words,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    above, kinds, inherited = eval((tmp_path / "file").read_text())
    assert above and inherited == [True] * 3, "children need them too"
    numbers = [number for number, word in ((0, "<&-"), (1, " >&-"), (2, "2>&-")) if word in f" {closed}"]
    assert all(kinds[number] == "/dev/null" for number in numbers), kinds
    assert done.stderr == (b"" if 2 in numbers else b"error\n")
    assert done.stdout == (b"" if 1 in numbers else b"out\n")
