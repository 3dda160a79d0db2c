"""Batches over a folder, without a server: what is done again, what expires, what is refused."""

import asyncio
import errno
import io
import json
import os
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from rwkv_batch import batch as batch_command
from rwkv_batch.batches import runner
from rwkv_batch.batches.file_rows import FileRows, NoAnswers, done_in
from rwkv_batch.batches.lines import MOST_LINES, InputLine, check
from rwkv_batch.batches.records import BatchRecord, RowResult, new_id
from rwkv_batch.batches.runner import BatchRunner, RowReply, Width
from rwkv_batch.batches.store import BatchesError, BatchStore, QuotaExceeded, file_of
from rwkv_batch.processes.child import CannotStart

URL = "/v1/completions"
OVER = ("completed", "failed", "expired", "cancelled")


def request(number: int, **fields) -> bytes:
    return json.dumps({"custom_id": str(number), "method": "POST", "url": URL, "body": {}} | fields).encode()


def upload(store: BatchStore, data: bytes, owner: str = "") -> str:
    return store.add_file(file_of(owner, "rows.jsonl"), lambda path: path.write_bytes(data)).id


def begin(store: BatchStore, rows: int, window: int = 3600, owner: str = "") -> str:
    """A batch of so many rows."""
    file, now = upload(store, b"\n".join(map(request, range(rows)))), int(time.time())
    batch = BatchRecord(
        id=new_id("batch_"),
        owner=owner,
        endpoint=URL,
        input_file=file,
        window="1h",
        created=now,
        expires=now + window,
    )
    store.add_batch(batch)
    return batch.id


class Asked:
    """Answers rows, and counts how often each has been asked for. `then` is called before an answer.

    `first`: rows from that one on are never answered.
    """

    def __init__(
        self, then: Callable[[str], RowReply | None] = lambda name: None, first: int = MOST_LINES
    ) -> None:
        self._first = first
        self.rows: Counter[str] = Counter()
        self.at_once = self.most = 0
        self._then = then

    async def __call__(self, line: InputLine, deadline: float, owner: str) -> RowReply:
        self.rows[line.custom_id] += 1
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        try:
            await asyncio.sleep(0)
            if int(line.custom_id) >= self._first:
                await asyncio.Event().wait()
            return self._then(line.custom_id) or RowReply(200, "r", {"text": line.custom_id})
        finally:
            self.at_once -= 1


def run(store: BatchStore, asked: Asked, until: Callable[[], bool], width: int = 4) -> None:
    """Run batches until this is true."""

    async def serve() -> None:
        runner = asyncio.create_task(BatchRunner(store, asked, lambda: width, 30).run())
        while not until():
            await asyncio.sleep(0.01)
            assert not runner.done()
        runner.cancel()
        with pytest.raises(asyncio.CancelledError):
            await runner

    asyncio.run(asyncio.wait_for(serve(), 120))  # a deadline


def over(store: BatchStore, name: str) -> Callable[[], bool]:
    return lambda: store.batch(name).status in OVER


def custom_ids(store: BatchStore, file: str | None) -> list[str]:
    lines = store.path(file).read_text().splitlines() if file else []
    return [json.loads(line)["custom_id"] for line in lines]


@pytest.fixture
def store(tmp_path: Path) -> BatchStore:
    return BatchStore(tmp_path / "batches")


def test_rows_that_are_done_are_not_done_again_by_the_next_process(store: BatchStore):
    name = begin(store, 40)
    first = Asked(first=10)
    run(store, first, lambda: store.batch(name).completed == 10)
    kept = store.done(name)
    assert kept == set(range(10))
    second = Asked()
    run(store, second, over(store, name))
    batch = store.batch(name)
    assert (batch.status, batch.completed, batch.failed) == ("completed", 40, 0)
    assert not {str(line) for line in kept} & second.rows.keys()
    assert custom_ids(store, batch.output_file) == [str(i) for i in range(40)]
    assert first.most <= 4 and batch.error_file is None


def test_a_process_that_ends_while_files_are_written_is_followed_by_one_that_writes_them(store: BatchStore):
    name = begin(store, 5)
    run(store, Asked(first=4), lambda: len(store.done(name)) == 4)
    store.put_result(name, RowResult(4, True, '{"custom_id": "4"}'))
    batch = store.change(name, ("in_progress",), "finalizing")
    store.write_results(batch, True)
    asked = Asked()
    run(store, asked, over(store, name))
    assert store.batch(name).status == "completed" and not asked.rows
    assert len([file for file in store.files() if file.purpose == "batch_output"]) == 1


