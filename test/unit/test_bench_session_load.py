"""The benchmark of stateful chat: its arithmetic, and what it asks a small server that answers at once."""

import asyncio
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby

import pytest
from fake_api import FakeServer, chat, respond, stream

from bench import session_load, turn_load
from bench.report import Record

pytestmark = pytest.mark.thorough

DONE = "data: [DONE]\n\n"


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    yield fake
    fake.close()


@pytest.fixture
def bench(server: FakeServer, capsys):
    """Runs a measurement of the server; its lines."""

    def run(what: str, *flags: str, code: int = 0) -> list[str]:
        assert session_load.main([what, f"--url=http://127.0.0.1:{server.port}", *flags]) == code
        out, err = capsys.readouterr()
        return (err if code else out).splitlines()

    return run


async def answer(writer: asyncio.StreamWriter, body: dict) -> None:
    """As many tokens as are asked for."""
    texts = (chat("a") for _ in range(body["max_tokens"]))
    await stream(writer, *texts, chat("", finish="length"), DONE)


def record(start: float, moments: list[float], end: float, texts: list[str] | None = None):
    """The answer to one request, with an event at each moment."""
    texts = texts or ["a"] * len(moments)
    return Record(
        0,
        start,
        0.0,
        end,
        streamed=True,
        times=array("d", moments),
        rows=array("l", [0] * len(moments)),
        texts={0: texts},
        finish={0: "length"},
    )


def test_rates_are_those_of_all_runs_together_and_of_each():
    figures = turn_load.TurnFigures()
    figures.add([record(0.0, [0.5, 1.0], 1.0), record(1.0, [1.5, 2.0], 2.0)], 2)
    figures.add([record(10.0, [10.5, 11.0], 11.0), record(10.0, [10.5, 11.0], 11.0)], 2)
    assert (figures.turns, figures.tokens, figures.seconds) == (4, 8, 3.0)
    assert figures.rates == [2.0, 4.0] and figures.rate == pytest.approx(8 / 3)


def test_latencies_are_in_ms_and_of_all_runs():
    figures = turn_load.TurnFigures()
    figures.add([record(0.0, [0.1, 0.2, 0.4], 0.4)], 3)
    figures.add([record(5.0, [5.3, 5.4, 5.6], 5.6)], 3)
    assert figures.cells("ttft_ms") == "200.0 | 298.0"
    assert figures.cells("itl_ms") == "150.0 | 200.0" and figures.p99("itl_ms") == pytest.approx(200)


def test_an_event_of_several_tokens_counts_for_each_of_them():
    figures = turn_load.TurnFigures()
    figures.add([record(0.0, [0.1, 0.5], 0.5, ["The", " cat sat down here"])], 5)
    assert figures.cells("itl_ms") == "100.0 | 100.0" and figures.cells("event_gap_ms") == "400.0 | 400.0"


def test_the_end_of_a_turn_begins_at_the_last_event_but_one():
    assert turn_load.end_of_turn(record(0.0, [0.1, 0.2, 0.25], 0.26)) == pytest.approx([0.06])
    assert turn_load.end_of_turn(record(0.0, [0.1, 0.2, 0.2], 0.26)) == pytest.approx([0.16])  # one read
    assert not len(turn_load.end_of_turn(record(0.0, [0.2, 0.2], 0.26)))


def test_figures_without_samples_are_left_out():
    figures = turn_load.TurnFigures()
    figures.add([record(0.0, [0.2], 0.3)], 1)
    assert figures.cells("end_ms") == " | " and figures.p99("itl_ms") != figures.p99("itl_ms")


def test_the_ratio_is_that_of_all_runs_with_the_range_of_single_rounds():
    stateful, stateless = turn_load.TurnFigures(), turn_load.TurnFigures()
    for end in (2.0, 1.0):
        stateful.add([record(0.0, [0.5, end], end)], 2)
        stateless.add([record(0.0, [0.5, 1.0], 1.0)], 2)
    assert session_load.ratio(stateful, stateless) == "0.667 (0.500 to 1.000)"


def test_the_database_its_log_and_its_images_are_counted(tmp_path):
    sizes = turn_load.stored_bytes
    database = tmp_path / "s.db"
    assert sizes(None) == {} and set(sizes(database).values()) == {0}
    database.write_bytes(b"1" * 10)
    (tmp_path / "s.db-wal").write_bytes(b"2" * 20)
    (tmp_path / "s.db.images").mkdir()
    for name in ("1.state", "2.state"):
        (tmp_path / "s.db.images" / name).write_bytes(b"3" * 30)
    assert sizes(database) == {"file": 10, "log": 20, "images": 60}


