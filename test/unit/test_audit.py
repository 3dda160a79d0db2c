"""The audit log: a chain that several processes write, which shows every change, and a disk that is full."""

import errno
import fcntl
import hashlib
import itertools
import json
import os
import threading
from pathlib import Path
from typing import BinaryIO

import pytest

from rwkv_batch.audit import log as audit
from rwkv_batch.audit.__main__ import main
from rwkv_batch.audit.lines import AuditError, text_hash, verify
from rwkv_batch.audit.log import AuditLog


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "audit.jsonl"


def write(file: Path, *ids: str) -> None:
    log = AuditLog(file)
    for id_ in ids:
        log.add({"id": id_})
    log.close()


def check(file: Path) -> tuple[int, str]:
    with file.open("rb") as opened:
        return verify(opened)


def test_each_line_has_the_hash_of_the_one_before(file):
    write(file, "a", "b")
    write(file, "c")
    lines = file.read_bytes().splitlines()
    assert [json.loads(line)["id"] for line in lines] == ["a", "b", "c"]
    for before, line in itertools.pairwise(lines):
        assert json.loads(line)["previous"] == hashlib.sha256(before).hexdigest()
    assert check(file) == (3, hashlib.sha256(lines[-1]).hexdigest())


def test_a_string_that_is_no_text_stands_in_its_line(file):
    write(file, "a", "\ud800", "ü\u2028\n")
    ids = [json.loads(line)["id"] for line in file.read_bytes().split(b"\n")[:-1]]
    assert ids == ["a", "\ud800", "ü\u2028\n"]
    assert check(file)[0] == 3


def test_several_that_write_at_once_make_one_chain(file):
    logs = [AuditLog(file) for _ in range(3)]

    def fill(log: AuditLog) -> None:
        for number in range(50):
            log.add({"id": number})

    threads = [threading.Thread(target=fill, args=(log,)) for log in logs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for log in logs:
        log.close()
    assert check(file)[0] == 150


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda lines: [lines[0], lines[1].replace(b'"b"', b'"B"'), lines[2]], "line 3 does not follow"),
        (lambda lines: [lines[0], lines[2]], "line 2 does not follow"),
        (lambda lines: lines[1:], "line 1 does not begin"),
        (lambda lines: [*lines, b'{"id":"d"}'], "line 4 is no line"),
        (lambda lines: [*lines, b"[" * 9999], "line 4 is no line"),
        (lambda lines: [lines[1], lines[0], lines[2]], "line 1 does not begin"),
    ],
)
def test_what_was_changed_is_found(file, change, said, capsys):
    write(file, "a", "b", "c")
    lines = file.read_bytes().splitlines()
    file.write_bytes(b"".join(line + b"\n" for line in change(lines)))
    with pytest.raises(AuditError, match=said):
        check(file)
    assert main(["verify", str(file)]) == 1 and said in capsys.readouterr().err


def test_an_end_that_was_taken_off_is_found_with_a_hash_from_before(file, capsys):
    write(file, "a", "b")
    assert main(["verify", str(file)]) == 0
    last = capsys.readouterr().out.split()[-1]
    write(file, "c")
    assert main(["verify", str(file), "--last", last]) == 0
    file.write_bytes(file.read_bytes().splitlines(True)[0])
    assert main(["verify", str(file), "--last", last]) == 1


def test_a_hash_from_before_the_first_line_is_one_that_the_log_holds(file, capsys):
    write(file)
    assert main(["verify", str(file)]) == 0
    last = capsys.readouterr().out.split()[-1]
    write(file, "a")
    assert main(["verify", str(file), "--last", last]) == 0


def test_a_line_that_a_server_is_writing_is_not_cut_off(file, monkeypatch):
    """One is whole when the lock of the file is free; another is begun behind that."""
    write(file, "a", "b")
    lines, flock = file.read_bytes().splitlines(True), fcntl.flock
    half = lines[1][:20]
    file.write_bytes(lines[0] + half)

    def locked(opened: BinaryIO, kind: int) -> None:
        flock(opened, kind)
        file.write_bytes(lines[0] + lines[1] + (half if kind == fcntl.LOCK_UN else b""))

    monkeypatch.setattr(fcntl, "flock", locked)
    assert main(["verify", str(file)]) == 0


def test_half_a_line_of_a_crash_is_taken_off(file):
    write(file, "a")
    with file.open("ab") as opened:
        opened.write(b'{"id":"b","pre')
    with pytest.raises(AuditError, match="cut off"):
        check(file)
    write(file, "c")
    assert check(file)[0] == 2