def test_rows_are_asked_again_while_the_server_cannot_answer(store: BatchStore):
    refusals = iter([429, 503, 503])

    def refuse(name: str) -> RowReply | None:
        return RowReply(status, "r", {"error": {}}) if (status := next(refusals, 0)) else None

    name = begin(store, 2)
    run(store, Asked(refuse), over(store, name))
    assert store.batch(name).completed == 2


@pytest.mark.parametrize(("asked_for", "waited"), [(7.0, 7.0), (80_000.0, 60.0), (0.0, 0.25)])
def test_a_row_waits_for_as_long_as_its_reply_asks(monkeypatch, asked_for: float, waited: float):
    """A key that has no tokens left today is asked for again each minute: it may get others."""
    replies = iter([RowReply(429, "r", {"error": {}}, asked_for), RowReply(200, "r", {})])
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    async def answer(line: InputLine, deadline: float, owner: str) -> RowReply:
        return next(replies)

    monkeypatch.setattr(runner.asyncio, "sleep", sleep)
    line = InputLine("0", URL, {})
    assert asyncio.run(runner.answered(line, answer, 0.0, ""))[1]
    assert waits == [waited]


def test_a_row_that_fails_again_and_again_is_an_error(store: BatchStore):
    asked = Asked(lambda name: RowReply(500, "r", {"error": {}}) if name == "1" else None)
    name = begin(store, 3)
    run(store, asked, over(store, name))
    batch = store.batch(name)
    assert (batch.status, batch.completed, batch.failed) == ("completed", 2, 1)
    assert custom_ids(store, batch.error_file) == ["1"] and asked.rows["1"] == 3


def test_what_is_left_at_the_end_of_the_window_has_expired(store: BatchStore):
    name = begin(store, 6, window=3600)

    def late(row: str) -> RowReply | None:
        if row == "2":
            store.put_batch(replace(store.batch(name), expires=int(time.time()) - 1))
        return None if row in "01" else RowReply(503, "r", {})

    run(store, Asked(late), over(store, name))
    batch = store.batch(name)
    assert (batch.status, batch.completed, batch.failed) == ("expired", 2, 4)
    errors = [json.loads(line) for line in store.path(batch.error_file).read_text().splitlines()]
    assert {each["error"]["code"] for each in errors} == {"batch_expired"}
    assert custom_ids(store, batch.error_file) == list("2345")


def test_a_batch_whose_file_is_gone_has_failed(store: BatchStore):
    name = begin(store, 2)
    store.path(store.batch(name).input_file).unlink()
    run(store, Asked(), over(store, name))
    assert [error.code for error in store.batch(name).errors] == ["missing_file"]


@pytest.mark.parametrize(("window", "status"), [(-7 * 86400, "failed"), (3600, "validating")])
def test_a_batch_whose_file_cannot_be_read_is_not_tried_for_ever(store, monkeypatch, window, status):
    name, tries = begin(store, 2, window=window), []

    def refused(*_: object) -> None:
        tries.append(1)
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(runner, "check", refused)
    monkeypatch.setattr(runner, "REST", 0.0)
    run(store, Asked(), lambda: over(store, name)() or len(tries) == 5)
    assert store.batch(name).status == status


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "empty_file"),
        (b"\xff\xfe", "invalid_json_line"),
        (b"[]", "invalid_request"),
        (b'{"custom_id":"1","body":' + b'{"a":' * 9999, "invalid_json_line"),
        (request(1, custom_id=""), "invalid_custom_id"),
        (request(1, method="GET"), "invalid_method"),
        (request(1, body="text"), "invalid_request"),
        (request(1, url="/v1/models"), "mismatched_endpoint"),
        (request(1) + b"\n" + request(1), "duplicate_custom_id"),
        (b"\n".join(map(request, range(MOST_LINES + 1))), "too_many_tasks"),
    ],
)
def test_lines_that_cannot_be_run_have_a_code(data: bytes, code: str):
    _, errors = check(data.split(b"\n"), URL)
    assert [error.code for error in errors] == [code]


def test_a_file_may_begin_with_a_byte_order_mark():
    """As the shells of Windows write it."""
    first, second = (request(number) + b"\r\n" for number in (1, 2))
    assert check((b"\xef\xbb\xbf" + first + b"\r\n" + second).splitlines(keepends=True), URL) == (2, [])


