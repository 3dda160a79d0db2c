"""The file of what keys have used, where it cannot be written or read for a while."""

import sqlite3
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from test_key_limits import key_of, of_alice

from routes.callers import metering
from routes.callers.caller import Caller
from routes.callers.metering import Accounts
from rwkv_batch.keys import records, usage
from rwkv_batch.keys.__main__ import main
from rwkv_batch.keys.records import Key, KeysError
from rwkv_batch.keys.usage import UsageStore, Used, usage_file


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def stores_of(file: Path, monkeypatch: pytest.MonkeyPatch) -> list[UsageStore]:
    """Those that are opened of this file from now on. Threads of earlier tests write to others still."""
    opened, found = UsageStore.__init__, list[UsageStore]()

    def open_(store: UsageStore, path: Path) -> None:
        opened(store, path)
        if path == usage_file(file):
            found.append(store)

    monkeypatch.setattr(UsageStore, "__init__", open_)
    return found


def test_what_cannot_be_written_yet_is_written_later(file, monkeypatch, caplog):
    """A disk that is full: usage waits in memory, and is exact when there is room."""
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    secret = records.add(file, Key("alice", "", 0, 0.0))
    accounts, caller = Accounts(str(file)), Caller()
    caller.is_key(accounts.find(secret.encode()))
    caller.served.model = "m"
    full, add, ours = [True], UsageStore.add, stores_of(file, monkeypatch)

    def added(store: UsageStore, used: object) -> None:
        if full[0] and store in ours:
            raise sqlite3.OperationalError("database or disk is full")
        add(store, used)

    monkeypatch.setattr(UsageStore, "add", added)
    for _ in range(3):
        accounts.began(caller, 1, 10, 0)
        accounts.drew(caller, 5)
        accounts.write()
    full[0] = False
    (used,) = accounts.read_now("alice", "0000-00-00", "9999-99-99")
    assert (used.requests, used.prompt_tokens, used.completion_tokens) == (3, 30, 15)
    assert len([record for record in caplog.records if "it waits until it can" in record.message]) == 1


@pytest.mark.parametrize(
    "error", [sqlite3.OperationalError("disk is full"), MemoryError(), OSError(28, "full")]
)
def test_usage_goes_on_after_an_error_of_any_kind(file, monkeypatch, error):
    """The thread that writes has not ended: what is counted later is written, and what was refused too."""
    accounts, caller = of_alice(file)
    caller.served.model = "m"
    tried, written, add = threading.Event(), threading.Event(), UsageStore.add
    ours = stores_of(file, monkeypatch)

    def added(store: UsageStore, used: object) -> None:
        if store not in ours:
            add(store, used)
        elif not tried.is_set():
            tried.set()
            raise error
        else:
            add(store, used)
            written.set()

    monkeypatch.setattr(UsageStore, "add", added)
    monkeypatch.setattr(metering, "WRITE_EVERY", 0.01)
    accounts.began(caller, 1, 10, 0)
    accounts.write_soon()
    assert tried.wait(60) and written.wait(60)
    (used,) = UsageStore(usage_file(file)).read()
    assert (used.requests, used.prompt_tokens) == (1, 10)


def test_a_front_end_that_begins_on_a_full_disk_counts_all_the_same(file, monkeypatch, caplog):
    key_of(file, "first")
    opened, full = UsageStore.__init__, [True]

    def open_(store: UsageStore, path: Path) -> None:
        if full[0] and path == usage_file(file):
            raise KeysError(f"{path}, where usage is counted, cannot be used (database or disk is full)")
        opened(store, path)

    monkeypatch.setattr(UsageStore, "__init__", open_)
    accounts, caller = of_alice(file)
    caller.served.model = "m"
    accounts.began(caller, 1, 10, 0)
    accounts.write()
    with pytest.raises(KeysError, match="disk is full"):
        accounts.read_now(None, "0000-00-00", "9999-99-99")
    full[0] = False
    (used,) = accounts.read_now("alice", "0000-00-00", "9999-99-99")
    assert used.prompt_tokens == 10
    assert len([record for record in caplog.records if "it waits until it can" in record.message]) == 1


def test_a_usage_file_that_is_opened_again_keeps_its_locks(file, monkeypatch):
    """SQLite's locks end where their process closes any other descriptor of the file."""
    path, read = usage_file(file), "sqlite3.connect(sys.argv[1], timeout=0).execute('SELECT * FROM usage')"
    UsageStore(path).close()
    monkeypatch.setattr(usage, "BUSY_SECONDS", 0)
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("PRAGMA locking_mode = EXCLUSIVE")
    holder.execute("BEGIN EXCLUSIVE")
    with suppress(KeysError):
        UsageStore(path)
    command = [sys.executable, "-c", f"import sqlite3, sys; {read}", str(path)]
    said = subprocess.run(command, capture_output=True, text=True).stderr
    holder.close()
    assert "database is locked" in said


def test_a_usage_file_that_could_once_only_be_read_is_written_later(file, monkeypatch):
    """SQLite opens a file to be read where it cannot open it to be written, as without free descriptors."""
    key_of(file, "first")
    UsageStore(usage_file(file)).close()
    connect, only_read = sqlite3.connect, [True]

    def opened(path: Path, **options: object) -> sqlite3.Connection:
        if only_read[0] and path == usage_file(file):
            return connect(f"file:{path}?mode=ro", uri=True, **options)
        return connect(path, **options)

    monkeypatch.setattr(usage.sqlite3, "connect", opened)
    accounts, caller = of_alice(file)
    caller.served.model = "m"
    accounts.began(caller, 1, 10, 0)
    accounts.write()
    only_read[0] = False
    (used,) = accounts.read_now("alice", "0000-00-00", "9999-99-99")
    assert used.prompt_tokens == 10


def test_a_damaged_usage_file_is_said_in_a_sentence(file, capsys):
    records.add(file, Key("alice", "", 0, 0.0))
    store = UsageStore(path := usage_file(file))
    store.add(Used("alice", f"model{number}", "2027-01-31", 1, 2, 0, 3) for number in range(500))
    store.close()
    data = bytearray(path.read_bytes())
    data[8192:12288] = bytes(4096)
    path.write_bytes(data)
    assert main(["usage", str(file)]) == 2
    assert f"error: {path} cannot be read (database disk image is malformed)" in capsys.readouterr().err