def test_a_hole_that_a_power_cut_has_left_is_put_aside(file, caplog):
    """The disk had the later of two writes, and not the earlier."""
    write(file, "a", "b", "c", "d")
    lines = file.read_bytes().splitlines(True)
    behind = bytes(len(lines[2])) + lines[3]
    file.write_bytes(lines[0] + lines[1] + behind)
    write(file, "e")
    assert [json.loads(line)["id"] for line in file.read_bytes().splitlines()] == ["a", "b", "e"]
    assert check(file)[0] == 3
    aside = file.with_name(f"{file.name}.cut-1")
    assert aside.read_bytes() == behind and str(aside) in caplog.text


OTHER_FILES = [
    b"PK\0\0no log\n",
    b"text\n\0\n",
    b'{"a":1}\n\0\n',
    b'{"keys":[]}',  # which has no end of a line
    b'{"id":"a","previous":"0"}\n',
    b'["previous"]\n',
    b"SQLite format 3\0" + bytes(8000),
    b"a" * 70_000,
]


@pytest.mark.parametrize("data", OTHER_FILES)
def test_a_file_of_something_else_is_refused_and_stays_as_it_is(file, data):
    file.write_bytes(data)
    with pytest.raises(AuditError, match=r"audit\.jsonl is no audit log; name another file for --audit-log$"):
        AuditLog(file)
    assert file.read_bytes() == data and [*file.parent.iterdir()] == [file]


def test_a_pipe_is_refused(file):
    os.mkfifo(file)
    with pytest.raises(AuditError, match="is no file; name one for --audit-log"):
        AuditLog(file)


@pytest.mark.parametrize("begin", [b"", b"# a heading of somebody's own\n"])
def test_a_log_with_another_line_at_one_end_is_still_one(file, begin):
    write(file, "a")
    file.write_bytes(begin + file.read_bytes() + (b"" if begin else b"# a note\n"))
    before = file.read_bytes()
    write(file, "b")
    assert file.read_bytes().startswith(before) and file.read_bytes().count(b"\n") == 3


@pytest.mark.parametrize("left", [b'{"id":"a","method":"PO', bytes(300)])
def test_what_a_crash_leaves_of_the_first_line_is_put_aside(file, left):
    file.write_bytes(left)
    write(file, "b")
    assert check(file)[0] == 1 and file.with_name(f"{file.name}.cut-1").read_bytes() == left


def test_what_is_put_aside_is_on_the_disk_before_it_is_cut_off(file, monkeypatch):
    write(file, "a")
    file.write_bytes(file.read_bytes() + bytes(9))
    done, fsync, ftruncate = list[str](), os.fsync, os.ftruncate

    def synced(descriptor: int) -> None:
        fsync(descriptor)
        done.append(f"synced {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")

    def cut(descriptor: int, size: int) -> None:
        ftruncate(descriptor, size)
        done.append("cut off")

    monkeypatch.setattr(audit.os, "fsync", synced)
    monkeypatch.setattr(audit.os, "ftruncate", cut)
    AuditLog(file).close()
    assert done[:3] == [f"synced {file.name}.cut-1", f"synced {file.parent.name}", "cut off"]


def test_lines_are_put_on_the_disk_soon_and_at_the_end(file, monkeypatch):
    synced, sizes, fdatasync = threading.Semaphore(0), [], os.fdatasync

    def noted(descriptor: int) -> None:
        fdatasync(descriptor)
        sizes.append(os.fstat(descriptor).st_size)
        synced.release()

    monkeypatch.setattr(audit.os, "fdatasync", noted)
    monkeypatch.setattr(audit, "SYNC_SECONDS", 0.01)
    log = AuditLog(file)
    log.add({"id": "a"})
    assert synced.acquire(timeout=60) and sizes == [file.stat().st_size]
    log.add({"id": "b"})
    log.close()
    assert sizes[-1] == file.stat().st_size and check(file)[0] == 2


