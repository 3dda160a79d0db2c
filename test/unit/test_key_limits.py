"""The file of keys and what their limits count, over several front ends: ledgers of one file."""

import errno
import json
import multiprocessing
import os
import stat
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

import app
from routes.callers.caller import Caller
from routes.callers.metering import Accounts
from routes.callers.wire import CallerWire
from rwkv_batch.keys import ledger as counted
from rwkv_batch.keys import records
from rwkv_batch.keys.__main__ import main
from rwkv_batch.keys.ledger import Ledger, OverLimit, TooManyRows, limits_file
from rwkv_batch.keys.records import Key, Keyring, KeysError
from rwkv_batch.keys.usage import UsageStore, Used, usage_file
from rwkv_batch.wire.client import Job, MakeJob, RequestFailed
from rwkv_batch.wire.protocol import (
    REQUEST_BYTES,
    Accepted,
    Failed,
    GenerateRequest,
    Progress,
    RowDelta,
    SessionTurn,
)

spawn = multiprocessing.get_context("spawn")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


@pytest.fixture
def ledgers(file: Path) -> Iterator[list[Ledger]]:
    """Two front ends."""
    both = [Ledger(limits_file(file)) for _ in range(2)]
    yield both
    for ledger in both:
        ledger.close()


def key_of(file: Path, name: str, **limits: object) -> Key:
    records.add(file, Key(name, "", 0, 0.0, **limits))
    return next(key for key in records.read(file) if key.name == name)


def refused(ledger: Ledger, key: Key, rows: int = 1) -> OverLimit:
    with pytest.raises(OverLimit) as raised:
        ledger.admit(key, rows)
    return raised.value


def test_the_file_holds_no_key_and_is_for_its_owner_alone(file):
    secret = records.add(file, Key("alice", "", 0, 0.0))
    assert secret.startswith("sk-rwkv-") and secret not in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    found = Keyring(file).find(secret.encode())
    assert found and found.name == "alice" and not Keyring(file).find(b"sk-rwkv-other")


def test_a_key_that_is_revoked_is_seen_by_a_ring_that_is_open(file):
    secrets = {name: records.add(file, Key(name, "", 0, 0.0)) for name in ("alice", "bob")}
    ring = Keyring(file)
    alice = ring.find(secrets["alice"].encode())
    assert alice and not ring.refresh()
    records.revoke(file, "alice")
    assert ring.refresh() and ring.is_revoked(alice) and ring.find(secrets["alice"].encode()) is None
    assert ring.find(secrets["bob"].encode())
    file.write_text("{")  # somebody has edited it: what was known stays
    assert not ring.refresh() and ring.find(secrets["bob"].encode())


def test_what_cannot_be_read_is_read_again_without_a_change(file, monkeypatch, caplog):
    """A process that is out of files, or a mode that is mended: neither changes the time of the file."""
    secret = records.add(file, Key("alice", "", 0, 0.0))
    ring, read = Keyring(file), records.read
    records.revoke(file, "alice")

    def broken(path: Path) -> list[Key]:
        raise KeysError(f"{path} cannot be read (Too many open files)")

    monkeypatch.setattr(records, "read", broken)
    assert not ring.refresh() and not ring.refresh() and ring.find(secret.encode())
    assert len([record for record in caplog.records if "are still taken" in record.message]) == 1
    monkeypatch.setattr(records, "read", read)
    assert ring.refresh() and ring.find(secret.encode()) is None and not ring.refresh()


def test_a_key_that_has_just_been_added_is_known_at_once(file, monkeypatch):
    """In each front end, also where nothing has ticked since: its owner sends the first request now."""
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    first = records.add(file, Key("alice", "", 0, 0.0))
    fronts = [Accounts(str(file)) for _ in range(2)]
    second = records.add(file, Key("bob", "", 0, 0.0))
    assert [found.name for front in fronts if (found := front.find(second.encode()))] == ["bob", "bob"]
    records.revoke(file, "alice")
    third = records.add(file, Key("carol", "", 0, 0.0))
    assert fronts[0].find(third.encode()) and fronts[0].find(first.encode()) is None