def test_files_have_a_quota_and_old_ones_go(tmp_path: Path):
    store = BatchStore(tmp_path, quota=100)
    first = upload(store, b"x" * 60)
    with pytest.raises(QuotaExceeded, match="delete some"):
        upload(store, b"x" * 60)
    assert [file.id for file in store.files()] == [first] and not list(tmp_path.glob("*.part"))
    store.expire(days=30)
    assert store.file(first)
    store.expire(days=-1)
    assert store.file(first) is None and not store.path(first).exists()
    upload(store, b"x" * 60)


def test_files_of_a_key_have_a_quota_of_their_own(store: BatchStore):
    """What came of its batches counts, and files of others do not."""

    def add(owner: str, size: int) -> str:
        file = file_of(owner, "rows.jsonl")
        return store.add_file(file, lambda path: path.write_bytes(b"x" * size), most=500).id

    add("ben", 400)
    run(store, Asked(), over(store, name := begin(store, 1, owner="anna")))
    taken = store.bytes_of_files("anna")
    assert taken > store.file(store.batch(name).input_file).bytes
    with pytest.raises(QuotaExceeded, match="of this key together have 500 at most"):
        add("anna", 501 - taken)
    assert store.bytes_of_files("anna") == taken
    add("anna", 500 - taken)


def test_what_a_batch_under_way_needs_is_kept(store: BatchStore):
    name = begin(store, 2)
    store.expire(days=-1)
    assert store.batch(name) and store.file(store.batch(name).input_file)
    run(store, Asked(), over(store, name))
    store.expire(days=-1)
    assert store.batch(name) is None and store.files() == []


def test_what_belongs_to_a_key_is_listed_for_it(store: BatchStore):
    mine, other = upload(store, b"{}", "me"), upload(store, b"{}", "you")
    assert [file.id for file in store.files("me")] == [mine]
    assert [file.id for file in store.files()] == [other, mine]


def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BatchesError, match="--batch-dir"):
        BatchStore(tmp_path / "file")


def test_a_folder_whose_database_can_only_be_read_is_refused(tmp_path: Path, monkeypatch):
    folder, connect = tmp_path / "batches", sqlite3.connect
    BatchStore(folder).close()

    def opened(path: Path, **options: object) -> sqlite3.Connection:
        return connect(f"file:{path}?mode=ro", uri=True, **options)

    monkeypatch.setattr(sqlite3, "connect", opened)
    with pytest.raises(BatchesError, match="cannot be used"):
        BatchStore(folder)


def test_a_batch_that_is_cancelled_while_its_lines_are_checked_ends(store: BatchStore, monkeypatch):
    name, checking, ended = begin(store, 3), threading.Event(), threading.Event()
    front_end = BatchStore(store.path(""))

    def slow_check(*_):
        if not checking.is_set():
            checking.set()
            front_end.change(name, ("validating",), "cancelling")
            ended.wait(60)
        return 3, []

    def until() -> bool:
        if over(store, name)():
            ended.set()
        return ended.is_set()

    monkeypatch.setattr(runner, "check", slow_check)
    run(store, Asked(), until)
    assert store.batch(name).status == "cancelled"


def test_a_batch_that_was_late_before_its_lines_are_checked_expires(store: BatchStore, monkeypatch):
    name, checks, ended = begin(store, 3, window=-1), [], threading.Event()

    def slow_check(*_):
        checks.append(1)
        ended.wait(3 * runner.POLL)
        return 3, []

    monkeypatch.setattr(runner, "check", slow_check)
    run(store, Asked(first=0), over(store, name))
    assert store.batch(name).status == "expired" and len(checks) == 1
    assert custom_ids(store, store.batch(name).error_file) == list("012")


def test_files_are_written_once_though_the_window_ends_meanwhile(store: BatchStore, monkeypatch):
    name, write, again, calls = begin(store, 3), store.write_results, threading.Event(), []
    front_end = BatchStore(store.path(""))

    def slow_write(batch: BatchRecord, succeeded: bool) -> str | None:
        calls.append(succeeded)
        if len(calls) == 1:
            store.put_batch(replace(store.batch(name), expires=int(time.time()) - 1))
            again.wait(3 * runner.POLL)
        else:
            again.set()
        return write(batch, succeeded)

    def until() -> bool:
        upload(front_end, b"{}")  # which has the batches looked at
        return over(store, name)()

    monkeypatch.setattr(store, "write_results", slow_write)
    run(store, Asked(), until)
    batch = store.batch(name)
    assert calls == [True, False]
    assert (batch.status, batch.completed) == ("completed", 3)
    assert custom_ids(store, batch.output_file) == list("012")


