"""The copy of the file of keys, for a front end that begins while the file cannot be read."""

import errno
import os
import stat
from pathlib import Path
from unittest.mock import Mock

import pytest

from rwkv_batch.keys import records
from rwkv_batch.keys.records import Key, Keyring


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def test_a_copy_that_cannot_be_put_in_its_place_leaves_nothing(file, monkeypatch):
    records.add(file, Key("alice", "", 0, 0.0))
    copy = file.with_name("copy")
    records.read_and_copy(file, copy)
    before, files = copy.read_bytes(), set(file.parent.iterdir())
    records.add(file, Key("bob", "", 0, 0.0))
    with monkeypatch.context() as patch:
        patch.setattr("os.replace", Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
        assert [key.name for key in records.read_and_copy(file, copy)] == ["alice", "bob"]
    assert copy.read_bytes() == before and set(file.parent.iterdir()) == files


@pytest.mark.parametrize("damage", [lambda file: file.write_text("{"), Path.unlink], ids=["damaged", "gone"])
def test_a_front_end_that_begins_with_a_damaged_file_takes_the_keys_from_before(file, damage, caplog):
    secrets = {name: records.add(file, Key(name, "", 0, 0.0)) for name in ("alice", "bob")}
    copy = file.with_name("copy")
    records.read_and_copy(file, copy)
    records.revoke(file, "bob")
    assert Keyring(file, copy).find(secrets["bob"].encode()) is None
    good = file.read_bytes()
    damage(file)
    ring = Keyring(file, copy)
    assert ring.find(secrets["alice"].encode()) and ring.find(secrets["bob"].encode()) is None
    assert not ring.refresh() and stat.S_IMODE(copy.stat().st_mode) == 0o600
    assert len([record for record in caplog.records if "are still taken" in record.message]) == 1
    file.write_bytes(good)
    records.revoke(file, "alice")
    assert ring.refresh() and ring.find(secrets["alice"].encode()) is None