def test_who_guesses_keys_cannot_have_the_file_read(file, monkeypatch):
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    records.add(file, Key("alice", "", 0, 0.0))
    accounts, read, reads = Accounts(str(file)), records.read, []
    monkeypatch.setattr(records, "read", lambda path: reads.append(path) or read(path))
    assert not any(accounts.find(b"sk-rwkv-%d" % number) for number in range(9)) and not reads
    file.write_text("{")  # nor where it is broken
    assert not any(accounts.find(b"sk-rwkv-%d" % number) for number in range(9)) and len(reads) == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"name": "bob"}, "two keys of the hash"),
        ({"name": "bob", "hash": "ab" * 32}, "two keys of the place 0"),
        ({"hash": "ab" * 32, "place": 1}, "two keys of the name alice"),
        ({"name": "bob", "hash": "ab" * 32, "place": 1, "ends": ""}, "a broken record, 'bob'"),
        ({"name": "bob", "hash": "AB" * 32, "place": 1}, "a broken record, 'bob'"),
    ],
)
def test_a_record_that_was_copied_by_hand_is_refused(file, change, said):
    """Two keys of one place would clear what the other has counted, and so have no limits."""
    alice = key_of(file, "alice")
    file.write_bytes(msgspec.json.encode(records.KeyFile([alice, replace(alice, **change)])))
    with pytest.raises(KeysError, match=said):
        records.read(file)


BAD_VALUES = [
    ("requests_per_minute", -1),
    ("tokens_per_minute", True),
    ("tokens_per_day", 2**62),
    ("rows", 10**30),
    ("batch_bytes", 1.5),
    ("priority", "high"),
    ("models", "demo"),
    ("place", "0"),
    ("revoked", 1e20),  # which no calendar has
]


@pytest.mark.parametrize(("field", "value"), BAD_VALUES)
def test_a_value_that_cannot_be_used_is_refused_by_key_and_field(file, field, value):
    key_of(file, "alice")
    records.add(file, Key("bob", "", 0, 0.0))
    made = json.loads(file.read_bytes())
    made["keys"][1][field] = value
    file.write_text(json.dumps(made))
    with pytest.raises(KeysError, match=rf"has a broken record, 'bob' \({field}: .*; write it with python"):
        records.read(file)


@pytest.mark.parametrize("record", [{"name": 7}, {"hash": "a"}, [], None])
def test_a_record_without_a_name_is_refused_by_its_number(file, record):
    key_of(file, "alice")
    made = json.loads(file.read_bytes())
    file.write_text(json.dumps({"keys": [*made["keys"], record]}))
    with pytest.raises(KeysError, match=r"has a broken record, 2 \("):
        records.read(file)


def test_a_broken_value_leaves_the_keys_from_before(file, caplog):
    """The server runs, and its log names what was mistyped."""
    secret = records.add(file, Key("alice", "", 0, 0.0))
    ring = records.Keyring(file)
    made = json.loads(file.read_bytes())
    made["keys"][0]["rows"] = -4
    file.write_text(json.dumps(made))
    assert not ring.refresh() and ring.find(secret.encode())
    assert "'alice' (rows: " in caplog.text


def test_a_link_in_the_place_of_the_new_file_is_not_written_through(file):
    """The folder may belong to the server's user, and root may change the keys."""
    other = file.with_name("other")
    other.write_text("stays")
    file.with_name("keys.json.new").symlink_to(other)
    records.add(file, Key("alice", "", 0, 0.0))
    assert other.read_text() == "stays" and not file.is_symlink()
    file.with_name("keys.json.lock").unlink()
    file.with_name("keys.json.lock").symlink_to(file.with_name("made"))
    with pytest.raises(KeysError, match="cannot be changed"):
        records.add(file, Key("bob", "", 0, 0.0))
    assert not file.with_name("made").exists()


def test_a_ledger_may_be_asked_while_it_counts(file, ledgers):
    """A handler that the garbage collector finds meanwhile asks it in the same thread."""
    key = key_of(file, "alice", tokens_per_minute=100)

    def more() -> Iterator[tuple[Key, int]]:
        ledgers[0].spend([(key, 60)])
        yield key, 40

    counting = threading.Thread(target=ledgers[0].spend, args=(more(),), daemon=True)
    counting.start()
    counting.join(60)
    assert not counting.is_alive()
    refused(ledgers[1], key)