def test_a_batch_goes_on_when_the_disk_has_room_again(store: BatchStore, monkeypatch):
    name, put, full = begin(store, 5), store.put_result, iter([True])

    def put_result(batch: str, result: RowResult) -> None:
        if result.line == 3 and next(full, False):
            raise sqlite3.OperationalError("database or disk is full")
        put(batch, result)

    monkeypatch.setattr(store, "put_result", put_result)
    monkeypatch.setattr(runner, "REST", 0.0)
    run(store, Asked(), over(store, name))
    assert (store.batch(name).status, store.batch(name).completed) == ("completed", 5)


def test_rows_that_end_before_they_begin_keep_no_place(store: BatchStore, monkeypatch):
    """The file cannot be read any further, each time as its first row is about to begin."""
    name, numbered, tries = begin(store, 2), runner.numbered, []

    def cut_off(lines):
        for number, line in numbered(lines):
            if number == 1 and len(tries) < 4:
                tries.append(1)
                raise OSError(5, "Input/output error")
            yield number, line

    monkeypatch.setattr(runner, "numbered", cut_off)
    monkeypatch.setattr(runner, "REST", 0.0)
    run(store, Asked(), over(store, name), width=2)
    assert (store.batch(name).status, store.batch(name).completed) == ("completed", 2)


class Places:
    """One place, which is taken, and rows that wait for it; `began`: those that have had it since."""

    def __init__(self, *names: str) -> None:
        self.width, self.began = Width(lambda: 1), list[str]()
        self._names = names

    async def row(self, name: str) -> None:
        await self.width.take()
        self.began.append(name)
        self.width.give()

    async def waiting(self) -> list[asyncio.Task[None]]:
        await self.width.take()
        rows = [asyncio.create_task(self.row(name)) for name in self._names]
        await asyncio.sleep(0)
        return rows


def test_who_waits_longest_is_the_next():
    """Also where a row that gives its place back wants another one at once."""

    async def run() -> list[str]:
        places = Places("a", "b")
        rows = await places.waiting()
        places.width.give()
        await places.row("again")
        await asyncio.gather(*rows)
        return places.began

    assert asyncio.run(asyncio.wait_for(run(), 30)) == ["a", "b", "again"]


def test_a_place_that_comes_for_a_row_that_has_ended_is_another_one_s():
    async def run() -> list[str]:
        places = Places("a", "b", "c")
        rows = await places.waiting()
        rows[1].cancel()
        await asyncio.sleep(0)
        places.width.give()
        rows[0].cancel()  # its place is on its way
        await rows[2]
        return places.began

    assert asyncio.run(asyncio.wait_for(run(), 30)) == ["c"]


def test_a_batch_is_kept_for_some_days_from_its_end(store: BatchStore):
    now, day, ids = int(time.time()), 86400, [begin(store, 1) for _ in range(2)]
    for name, days in zip(ids, (1, 31), strict=True):
        batch = store.batch(name)
        ended = replace(batch, created=now - 40 * day, status="expired", at={"expired": now - days * day})
        store.put_batch(ended)
    store.expire(days=30)
    assert store.batch(ids[0]) and store.batch(ids[1]) is None


def test_what_a_killed_process_has_left_goes_and_what_is_not_ours_stays(store: BatchStore):
    name = begin(store, 1)
    store.put_result(name, RowResult(0, True, "{}"))
    store.expire(days=30)
    assert store.done(name) == {0}
    store.change(name, ("validating",), "completed")
    lost, foreign, kept = new_id("file-"), "film.part", store.batch(name).input_file
    for each in (lost, f"{lost}.part", foreign):
        store.path(each).write_text("")
    for path in store.path("").iterdir():
        os.utime(path, (0, 0))
    store.expire(days=30)
    store.expire(days=30)
    assert store.done(name) == set() and store.path(kept).exists() and store.path(foreign).exists()
    assert not store.path(lost).exists() and not store.path(f"{lost}.part").exists()