def test_turns_of_a_session_follow_each_other_and_both_kinds_ask_the_same(server, bench, tmp_path):
    running, paths = Counter(), defaultdict(list)

    async def one_at_a_time(writer, body):
        session = body.get("session_id")
        paths[server.heads[-1].split()[1]].append(body["contents"][0])
        assert session is None or not running[session], "two turns of one session at once"
        running[session] += 1
        await answer(writer, body)
        running[session] -= 1

    server.answer = one_at_a_time
    page = tmp_path / "page.md"
    flags = ["--sessions", "3", "5", "--turns", "2", "--tokens", "4", "--rounds", "2", "--processes", "2"]
    lines = bench("turns", *flags, "--markdown", str(page))
    stateful, stateless = paths["/state/chat/completions"], paths["/v1/chat/completions"]
    assert len(stateful) == (3 + 5) * (1 + 2 * 2) and sorted(stateful) == sorted(stateless)
    assert all(body["stop_tokens"] == [] and body["max_tokens"] == 4 for body in server.bodies)
    turns = Counter(body["session_id"] for body in server.bodies if "session_id" in body)
    assert Counter(turns.values()) == {1: 3 + 5, 2: 2 * (3 + 5)}
    assert sum(1 for text in stateful if text.startswith("\n\n")) == 2 * (3 + 5)
    rows = [line.split(" | ")[:2] for line in lines if line.startswith(("| 3", "| 5"))]
    kinds = ("session turns", "stateless")
    assert rows == [[f"| {count}", kind] for count in (3, 5) for kind in kinds]
    assert page.read_text().endswith("\n".join(lines) + "\n") and "turns --url" in page.read_text()


def test_what_is_beside_the_streams_ends_with_them(server, bench):
    server.answer = answer
    flags = ["--streams=2", "--sessions=3", "--long=50", "--long-prompts=2", "--tokens=4", "--processes=2"]
    lines = bench("mixed", *flags, "--turns=2", "--rounds=1")
    long = [body for body in server.bodies if body["max_tokens"] == 1]
    assert long and all(body["use_prefix_cache"] is False for body in long)
    assert len({body["session_id"] for body in server.bodies if "session_id" in body}) == 3
    first = [line.split(" | ")[0] for line in lines if line.startswith("| ")]
    assert first == ["| beside them", "| nothing else", "| 3 sessions", "| 3 more streams"]


def test_forks_are_made_once_each_and_so_many_at_a_time(server, bench, tmp_path):
    database = tmp_path / "s.db"
    database.write_bytes(b"1" * 100)

    async def grow(writer, body):
        if "contents" in body:
            await answer(writer, body)
            return
        await asyncio.sleep(0)
        with database.open("ab") as file:
            file.write(b"1" * 7)
        respond(writer, 200, b'{"status": "success"}')

    server.answer = grow
    flags = ["--forks", "10", "--connections", "3", "--history", "20", "--database", str(database)]
    lines = bench("forks", *flags)
    base, *forked = server.bodies
    assert {body["session_id"] for body in forked} == {base["session_id"]}
    assert len({body["new_session_id"] for body in forked}) == 10 and server.most_running <= 3
    assert lines[-1] == "70 bytes more on disk, 7 a fork: file 70, log 0, images 0."


def test_failures_and_short_answers_end_the_measurement(server, bench):
    async def short(writer, body):
        await stream(writer, chat("a", finish="stop"), DONE)

    flags = ["--sessions", "2", "--processes", "1"]
    assert bench("turns", *flags, code=1) == ["bench/session_load.py: 2 x HTTP 500: {}"]
    server.answer = short
    assert bench("turns", *flags, code=1)[0].endswith("2 x an answer ended before max_tokens")


def test_a_fork_that_is_refused_ends_the_measurement(server, bench):
    async def refuse(writer, body):
        if "contents" in body:
            await answer(writer, body)
        else:
            respond(writer, 409, b'{"error": "It exists."}')

    server.answer = refuse
    assert bench("forks", code=1) == ["bench/session_load.py: /v1/state/fork: HTTP 409: It exists."]


def test_sessions_of_every_size_are_made_once_and_resumed_after_a_start(server, capsys, monkeypatch):
    asked = []

    async def note(writer, body):
        if "contents" in body:
            asked.append(body.get("session_id"))
            await answer(writer, body)
        else:
            asked.append(body.get("new_session_id", body.get("limit")))
            respond(writer, 200, b"{}")

    @contextmanager
    def started(app_flags, folder):
        asked.append("start")
        yield f"http://127.0.0.1:{server.port}"

    server.answer = note
    monkeypatch.setattr(session_load, "started", started)
    starts = iter([3.0, 1.0, 2.0, 5.0, 5.0, 4.0])
    monkeypatch.setattr(session_load.startup, "start", lambda checkout, flags: next(starts))
    assert session_load.main(["many", "--sizes", "5", "3", "--samples", "2", "--history", "9"]) == 0
    rows = [line.split(" | ")[:2] for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert rows[1:] == [["| 3", "2.00"], ["| 5", "5.00"]]
    runs = [list(group) for start, group in groupby(asked, lambda name: name == "start") if not start]
    assert (runs[0][:3], runs[2][:2]) == (["s0", "s1", "s2"], ["s3", "s4"])
    for making, measuring in (runs[:2], runs[2:]):
        resumed = making[-2:]
        assert len({*resumed}) == 2 and measuring == [None, *resumed, *[100] * 9]


def test_flags_of_a_server_that_runs_already_are_refused(server, bench, capsys):
    with pytest.raises(SystemExit) as ended:
        bench("turns", "--", "--device", "cpu")
    assert ended.value.code == 2 and "APP_FLAGS" in capsys.readouterr().err