def test_a_name_is_given_once_and_a_place_to_one_key_at_a_time(file):
    alice, bob = key_of(file, "alice"), key_of(file, "bob")
    assert alice.place != bob.place
    with pytest.raises(KeysError, match="is there already"):
        records.add(file, Key("alice", "", 0, 0.0))
    records.revoke(file, "alice")
    with pytest.raises(KeysError, match="keeps its name"):
        records.add(file, Key("alice", "", 0, 0.0))
    assert key_of(file, "carol").place == alice.place


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b'{"keys":[{"name":"a b","hash":"00","place":0,"created":0}]}',
        b'{"keys":[{"name":"Zo\xe9","hash":"00","place":0,"created":0}]}',  # written in Latin-1
        b'{"keys":[],"notes":' + b"[" * 9999,
    ],
)
def test_a_file_that_is_none_of_keys_is_refused_in_a_sentence(file, data):
    file.write_bytes(data)
    with pytest.raises(KeysError, match="write it with python"):
        records.read(file)


def test_requests_of_a_minute_are_counted_exactly_over_all_front_ends(file, ledgers):
    """By many threads at once: not one more is taken."""
    key, other = key_of(file, "alice", requests_per_minute=50), key_of(file, "bob", requests_per_minute=7)

    def ask(number: int) -> tuple[int, int]:
        which = number % 2
        try:
            ledgers[number // 2 % 2].admit((key, other)[which], 1)
        except OverLimit:
            return which, 0
        return which, 1

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(ask, range(300)))
    taken = [sum(count for which, count in answers if which == each) for each in range(2)]
    assert taken == [50, 7]
    error = refused(ledgers[1], key)
    assert 0 < error.retry_after <= 60 and "50 requests a minute" in str(error)
    assert error.standings.requests and error.standings.requests.remaining == 0


def _admit(path: str, key: Key, count: int) -> int:
    """In a process of its own."""
    ledger, taken = Ledger(path), 0
    for _ in range(count):
        try:
            ledger.admit(key, 1)
        except OverLimit:
            continue
        taken += 1
    return taken


def test_and_over_processes(file):
    key = key_of(file, "alice", requests_per_minute=300)
    with spawn.Pool(3) as pool:
        taken = pool.starmap(_admit, [(str(limits_file(file)), key, 200)] * 3)
    assert sum(taken) == 300


def test_a_new_minute_begins_with_the_first_request_behind_the_old_one(file, ledgers, monkeypatch):
    key = key_of(file, "alice", requests_per_minute=1)
    now = [10**12]
    monkeypatch.setattr(counted.time, "monotonic_ns", lambda: now[0])
    ledgers[0].admit(key, 1)
    now[0] += 59 * 10**9
    assert round(refused(ledgers[1], key).retry_after) == 1
    now[0] += 2 * 10**9
    ledgers[1].admit(key, 1)
    now[0] = 5  # the machine has started again, and with it the clock
    ledgers[0].admit(key, 1)


def test_tokens_of_a_minute_and_a_day(file, ledgers, monkeypatch):
    minute, day = (
        key_of(file, "a", tokens_per_minute=100),
        key_of(file, "b", tokens_per_day=100, tokens_per_minute=10**9),
    )
    for key in (minute, day):
        standings = ledgers[0].admit(key, 1)
        assert standings.tokens and standings.tokens.remaining in (100, 10**9)
        ledgers[0].spend([(key, 60)])
        ledgers[1].admit(key, 1)  # there are tokens left
        ledgers[1].spend([(key, 60)])
        assert "tokens a" in str(refused(ledgers[0], key))
    now = counted.time.monotonic_ns() + 61 * 10**9
    monkeypatch.setattr(counted.time, "monotonic_ns", lambda: now)
    ledgers[0].admit(minute, 1)
    assert "a day" in str(refused(ledgers[0], day))
    tomorrow = counted.time.time() + 86400
    monkeypatch.setattr(counted.time, "time", lambda: tomorrow)
    ledgers[0].admit(day, 1)


