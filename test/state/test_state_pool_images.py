"""The state pool: which states are stored as images, what becomes of them, and sessions of other servers."""

import errno
import os
import threading
from pathlib import Path

import pytest
import torch
from pools import NEVER, Bench, after, files

from rwkv_batch.state import images as stored_images
from rwkv_batch.state.entries import KeptState, Unread, pack
from rwkv_batch.state.starts.contents import StartContents

BEGINNING = bytes(16)


def full_disk(*arguments: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def seen(*tokens: int) -> bytes:
    """The state after these tokens."""
    return after(BEGINNING, tokens)


def images(path: Path) -> set[str]:
    return {file.name for file in Path(f"{path}.images").glob("*")}


def test_images_are_written_where_they_save_time_and_never_otherwise(path: Path) -> None:
    for replay_rate in (NEVER, 1e-9):
        bench = Bench(path, l1=0, l2=0, replay_rate=replay_rate)
        bench.turn("a", [1, 2, 3])
        bench.settle()
        assert len(images(path)) == (replay_rate != NEVER)
        bench.delete("a")
        bench.close()


def test_no_session_is_left_with_more_tokens_to_replay_than_were_asked_for(path: Path) -> None:
    bench = Bench(path, l1=4, replay_tokens=10, replay_rate=NEVER)
    bench.turn("a", [1] * 8)
    bench.settle()
    assert images(path) == set()
    bench.turn("a", [2] * 8)
    bench.settle()
    assert len(images(path)) == 1, "while the session is still in its slot"
    bench.turn("a", [3] * 8)
    bench.settle()
    assert len(images(path)) == 1, "the bound is reckoned from the last image"
    bench.crash(path.with_name("copy"))
    again = Bench(path.with_name("copy"), replay_rate=NEVER)
    session = again.pool.find("a")
    slot = again.slot()
    loaded = again.do(again.pool.load, session, slot).value
    assert loaded.replay == [3] * 8
    again.feed(slot, loaded.replay)
    assert again.state(slot) == seen(*[1] * 8, *[2] * 8, *[3] * 8)
    again.close()


def test_an_image_that_could_not_be_stored_is_made_up_for(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(path, l1=4, replay_tokens=10, replay_rate=NEVER)
    with monkeypatch.context() as disk:
        disk.setattr(stored_images, "write", full_disk)
        bench.turn("a", [1] * 12)
        bench.settle()
    assert images(path) == set() and "could not be written" in caplog.text
    bench.turn("a", [2])
    bench.settle()
    assert len(images(path)) == 1
    bench.turn("a", [3])
    bench.settle()
    assert len(images(path)) == 1
    bench.close()


def test_closing_writes_the_images_of_what_is_in_memory(path: Path) -> None:
    bench = Bench(path, l1=1, l2=1)
    bench.turn("a", [1])
    bench.turn("b", [2])
    bench.settle()
    assert images(path) == set()
    bench.close()
    assert len(images(path)) == 2
    again = Bench(path)
    slot = again.slot()
    assert again.do(again.pool.load, again.pool.find("a"), slot).value.replay == []
    assert again.state(slot) == seen(1)
    again.close()


@pytest.mark.parametrize("harm", ["flip", "cut", "remove"])
def test_a_damaged_image_costs_time_and_no_session(
    path: Path, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(path, l1=0, l2=0)
    bench.turn("a", [1, 2])
    bench.settle()
    bench.turn("a", [3])
    bench.close()
    file = max(Path(f"{path}.images").iterdir(), key=lambda file: int(file.stem))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    if harm == "remove":
        file.unlink()
    else:
        file.write_bytes(data if harm == "flip" else data[:-1])
    again = Bench(path, l1=0, l2=0)
    assert again.look("a") == seen(1, 2, 3)
    assert "passed over" in caplog.text
    again.settle()
    caplog.clear()
    assert again.look("a") == seen(1, 2, 3) and not caplog.text, "it is not tried again"
    again.close()


def test_an_image_of_another_past_is_not_used(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A database that was put back from a copy, while the images beside it went on."""
    bench = Bench(path, l1=0, l2=0)
    bench.turn("a", [1])
    bench.settle()
    bench.crash(path.with_name("copy"))
    first = Bench(path.with_name("copy"), l1=0, l2=0)
    first.turn("a", [2])
    first.close()
    second = Bench(path, l1=0, l2=0)
    second.turn("a", [3])
    second.close()
    for file in Path(f"{path}.images").iterdir():
        (path.with_name("copy.images") / file.name).write_bytes(file.read_bytes())
    again = Bench(path.with_name("copy"), l1=0, l2=0)
    assert again.look("a") == seen(1, 2) and "passed over" in caplog.text
    again.close()


def test_images_go_before_sessions_when_a_database_is_over_its_limit(path: Path) -> None:
    bench = Bench(path, l1=0, l2=0, limit=150_000)
    for number in range(20):
        bench.turn(f"s{number}", [number] * 4)
        bench.settle()
    assert len(bench.tiers()) == 20 and 0 < len(images(path)) < 10
    assert all(bench.look(f"s{number}") == seen(*[number] * 4) for number in range(20))
    bench.close()


def test_the_oldest_sessions_leave_a_database_that_is_over_its_limit(path: Path) -> None:
    bench = Bench(path, l1=0, l2=0, limit=150_000, token_log=False)
    for number in range(20):
        bench.turn(f"s{number}", [number])
        bench.settle()
    kept = [key for key, _ in bench.tiers()]
    assert 2 < len(kept) < 10 and kept == [f"s{number}" for number in range(19, 19 - len(kept), -1)]
    assert len(images(path)) == len(kept)
    bench.close()


def test_without_a_token_log_no_token_is_on_the_disk(path: Path) -> None:
    secret = list(range(31_000, 31_064))
    bench = Bench(path, l1=0, l2=0, token_log=False)
    bench.turn("a", secret)
    bench.turn("a", [1])
    bench.settle()
    assert bench.look("a") == seen(*secret, 1)
    assert not any(pack(secret)[1:65] in data for data in files(path).values())
    assert len(images(path)) == 1, "the state before the last turn is gone"
    bench.close()


@pytest.mark.parametrize("token_log", [True, False])
def test_a_session_of_another_model_is_refused_and_kept(path: Path, token_log: bool) -> None:
    bench = Bench(path, token_log=token_log)
    bench.turn("a", [1])
    bench.close()
    other = Bench(path, model=("another model", 65536))
    with pytest.raises(LookupError, match=r"made by another model \(0123456789abcdef"):
        other.look("a")
    other.turn("b", [2])
    other.close()
    again = Bench(path)
    assert again.look("a") == seen(1)
    with pytest.raises(LookupError, match="made by another model"):
        again.look("b")
    again.close()


def test_tokens_are_fed_to_a_new_model_if_that_was_asked_for(path: Path) -> None:
    bench = Bench(path)
    bench.turn("a", [1])
    bench.close()
    new = Bench(path, model=("new weights", 65536), replay_on_new_model=True)
    assert new.look("a") == seen(1)
    new.turn("a", [2])
    new.close()
    smaller = Bench(path, model=("other vocabulary", 50277), replay_on_new_model=True)
    with pytest.raises(LookupError, match="made by another model"):
        smaller.look("a")
    smaller.close()


@pytest.mark.parametrize("what", ["both", "tokens", "state"])
def test_an_exported_session_goes_on_elsewhere(path: Path, what: str) -> None:
    bench = Bench(path)
    bench.turn("a", [1, 2])
    bench.turn("a", [3])
    data = bench.do(bench.pool.files.export, "a", what).value
    assert bench.do(bench.pool.files.export, "none", what).error == "There is no session none."
    bench.close()
    elsewhere = Bench(path.with_name("elsewhere.db"), l1=0, l2=0)
    assert elsewhere.do(elsewhere.import_, "b", data).error is None
    elsewhere.turn("b", [4])
    assert elsewhere.look("b") == seen(1, 2, 3, 4) and elsewhere.pool.find("b").head.tokens == 4
    elsewhere.close()
    foreign = Bench(None, model=("another", 65536))
    assert "another model" in foreign.do(foreign.import_, "b", data).error
    foreign.close()


def importing(path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Bench, threading.Event]:
    """A pool with an imported session b of two turns, whose state is written as soon as the event is set."""
    elsewhere = Bench(path.with_name("elsewhere.db"))
    elsewhere.turn("a", [1, 2])
    elsewhere.turn("a", [3])
    data = elsewhere.do(elsewhere.pool.files.export, "a", "both").value
    elsewhere.close()
    gate, bench = delayed_images(monkeypatch), Bench(path, durable=False)
    assert bench.do(bench.import_, "b", data).error is None
    return bench, gate


def delayed_images(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """No state is written before this event is set."""
    gate, write = threading.Event(), stored_images.write
    monkeypatch.setattr(stored_images, "write", lambda *arguments: gate.wait() and write(*arguments))
    return gate


def test_turns_may_follow_an_import_whose_state_is_still_being_written(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was answered before its commit must be there afterwards, in the order in which it came."""
    bench, gate = importing(path, monkeypatch)
    bench.turn("b", [4], "c")
    bench.turn("c", [5])
    bench.turn("b", [6], "d")
    bench.turn("d", [7], "e")
    bench.pool.delete("d", False, bench.callback("delete"))
    past = bench.do(bench.pool.turns, bench.pool.find("b"), range(2)).value[0]
    bench.pool.point(bench.pool.at("f"), past.head(0), bench.callback("rewind"))
    gate.set()
    assert bench.wait("delete").error is None and bench.wait("rewind").error is None
    bench.settle()
    kept = {"b": seen(1, 2, 3), "c": seen(1, 2, 3, 4, 5), "e": seen(1, 2, 3, 6, 7), "f": seen(1, 2)}
    assert {key: bench.look(key) for key in "bcdef" if bench.pool.find(key)} == kept
    bench.close()
    again = Bench(path)
    assert {key: again.look(key) for key in "bcdef" if again.pool.find(key)} == kept
    again.close()


def test_a_turn_may_go_on_from_an_import_that_was_deleted_before_its_state_was_written(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, gate = importing(path, monkeypatch)
    bench.turn("b", [4], "c")
    _, parent, slot = bench.begin("c", last=False)
    for key in "bc":
        bench.pool.delete(key, False, bench.callback(key))
    gate.set()
    assert bench.wait("b").error is None and bench.wait("c").error is None
    bench.settle()
    bench.feed(slot, [5])
    head = bench.pool.commit(bench.pool.at("d"), parent, [5], [], bench.callback("d"))
    bench.pool.keep([KeptState("d", head, slot)])
    bench.pool.unpin(parent)
    bench.settle()
    assert {key: bench.look(key) for key in "bcd" if bench.pool.find(key)} == {"d": seen(1, 2, 3, 4, 5)}
    bench.close()
    again = Bench(path)
    assert again.look("d") == seen(1, 2, 3, 4, 5) and not again.pool.find("c")
    again.close()


def test_a_turn_may_begin_in_a_start_state_that_is_still_being_written(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, bench = delayed_images(monkeypatch), Bench(path, durable=False)
    zeros = StartContents(torch.zeros(1, 2, 64), torch.zeros(1, 1, 64, 64), None, b"start".ljust(16))
    bench.pool.starts.put("poet", lambda: zeros, b"", bench.callback("put"))
    bench.wait_until(lambda: bench.pool.starts.names())
    start, slot = bench.pool.starts.find("poet").session, bench.slot()
    bench.pool.pin(start.head)
    loaded = bench.do(bench.pool.load, start, slot).value
    bench.feed(slot, [1, 2])
    head = bench.pool.commit(bench.pool.at("a"), loaded.head, [1, 2], [], bench.callback("a"))
    bench.pool.keep([KeptState("a", head, slot)])
    bench.pool.unpin(start.head)
    assert bench.wait("a").error is None
    gate.set()
    assert bench.wait("put").error is None
    bench.settle()
    bench.close()
    again = Bench(path)
    assert again.look("a") == seen(1, 2)
    again.close()


@pytest.mark.parametrize("look", ["find", "names"])
def test_a_start_state_that_could_not_be_read_at_the_start_is_there_later(
    path: Path, monkeypatch: pytest.MonkeyPatch, look: str
) -> None:
    bench, read = Bench(path), stored_images.read
    zeros = StartContents(torch.zeros(1, 2, 64), torch.zeros(1, 1, 64, 64), None, b"start".ljust(16))
    bench.pool.starts.put("poet", lambda: zeros, b"", bench.callback("put"))
    assert bench.wait("put").error is None
    bench.settle()
    bench.close()

    def unread(*_: object) -> None:
        raise Unread("The file of a state cannot be read now (Too many open files).")

    monkeypatch.setattr(stored_images, "read", unread)
    again = Bench(path)
    assert again.pool.starts.names() == [] and again.pool.starts.find("poet") is None
    monkeypatch.setattr(stored_images, "read", read)
    if look == "names":
        assert again.pool.starts.names() == ["poet"]
    assert again.pool.starts.find("poet")
    again.close()


def test_a_session_whose_beginning_is_not_known_is_exported_with_a_state(path: Path) -> None:
    bench = Bench(path)
    bench.turn("a", [1, 2])
    assert bench.do(bench.import_, "b", bench.do(bench.pool.files.export, "a", "state").value).error is None
    unknown = "The first tokens of b are not known; export it with its state."
    assert bench.do(bench.pool.files.export, "b", "tokens").error == unknown
    bench.turn("b", [3])
    bench.turn("b", [4])
    assert bench.do(bench.pool.files.export, "b", "tokens").error == unknown
    assert bench.fork("b", "b", 1) is None  # to a turn whose state has gone on, while that before is there
    data = bench.do(bench.pool.files.export, "b", "both").value
    bench.close()
    elsewhere = Bench(path.with_name("elsewhere.db"))
    assert elsewhere.do(elsewhere.import_, "c", data).error is None
    assert elsewhere.look("c") == seen(1, 2, 3)
    elsewhere.close()


def test_a_state_that_is_not_at_hand_is_not_exported(path: Path) -> None:
    bench = Bench(path, l1=0, l2=0, replay_rate=NEVER)
    bench.turn("a", [1])
    bench.settle()
    assert "export its tokens" in bench.do(bench.pool.files.export, "a", "state").error
    assert bench.do(bench.pool.files.export, "a", "both").error is None
    bench.close()