def test_a_disk_that_cannot_sync_ends_nothing(file, monkeypatch, caplog):
    def broken(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(audit.os, "fdatasync", broken)
    write(file, "a", "b")
    assert check(file)[0] == 2
    assert "a power cut may take its last lines" in caplog.text


def test_lines_that_are_lost_at_the_end_are_said(file, monkeypatch, caplog):
    def full(descriptor: int, data: memoryview) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(audit.os, "write", full)
    write(file, "a", "b", "c")
    assert f"3 lines of the audit log {file} are lost" in caplog.text and check(file)[0] == 0


def test_a_full_disk_loses_no_line_and_nobody_waits(file, monkeypatch, caplog):
    """The first write stops in the middle; the lines come when there is room, and once only."""
    full, wrote, full_seen = threading.Event(), os.write, threading.Event()
    halves = iter([10])

    def broken(descriptor: int, data: memoryview) -> int:
        if full.is_set():
            return wrote(descriptor, data)
        if size := next(halves, 0):
            return wrote(descriptor, data[:size])
        full_seen.set()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(audit.os, "write", broken)
    monkeypatch.setattr(audit, "RETRY_SECONDS", 0.01)
    log = AuditLog(file)
    log.add({"id": "a"})
    assert full_seen.wait(60)
    log.add({"id": "b"})
    full.set()
    log.close()
    assert [json.loads(line)["id"] for line in file.read_text().splitlines()] == ["a", "b"]
    assert check(file)[0] == 2
    assert [record.message for record in caplog.records if "its lines wait" in record.message]


@pytest.mark.parametrize("refusals", [0, 1, 2])
def test_lines_that_were_written_before_the_disk_was_full_come_once(file, monkeypatch, refusals):
    """Whether or not the disk takes the half of the last one off again."""
    writes, wrote, ftruncate = itertools.count(), os.write, os.ftruncate
    waits, held, again, refused = threading.Event(), threading.Event(), threading.Event(), itertools.count()

    def write_some(descriptor: int, data: memoryview) -> int:
        match next(writes):
            case 0:
                waits.set()
                assert held.wait(60)
            case 1:
                return wrote(descriptor, data[:-5])
            case 2:
                raise OSError(errno.ENOSPC, "No space left on device")
            case _:
                again.set()
        return wrote(descriptor, data)

    def cut(descriptor: int, size: int) -> None:
        if next(refused) < refusals:
            raise OSError(errno.EIO, "Input/output error")
        ftruncate(descriptor, size)

    monkeypatch.setattr(audit.os, "write", write_some)
    monkeypatch.setattr(audit.os, "ftruncate", cut)
    monkeypatch.setattr(audit, "RETRY_SECONDS", 0.001)
    log = AuditLog(file)
    log.add({"id": "a"})
    assert waits.wait(60)
    for id_ in ("b", "c", "d"):  # in one write
        log.add({"id": id_})
    held.set()
    assert again.wait(60)
    log.close()
    assert [json.loads(line)["id"] for line in file.read_bytes().splitlines()] == ["a", "b", "c", "d"]
    assert check(file)[0] == 4


def test_lines_that_do_not_fit_in_memory_are_counted(file, monkeypatch):
    monkeypatch.setattr(audit, "MOST_WAITING", 2)
    held, wrote = threading.Event(), os.write
    monkeypatch.setattr(audit.os, "write", lambda *given: held.wait(60) and wrote(*given))
    log = AuditLog(file)
    for number in range(6):
        log.add({"id": number})
    held.set()
    log.close()
    entries = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(entries) + sum(entry.get("lost", 0) for entry in entries) == 6
    assert check(file)[0] == len(entries) < 6


def test_a_full_disk_has_few_lines_made_anew(file, monkeypatch):
    """Making all that wait anew each second would take time from what is served."""
    monkeypatch.setattr(audit, "MOST_AT_ONCE", 2)
    monkeypatch.setattr(audit, "RETRY_SECONDS", 0.001)
    sizes, wrote, tried, room = [], os.write, threading.Event(), threading.Event()

    def broken(descriptor: int, data: memoryview) -> int:
        if room.is_set():
            return wrote(descriptor, data)
        sizes.append(bytes(data).count(b"\n"))
        if len(sizes) > 3:
            tried.set()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(audit.os, "write", broken)
    log = AuditLog(file)
    for number in range(9):
        log.add({"id": number})
    assert tried.wait(60)
    room.set()
    log.close()
    assert max(sizes) <= 2 and check(file)[0] == 9


def test_hashes_of_texts():
    assert text_hash(["hello"]) == hashlib.sha256(b"hello").hexdigest()
    parts = [hashlib.sha256(text).hexdigest() for text in (b"a", b"b")]
    assert text_hash(["a", "b"]) == hashlib.sha256("".join(parts).encode()).hexdigest()


def test_a_file_that_cannot_be_written_is_refused_in_a_sentence(tmp_path):
    with pytest.raises(AuditError, match="name a file in a folder of your own"):
        AuditLog(tmp_path)