def test_a_clock_that_is_set_back_over_midnight_begins_no_day_anew(file, ledgers, monkeypatch):
    key, midnight = key_of(file, "alice", tokens_per_day=100), 20_000 * 86400
    clock = [midnight + 10]
    monkeypatch.setattr(counted.time, "time", lambda: clock[0])
    ledgers[0].admit(key, 1)
    ledgers[0].spend([(key, 120)])
    clock[0] = midnight - 10
    assert refused(ledgers[0], key).retry_after == 86400 + 10
    clock[0] = midnight - 30 * 86400  # the other time was wrong
    ledgers[0].admit(key, 1)


def test_of_several_limits_that_are_used_up_the_last_to_end_says_when(file, ledgers, monkeypatch):
    key = key_of(file, "alice", tokens_per_minute=10, tokens_per_day=10)
    noon = 20_000 * 86400 + 43200
    monkeypatch.setattr(counted.time, "time", lambda: noon)
    ledgers[0].admit(key, 1)
    ledgers[0].spend([(key, 20)])
    found = refused(ledgers[0], key)
    assert "tokens a day; try again in 43200 s" in str(found) and found.retry_after == 43200
    evening = noon + 43190
    monkeypatch.setattr(counted.time, "time", lambda: evening)
    assert "tokens a minute" in str(refused(ledgers[0], key))


def test_rows_at_once_are_those_of_all_front_ends(file, ledgers):
    key = key_of(file, "alice", rows=4)
    ledgers[0].admit(key, 3)
    assert "3 rows running of 4" in str(refused(ledgers[1], key, 2))
    ledgers[1].admit(key, 1)
    refused(ledgers[0], key)
    ledgers[0].release(key, 3)
    ledgers[1].admit(key, 3)
    with pytest.raises(TooManyRows, match=r"5 rows.*send fewer prompts"):
        ledgers[0].admit(key, 5)


def test_rows_of_a_front_end_that_has_died_do_not_count(file):
    key = key_of(file, "alice", rows=2)
    dead, alive = Ledger(limits_file(file)), Ledger(limits_file(file))
    dead.admit(key, 2)
    refused(alive, key)
    dead.close()
    alive.admit(key, 2)
    alive.close()


def test_the_place_of_a_revoked_key_begins_anew(file, ledgers):
    old = key_of(file, "alice", requests_per_minute=1)
    ledgers[0].admit(old, 1)
    new = replace(old, name="bob", hash="ab" * 32)
    ledgers[0].admit(new, 1)
    refused(ledgers[1], new)


def test_usage_adds_up_and_stays(file):
    path = usage_file(file)
    store = UsageStore(path)
    store.add([Used("alice", "m", "2026-01-01", 1, 10, 2, 5), Used("bob", "m", "2026-01-01", 1, 1, 0, 1)])
    store.add([Used("alice", "m", "2026-01-01", 1, 10, 0, 6), Used("alice", "m", "2026-01-02", 1, 1, 0, 1)])
    store.close()
    again = UsageStore(path)
    assert again.read("alice", last="2026-01-01") == [Used("alice", "m", "2026-01-01", 2, 20, 2, 11)]
    assert len(again.read()) == 3 and len(again.read(first="2026-01-02")) == 1
    again.close()