def test_contents_that_the_disk_keeps_go_later_by_another_process(
    store: BatchStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file, runs = store.path(upload(store, b"x")), BatchStore(tmp_path / "batches")
    tried: list[Path] = []

    def unlink(path: Path, missing_ok: bool = False) -> None:
        tried.append(path)
        if len(tried) < 4:
            raise OSError(errno.EIO, "Input/output error")
        path_unlink(path, missing_ok=missing_ok)

    path_unlink = Path.unlink
    monkeypatch.setattr(Path, "unlink", unlink)
    monkeypatch.setattr(runner, "KEPT", 0.0)
    assert store.remove_file(file.name) and file.exists() and store.file(file.name) is None
    run(runs, Asked(), lambda: not file.exists())
    assert tried == [file] * 4
    assert not store.remove_file(file.name) and store.remove_contents()


def test_an_upload_goes_on_where_the_clock_is_set_by_days_meanwhile(store: BatchStore):
    def write(path: Path) -> int:
        with path.open("wb", buffering=0) as file:
            file.write(b"x")
            os.utime(path, (0, 0))  # as it is by the new time
            store.expire(days=30)
            return 1 + file.write(b"y")

    file = store.add_file(file_of(None, "rows.jsonl"), write)
    store.expire(days=30)
    assert store.path(file.id).read_bytes() == b"xy"


def test_one_process_runs_the_batches_of_a_folder(store: BatchStore):
    assert store.claim()
    assert not BatchStore(store.path("")).claim()


@pytest.mark.parametrize(
    "contents", ["a\nb", '{"custom_id": "1"}\n', '{"id":"batch_req_1"}\nnotes', '{"z":' + "[" * 9999 + "\n"]
)
def test_a_file_that_has_no_answers_is_left_as_it_is(tmp_path: Path, contents: str):
    output = tmp_path / "notes"
    output.write_text(contents)
    with pytest.raises(NoAnswers, match="name another file"):
        done_in(output)
    assert output.read_text() == contents


class FullDisk(io.StringIO):
    """A file to which nothing can be written any more."""

    def flush(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_disk_that_takes_no_answer_ends_a_file(tmp_path: Path):
    source = tmp_path / "rows"
    source.write_bytes(b"\n".join(map(request, range(3))))
    rows = FileRows(source, 3, set(), FullDisk(), FullDisk())
    with pytest.raises(OSError, match="No space left"):
        asyncio.run(rows.run(Asked(), Width(lambda: 2), lambda: None))


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device"),
            "out cannot be written (No space left on device); make",
        ),
        (
            CannotStart("engine", BlockingIOError(errno.EAGAIN, "No process")),
            "error: engine: No process; raise",
        ),
    ],
)
def test_what_ends_a_file_of_requests_is_said_in_a_sentence(tmp_path: Path, monkeypatch, capsys, error, said):
    source = tmp_path / "rows"
    source.write_bytes(request(1))

    def fails() -> None:
        raise error

    monkeypatch.setattr(batch_command, "runtime_folder", fails)
    assert batch_command.main([str(source), str(tmp_path / "out")]) == 2
    assert said in capsys.readouterr().err


def test_half_an_answer_is_taken_away(tmp_path: Path):
    output, whole = tmp_path / "out", '{"id":"batch_req_1","custom_id":"a","response":{},"error":null}\n'
    output.write_text(whole + whole[:20])
    assert done_in(output) == {"a"} and output.read_text() == whole


@pytest.mark.parametrize("others", [["rows"], ["out", "--errors", "rows"], ["out", "--errors", "./out"]])
def test_the_requests_are_not_written_over(tmp_path: Path, monkeypatch, others: list[str], capsys):
    monkeypatch.chdir(tmp_path)
    Path("rows").write_bytes(request(1))
    assert batch_command.main(["rows", *others]) == 2
    assert "three files" in capsys.readouterr().err
    assert Path("rows").read_bytes() == request(1)


def test_a_key_that_has_reached_its_limit_keeps_no_place_from_others(store: BatchStore):
    """The other one comes when all places have been asked for in vain."""
    first, later = begin(store, 20, owner="limited"), list[str]()

    class Limits(Asked):
        refused = 0

        async def __call__(self, line: InputLine, deadline: float, owner: str) -> RowReply:
            if owner != "limited":
                return await super().__call__(line, deadline, owner)
            self.refused += 1
            if self.refused == 4:
                later.append(begin(store, 20, owner="other"))
            return RowReply(429, "r", {"error": "later"})

    asked, ends = Limits(), time.monotonic() + 60

    def over_or_late() -> bool:
        return time.monotonic() > ends or any(store.batch(name).status in OVER for name in later)

    run(store, asked, over_or_late)
    assert store.batch(later[0]).status == "completed" and asked.most <= 4
    assert store.batch(first).status == "in_progress"