def test_the_commands(file, capsys):
    limits = ["--requests-per-minute", "60", "--models", "a,b", "--no-sessions", "--ends", "2099-01-31"]
    assert main(["add", str(file), "alice", *limits]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("sk-rwkv-") and said.out.count("\n") == 1
    assert Keyring(file).find(said.out.strip().encode())
    assert main(["list", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "alice" in shown and "models a,b; 60 requests/min; no sessions" in shown
    assert main(["list", str(file), "--json"]) == 0
    assert "hash" not in json.loads(capsys.readouterr().out)
    store = UsageStore(usage_file(file))
    store.add([Used("alice", "a", "2026-01-01", 3, 4, 0, 5)])
    store.close()
    assert main(["usage", str(file)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split() == [
        "alice",
        "a",
        "2026-01-01",
        "3",
        "4",
        "0",
        "5",
    ]
    assert main(["revoke", str(file), "alice"]) == 0
    assert main(["revoke", str(file), "alice"]) == 2
    assert main(["usage", str(file.with_name("none"))]) == 2
    assert "python -m rwkv_batch.keys add" in capsys.readouterr().err


def test_a_file_that_root_changes_stays_the_servers(file):
    """Others cannot give files away, and theirs stay their own."""
    first, second = (1000, 1001) if os.geteuid() == 0 else (os.geteuid(), os.geteuid())
    os.chown(file.parent, first, -1)
    records.add(file, Key("alice", "", 0, 0.0))
    assert file.stat().st_uid == first
    os.chown(file, second, -1)
    records.revoke(file, "alice")
    assert file.stat().st_uid == second


@pytest.mark.parametrize(
    ("flag", "said"),
    [("--keys", "python -m rwkv_batch.keys add"), ("--audit-log", "name a file in a folder of your own")],
)
def test_a_server_does_not_start_with_a_file_that_it_cannot_use(file, capsys, monkeypatch, flag, said):
    monkeypatch.setattr(app, "keep_streams", lambda: None)  # of this process
    missing = file if flag == "--keys" else file.parent
    assert app.main([flag, str(missing), "--state-db", ":memory:"]) == 2
    assert said in capsys.readouterr().err


def test_tokens_of_a_key_are_taken_from_its_limits_once(file):
    secret = records.add(file, Key("alice", "", 0, 0.0, tokens_per_minute=100))
    accounts, caller = Accounts(str(file)), Caller()
    key = accounts.find(secret.encode())
    caller.is_key(key)
    for _ in range(4):
        accounts.drew(caller, 10)
    accounts.spend()
    accounts.spend()
    assert accounts.ledger.admit(key, 1).tokens.remaining == 60


class Outbox:
    """A wire whose engine never answers."""

    def __init__(self) -> None:
        self.sent: list[GenerateRequest] = []

    def submit(self, request: GenerateRequest, kind: MakeJob) -> Job:
        self.sent.append(request)
        return kind(request, lambda id_: None)


def of_alice(file: Path, **limits: object) -> tuple[Accounts, Caller]:
    secret = records.add(file, Key("alice", "", 0, 0.0, **limits))
    accounts, caller = Accounts(str(file)), Caller()
    caller.is_key(accounts.find(secret.encode()))
    return accounts, caller


def test_a_request_whose_key_is_revoked_before_it_is_submitted_ends(file):
    accounts, caller = of_alice(file, rows=4)
    wire = CallerWire(Outbox(), caller, accounts)
    first = wire.submit(GenerateRequest("a", ["Hi"], max_tokens=5))
    records.revoke(file, "alice")
    accounts.tick()
    later = wire.submit(GenerateRequest("b", ["Hi"], max_tokens=5))  # a round of a translation
    for job in (first, later):
        with pytest.raises(RequestFailed, match="has been revoked"):
            job.read(0)
    assert not accounts.jobs
    accounts.ledger.admit(caller.key, 4)


class BrokenWire:
    """A wire that fails: before it has made the job, behind that, and also where it cancels."""

    def __init__(self, fails: str) -> None:
        self._fails = fails

    def _cancel(self, id_: str) -> None:
        if self._fails == "to cancel":
            raise OSError(errno.EBADF, "Bad file descriptor")

    def submit(self, request: GenerateRequest, kind: MakeJob) -> Job:
        if self._fails != "at once":
            kind(request, self._cancel)
        raise MemoryError


@pytest.mark.parametrize("turn", [None, SessionTurn("s", "s")])
@pytest.mark.parametrize("fails", ["at once", "to send", "to cancel"])
@pytest.mark.parametrize("first", [True, False])
def test_what_cannot_be_sent_has_no_rows_running(file, fails, first, turn):
    """Nor does a later round of a request, whose first one has its rows still, and gives them back."""
    accounts, caller = of_alice(file, rows=4)
    before = None if first else CallerWire(Outbox(), caller, accounts).submit(GenerateRequest("0", ["Hi"], 1))
    with pytest.raises((MemoryError, OSError)):
        CallerWire(BrokenWire(fails), caller, accounts).submit(GenerateRequest("a", ["Hi"] * 2, 1, turn=turn))
    if before:
        assert accounts.jobs == {before}
        before.cancel()
    known = []
    caller.served.when_known(lambda: known.append(True))
    assert known and not accounts.jobs
    accounts.ledger.admit(caller.key, 4)


def test_a_turn_that_is_resumed_has_the_id_that_it_was_sent_with(file):
    """The client may send it again under its Idempotency-Key."""
    accounts, caller = of_alice(file)
    outbox = Outbox()
    wire = CallerWire(outbox, caller, accounts)
    turn = SessionTurn("s", "s", request=b"r" * REQUEST_BYTES)
    wire.submit(GenerateRequest("a", ["Hi"], max_tokens=5, name="n", turn=turn))
    wire.submit(replace(outbox.sent[0], id="b", name="n"))
    assert outbox.sent[0].turn == outbox.sent[1].turn and outbox.sent[0].turn.request != turn.request


def test_what_a_client_leaves_unread_counts_once(file):
    """A turn may be stored by then, and its text can be read from there."""
    accounts, caller = of_alice(file, tokens_per_minute=100)
    job = CallerWire(Outbox(), caller, accounts).submit(GenerateRequest("a", ["Hi"], max_tokens=50))
    job.put(Progress("a", [RowDelta(0, "read", 10)]))
    assert [delta.text for delta in job.read(0)] == ["read"]
    job.put(Progress("a", [RowDelta(0, "unread", 20)]))
    job.cancel()
    job.cancel()
    with pytest.raises(RequestFailed, match="was cancelled"):
        job.read(0)
    assert caller.served.completion_tokens == 30
    assert accounts.ledger.admit(caller.key, 1).tokens.remaining == 70


def test_a_turn_that_was_stored_before_is_a_request_without_tokens(file):
    accounts, caller = of_alice(file, tokens_per_minute=100)
    request = GenerateRequest("a", ["Hi"], max_tokens=50, turn=SessionTurn("s", "s", request=b"r" * 16))
    for number, repeated in enumerate((False, True, True)):
        job = CallerWire(Outbox(), caller, accounts).submit(replace(request, id=str(number)))
        job.put(Accepted(job.request.id, [7]))
        job.put(Progress(job.request.id, [RowDelta(0, "said", 5, "stop")], repeated=repeated))
        assert [delta.tokens for delta in job.read(0)] == [5], "the reply is the same"
    (used,) = accounts.read_now("alice", "0000-00-00", "9999-99-99")
    assert (used.prompt_tokens, used.completion_tokens) == (7, 5)
    assert (caller.served.prompt_tokens, caller.served.completion_tokens) == (7, 5)
    assert accounts.ledger.admit(caller.key, 1).tokens.remaining == 88


def test_a_turn_that_is_cancelled_before_it_says_anything_counts_its_prompt(file):
    accounts, caller = of_alice(file)
    turn = SessionTurn("s", "s", request=b"r" * 16)
    job = CallerWire(Outbox(), caller, accounts).submit(GenerateRequest("a", ["Hi"], max_tokens=5, turn=turn))
    job.put(Accepted("a", [7]))
    job.cancel()
    job.put(Failed("a", "The request was cancelled."))
    (used,) = accounts.read_now("alice", "0000-00-00", "9999-99-99")
    assert (used.requests, used.prompt_tokens) == (1, 7)


@pytest.mark.parametrize("stored", [True, False])
def test_what_a_turn_is_stored_with_counts_though_its_client_has_left(file, stored):
    """Its last tokens leave the engine when they are stored; it is noted when that is known."""
    accounts, caller = of_alice(file)
    turn, noted = SessionTurn("s", "s"), list[int]()
    job = CallerWire(Outbox(), caller, accounts).submit(GenerateRequest("a", ["Hi"], max_tokens=9, turn=turn))
    job.put(Accepted("a", [7]))
    job.put(Progress("a", [RowDelta(0, "one two", 2)]))
    assert job.read(0)
    job.cancel()
    caller.served.when_known(lambda: noted.append(caller.served.completion_tokens))
    job.put(Progress("a", [RowDelta(0, " three", 1)]))
    assert not noted, "more may come"
    last = Progress("a", [RowDelta(0, " four", 1, "length")])
    job.put(last if stored else Failed("a", "The request was cancelled."))
    assert noted == [4 if stored else 3]
    (used,) = accounts.read_now("alice", "0000-00-00", "9999-99-99")
    assert used.completion_tokens == noted[0]
