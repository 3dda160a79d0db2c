"""The front end's end of the wire to several engines, against bare ROUTER sockets."""

import asyncio
import gc
import queue
import time
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace
from test_client import StubEngine

from rwkv_batch.wire.client import EngineGone, RequestFailed, RequestRejected
from rwkv_batch.wire.codec import encode
from rwkv_batch.wire.commands import (
    GetMetrics,
    ListDocuments,
    ListModels,
    ListSessions,
    LoadAdapter,
    LoadModel,
    MayChangeModels,
    PauseRequest,
    RemoveAdapter,
    RemoveDocument,
    RemoveModel,
    SessionHistory,
    StopRequest,
)
from rwkv_batch.wire.host.engines import Engines
from rwkv_batch.wire.host.turns import ChangeTurns
from rwkv_batch.wire.metrics import Series
from rwkv_batch.wire.protocol import (
    Accepted,
    Cancel,
    CommandReply,
    Failed,
    GenerateRequest,
    PausedRow,
    Progress,
    Rejected,
    RequestInfo,
    RowDelta,
    SessionInfo,
    SessionTurn,
    WatchLoad,
)
from rwkv_batch.wire.supervision import ChangeGranted, ChangeOver, ChangeWanted, EngineInfo, Serving

INFO = EngineInfo("m", 1, 64, 1, "float32", "cpu", 4, 65536, "f", "m")


class Host:
    """Two engines that the test drives, and what a front end knows of them."""

    noted: bytes | None  # the last change, if it was made

    def __init__(self, folder: Path) -> None:
        addresses = [f"ipc://{folder}/{number}" for number in range(2)]
        self.engines = [StubEngine(address) for address in addresses]
        self.wire = Engines(addresses, "frontend-1")
        for number in range(2):
            self.begin(number)

    def begin(self, number: int) -> None:
        self.wire.serves(Serving([INFO], engine=number))
        assert isinstance(self.engines[number].receive(), WatchLoad)

    def close(self) -> None:
        self.wire.close()
        for engine in self.engines:
            engine.router.close()
            engine.context.term()


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    host = Host(tmp_path)
    yield host
    host.close()


def request(*prompts: str, n: int = 1, turn: SessionTurn | None = None, rows: list[PausedRow] | None = None):
    return GenerateRequest("one", list(prompts), 5, n=n, turn=turn, to_model="m", rows=rows or [])


def end(row: int, text: str = "x") -> RowDelta:
    return RowDelta(row, text, 1, "stop")


def read_all(job) -> dict[int, str]:
    found = {}
    while not job.exhausted:
        found |= {delta.row: delta.text for delta in job.read(60)}
    return found


def test_rows_are_spread_and_come_back_by_their_numbers(host: Host):
    job = host.wire.submit(request("a", "bb", "ccc", "dddd", "eeeee"))
    parts = [engine.receive() for engine in host.engines]
    assert sorted(prompt for part in parts for prompt in part.prompts) == ["a", "bb", "ccc", "dddd", "eeeee"]
    for engine, part in zip(host.engines, parts, strict=True):
        engine.send(Accepted(part.id, [len(prompt) for prompt in part.prompts]))
        deltas = [end(row, text) for row, text in zip(part.row_numbers, part.prompts, strict=True)]
        engine.send(Progress(part.id, deltas))
    asyncio.run(asyncio.wait_for(job.accepted(), 30))
    assert job.acceptance.prompt_tokens == [1, 2, 3, 4, 5]
    assert read_all(job) == dict(enumerate(["a", "bb", "ccc", "dddd", "eeeee"]))


def test_the_rows_of_one_prompt_are_spread(host: Host):
    host.wire.submit(request("a", n=5))
    parts = [engine.receive() for engine in host.engines]
    assert [(part.prompts, part.n) for part in parts] in ([(["a"], 3), (["a"], 2)], [(["a"], 2), (["a"], 3)])
    assert sorted(row for part in parts for row in part.row_numbers) == [0, 1, 2, 3, 4]


def test_rows_that_go_on_keep_what_they_have_drawn(host: Host):
    rows = [PausedRow(4, [7]), PausedRow(9, [8, 8])]
    host.wire.submit(request("a", "b", rows=rows))
    parts = [engine.receive() for engine in host.engines]
    assert sorted((part.prompts[0], part.rows[0]) for part in parts) == [("a", rows[0]), ("b", rows[1])]


def test_a_row_that_fails_on_one_engine_leaves_those_of_the_others(host: Host):
    job = host.wire.submit(request("a", "b"))
    first, second = (engine.receive() for engine in host.engines)
    failed = RowDelta(first.row_numbers[0], "", 0, "error", error="broken")
    host.engines[0].send(Accepted(first.id, [1]), Progress(first.id, [failed]))
    host.engines[1].send(Accepted(second.id, [1]), Progress(second.id, [end(second.row_numbers[0])]))
    assert read_all(job) == {first.row_numbers[0]: "", second.row_numbers[0]: "x"}


def test_a_refusal_of_one_engine_ends_the_rows_of_the_others(host: Host):
    job = host.wire.submit(request("a", "b"))
    first, second = (engine.receive() for engine in host.engines)
    host.engines[0].send(Rejected(first.id, "overloaded", "full"))
    with pytest.raises(RequestRejected, match="full"):
        asyncio.run(asyncio.wait_for(job.accepted(), 30))
    assert host.engines[1].receive() == Cancel(second.id)


def test_a_reader_that_leaves_cancels_all_parts(host: Host):
    job = host.wire.submit(request("a", "b"))
    parts = [engine.receive() for engine in host.engines]
    job.cancel()
    job.cancel()
    assert [engine.receive() for engine in host.engines] == [Cancel(part.id) for part in parts]


def test_what_has_sent_nothing_runs_again_on_another_engine(host: Host):
    job = host.wire.submit(request("a", "b"))
    first, second = (engine.receive() for engine in host.engines)
    host.engines[0].send(Accepted(first.id, [1]))
    assert host.wire.lose(0, "gone")
    again = host.engines[1].receive()
    assert (again.prompts, again.row_numbers) == (first.prompts, first.row_numbers) and again.id != second.id
    for part in (again, second):
        host.engines[1].send(Accepted(part.id, [1]), Progress(part.id, [end(part.row_numbers[0])]))
    assert read_all(job) == {0: "x", 1: "x"}


def test_what_has_sent_text_fails(host: Host):
    job = host.wire.submit(request("a"))
    engine = host.engines[0]
    engine.send(Accepted(engine.receive().id, [1]), Progress("one", [RowDelta(0, "x", 1)]))
    assert [delta.text for delta in job.read(60)] == ["x"]
    host.wire.lose(0, "The engine has stopped.")
    with pytest.raises(EngineGone, match="has stopped"):
        job.read(60)


def asked_for_the_session(engine: StubEngine) -> SessionHistory:
    """What an engine is asked, once a change of its own has been committed behind those of the dead one."""
    first = engine.receive()
    assert isinstance(first, RemoveDocument)
    engine.send(CommandReply(first.id))
    asked = engine.receive()
    assert isinstance(asked, SessionHistory)
    return asked


@pytest.mark.parametrize("changed", [False, True], ids=["not stored", "perhaps stored"])
def test_a_turn_runs_again_only_if_it_was_not_stored(host: Host, changed: bool):
    home = host.wire.placement.home("m", "s")
    job = host.wire.submit(request("a", turn=SessionTurn(source="s", target="s")))
    engine, other = host.engines[home], host.engines[1 - home]
    engine.send(Accepted(engine.receive().id, [1], target="s"))
    asyncio.run(asyncio.wait_for(job.accepted(), 30))
    host.wire.lose(home, "gone")
    asked = asked_for_the_session(other)
    assert (asked.key, asked.limit) == ("s", 0)
    other.send(CommandReply(asked.id, updated=2e9 if changed else 1.0))
    if changed:
        with pytest.raises(EngineGone, match="not known whether this has been stored"):
            job.read(60)
    else:
        again = other.receive()
        other.send(Accepted(again.id, [1], target="s"), Progress(again.id, [end(0)]))
        assert read_all(job) == {0: "x"}


def test_without_any_engine_requests_fail_at_once(host: Host):
    host.wire.lose(0, "gone")
    assert not host.wire.lose(1, "gone")
    with pytest.raises(RequestFailed, match="No engine serves"):
        host.wire.submit(request("a")).read(60)


def test_one_that_comes_back_gets_its_share_again(host: Host):
    host.wire.lose(0, "gone")
    assert host.engines[0].receive() == Cancel("load")  # which was for the one before
    host.begin(0)
    host.wire.submit(request("a", "b"))
    assert [len(engine.receive().prompts) for engine in host.engines] == [1, 1]


async def answer_each(host: Host, command, *answers) -> CommandReply:
    """What the front end gets for a command when the engines say these."""
    asked = asyncio.ensure_future(host.wire.ask(command))
    for engine, answer in answers:
        got = await asyncio.to_thread(host.engines[engine].receive)
        host.engines[engine].send(answer(got.id) if callable(answer) else answer)
    return await asyncio.wait_for(asked, 30)


def answered(host: Host, command, *answers) -> CommandReply:
    return asyncio.run(answer_each(host, command, *answers))


def test_metrics_name_their_engine(host: Host):
    series = [Series("models_loaded", [], [1.0])]
    counted = [(number, lambda id: CommandReply(id, metrics=series)) for number in range(2)]
    labels = [each.labels for each in answered(host, GetMetrics("c"), *counted).metrics]
    assert labels == [["engine-0"], ["engine-1"]]


def test_a_change_that_one_engine_refuses_is_undone_on_the_others(host: Host):
    removed = []

    def undone(id: str) -> CommandReply:
        removed.append(id)
        return CommandReply(id, found=1)

    with pytest.raises(RequestRejected, match="engine-1: no room") as refused:
        answered(
            host,
            LoadAdapter("c", "tales", "/x", to_model="m"),
            (0, lambda id: CommandReply(id)),  # which are there
            (0, lambda id: CommandReply(id)),
            (1, lambda id: Rejected(id, "invalid", "no room")),
            (0, undone),
        )
    assert refused.value.reason == "invalid" and removed


class SupervisorPipe:
    """What a front end says to the supervisor, which lets it make changes when it is asked to."""

    def __init__(self, host: Host) -> None:
        self.said: queue.SimpleQueue[ChangeWanted | ChangeOver] = queue.SimpleQueue()
        self.grant = partial(host.wire.may_change, ChangeGranted())
        host.wire.commands.turns = ChangeTurns(self.said.put, str.upper)


UNLOAD = RemoveAdapter("c", "tales", to_model="m")
ALL = [(number, lambda id: CommandReply(id, found=1)) for number in range(2)]


async def made(host: Host, command, *answers) -> CommandReply:
    """A change whose turn comes at once."""
    pipe = SupervisorPipe(host)
    asked = asyncio.ensure_future(answer_each(host, command, *answers))
    wanted = await asyncio.to_thread(pipe.said.get)
    assert isinstance(wanted, ChangeWanted)
    pipe.grant()
    try:
        return await asked
    finally:
        over = pipe.said.get()
        assert isinstance(over, ChangeOver)
        host.noted = wanted.command if over.made else None


def test_a_change_waits_for_its_turn_and_is_noted_when_all_have_made_it(host: Host):
    assert asyncio.run(made(host, UNLOAD, *ALL)).found == 1
    assert host.noted == encode(UNLOAD)


def test_a_model_is_noted_by_the_name_that_it_gets(host: Host):
    load = LoadModel("c", "file")
    asyncio.run(made(host, load, *ALL, (0, lambda id: CommandReply(id)), *ALL))
    assert host.noted == encode(LoadModel("c", "file", "FILE"))


def test_a_change_that_is_refused_is_over_without_being_noted(host: Host):
    refused = [(number, lambda id: Rejected(id, "invalid", "no")) for number in range(2)]
    with pytest.raises(RequestRejected, match="engine-0: no"):
        asyncio.run(made(host, UNLOAD, *refused))
    assert host.noted is None


@pytest.mark.parametrize("change", [LoadModel("c", "/x", "m"), RemoveModel("c", "m")], ids=["load", "remove"])
def test_a_change_of_models_that_one_engine_cannot_begin_now_is_begun_by_none(host: Host, change):
    """Else engines would have other weights under one name: nothing brings back what has been replaced."""

    async def ask() -> list[type]:
        asked = asyncio.ensure_future(host.wire.ask(change))
        got = [await asyncio.to_thread(engine.receive) for engine in host.engines]
        host.engines[0].send(CommandReply(got[0].id))
        host.engines[1].send(Rejected(got[1].id, "conflict", "The model m is still running rows now."))
        with pytest.raises(RequestRejected, match="engine-1: The model m is still running"):
            await asyncio.wait_for(asked, 30)
        listed = asyncio.ensure_future(host.wire.ask(ListModels("d")))
        got.append(await asyncio.to_thread(host.engines[0].receive))
        host.engines[0].send(CommandReply(got[-1].id))
        await asyncio.wait_for(listed, 30)
        return [type(each) for each in got]

    assert asyncio.run(ask()) == [MayChangeModels, MayChangeModels, ListModels]


def test_a_change_that_is_cancelled_while_it_waits_gives_its_turn_back():
    said = queue.SimpleQueue[ChangeWanted | ChangeOver]()
    turns = ChangeTurns(said.put, str)

    async def change() -> None:
        async with turns.turn(UNLOAD):
            assert said.empty()

    async def run() -> None:
        left, stays = asyncio.create_task(change()), asyncio.create_task(change())
        for _ in range(2):
            assert isinstance(await asyncio.to_thread(said.get), ChangeWanted)
        left.cancel()
        turns.granted()
        assert await asyncio.to_thread(said.get) == ChangeOver(False)
        assert not stays.done(), "that was not its turn"
        turns.granted()
        await stays
        assert said.get() == ChangeOver(True) and left.cancelled()

    asyncio.run(asyncio.wait_for(run(), 30))


def test_what_a_front_end_has_left_is_finished_by_another(host: Host):
    pipe = SupervisorPipe(host)
    host.wire.may_change(ChangeGranted(encode(UNLOAD), ["m"]))
    for engine in host.engines:
        asked = engine.receive()
        assert replace(asked, id="c") == UNLOAD
        engine.send(CommandReply(asked.id, found=0))
    assert pipe.said.get(timeout=30) == ChangeOver(True)


def test_sessions_of_all_engines_are_listed_once_in_their_fastest_tier(host: Host):
    def listed(*tiers: str):
        infos = [SessionInfo(key, tier, 1.0, 5) for key, tier in zip("ab", tiers, strict=True)]
        return lambda id: CommandReply(id, sessions=infos, total=2, l1=tiers.count("L1"))

    reply = answered(host, ListSessions("c", limit=9), (0, listed("L3", "L1")), (1, listed("L2", "L3")))
    assert [(info.key, info.tier) for info in reply.sessions] == [("a", "L2"), ("b", "L1")]
    assert (reply.total, reply.l1) == (2, 1)


def test_documents_of_all_engines_are_listed_once(host: Host):
    def kept(*keys: str):
        return lambda id: CommandReply(id, keys=list(keys))

    reply = answered(host, ListDocuments("c", "d:"), (0, kept("a", "c")), (1, kept("b", "c")))
    assert reply.keys == ["a", "b", "c"]


def test_a_failure_of_one_engine_is_that_of_the_request(host: Host):
    job = host.wire.submit(request("a", "b"))
    first, _ = (engine.receive() for engine in host.engines)
    host.engines[0].send(Accepted(first.id, [1]), Failed(first.id, "broken"))
    with pytest.raises(RequestFailed, match="broken"):
        job.read(60)


def test_what_is_sent_to_an_engine_that_has_just_died_runs_elsewhere(host: Host):
    send = host.wire.send

    def send_late(part) -> None:
        host.wire.send = send
        host.wire.lose(part.share.engine, "gone")
        send(part)

    host.wire.send = send_late
    job = host.wire.submit(request("a"))
    again = host.engines[1].receive()
    host.engines[1].send(Accepted(again.id, [1]), Progress(again.id, [end(0)]))
    assert read_all(job) == {0: "x"}


def test_a_command_to_an_engine_that_has_just_died_is_asked_of_another(host: Host):
    ready = host.wire.placement.ready

    def late(model: str) -> list[int]:
        engines = ready(model)
        host.wire.lose(0, "gone")
        return engines

    host.wire.placement.ready = late
    assert answered(host, ListModels("c"), (1, lambda id: CommandReply(id))) == CommandReply("c")


def test_a_reader_that_leaves_while_an_engine_dies_leaves_no_work(host: Host):
    job = host.wire.submit(request("a"))
    host.engines[0].receive()
    place = host.wire.placement.place

    def leave(request: GenerateRequest):
        job.cancel()
        return place(request)

    host.wire.placement.place = leave
    host.wire.lose(0, "gone")
    assert host.wire.placement.loads() == [0, 0]


def test_a_request_that_has_ended_is_not_kept(host: Host):
    job = host.wire.submit(request("a", "b"))
    for engine in host.engines:
        part = engine.receive()
        engine.send(Accepted(part.id, [1]), Progress(part.id, [end(part.row_numbers[0])]))
    read_all(job)
    kept = weakref.ref(job)
    del job
    counted = [(number, lambda id: CommandReply(id)) for number in range(2)]
    answered(host, GetMetrics("c"), *counted)  # so the threads of the wire hold nothing of before
    gc.collect()
    assert kept() is None


def test_a_turn_that_is_not_known_to_be_accepted_may_have_been_stored(host: Host):
    home = host.wire.placement.home("m", "s")
    job = host.wire.submit(request("a", turn=SessionTurn(source="s", target="s")))
    host.engines[home].receive()
    host.wire.lose(home, "gone")
    asked = asked_for_the_session(host.engines[1 - home])
    host.engines[1 - home].send(CommandReply(asked.id, updated=2e9))
    with pytest.raises(EngineGone, match="not known whether this has been stored"):
        job.read(60)


def test_a_turn_may_have_been_stored_if_the_clock_was_set_meanwhile(host: Host, monkeypatch):
    home = host.wire.placement.home("m", "s")
    job = host.wire.submit(request("a", turn=SessionTurn(source="s", target="s")))
    host.engines[home].receive()
    host.wire.lose(home, "gone")
    asked = asked_for_the_session(host.engines[1 - home])
    clock = time.time
    monkeypatch.setattr(time, "time", lambda: clock() - 60)
    host.engines[1 - home].send(CommandReply(asked.id, updated=clock() - 59))
    with pytest.raises(EngineGone, match="not known whether this has been stored"):
        job.read(60)


def test_a_turn_with_a_key_runs_again_once_the_commits_of_the_dead_engine_are_done(host: Host):
    home = host.wire.placement.home("m", "s")
    job = host.wire.submit(request("a", turn=SessionTurn(source="s", target="s", request=b"k" * 16)))
    host.engines[home].receive()
    host.wire.lose(home, "gone")
    other = host.engines[1 - home]
    first = other.receive()
    assert isinstance(first, RemoveDocument)
    other.send(CommandReply(first.id))
    again = other.receive()
    other.send(Accepted(again.id, [1], target="s"), Progress(again.id, [end(0)]))
    assert read_all(job) == {0: "x"}


def test_a_refusal_is_said_though_a_change_cannot_be_undone(host: Host):
    with pytest.raises(RequestRejected, match="engine-1: no room"):
        answered(
            host,
            LoadAdapter("c", "tales", "/x", to_model="m"),
            (0, lambda id: CommandReply(id)),  # which are there
            (0, lambda id: CommandReply(id)),
            (1, lambda id: Rejected(id, "invalid", "no room")),
            (0, lambda id: Rejected(id, "conflict", "busy")),
        )


def test_a_change_is_noted_though_nobody_waits_for_it(host: Host):
    command = RemoveAdapter("c", "tales", to_model="m")

    pipe = SupervisorPipe(host)

    async def ask() -> None:
        asked = asyncio.ensure_future(host.wire.ask(command))
        assert await asyncio.to_thread(pipe.said.get) == ChangeWanted(encode(command))
        pipe.grant()
        got = [await asyncio.to_thread(engine.receive) for engine in host.engines]
        asked.cancel()
        for engine, each in zip(host.engines, got, strict=True):
            engine.send(CommandReply(each.id, found=1))
        assert await asyncio.to_thread(pipe.said.get) == ChangeOver(made=True)

    asyncio.run(ask())


def requests_named(name: str, *rows: int):
    """What engines say of the requests that they run: this one, with so many rows."""
    infos = [[RequestInfo(name, count, 3, 10)] if count else [] for count in rows]
    return [(number, lambda id, has=has: CommandReply(id, requests=has)) for number, has in enumerate(infos)]


def lost(host: Host, number: int):
    """In place of an answer, the engine dies."""

    def die(id: str) -> Failed:
        host.wire.lose(number, "gone")
        return Failed(id, "gone", gone=True)

    return number, die


@pytest.mark.parametrize("kind", [StopRequest, PauseRequest])
def test_a_request_is_stopped_or_paused_though_an_engine_that_ran_it_dies(host: Host, kind: type):
    before = requests_named("r", 0, 0) if kind is PauseRequest else []
    reply = answered(
        host,
        kind("c", "r", to_model="m"),
        *before,
        *requests_named("r", 2, 1),
        requests_named("r", 2)[0],
        lost(host, 1),
        requests_named("r", 1)[0],  # its row runs again here
        requests_named("r", 1)[0],
    )
    assert [(info.name, info.rows) for info in reply.requests] == [("r", 3)]


@pytest.mark.parametrize("kind", [StopRequest, PauseRequest])
def test_without_any_engine_a_request_cannot_be_stopped_or_paused(host: Host, kind: type):
    for number in range(2):
        host.wire.lose(number, "gone")
    with pytest.raises(EngineGone, match="No engine serves"):
        answered(host, kind("c", "r", to_model="m"))


def test_what_the_others_serve_is_known_when_an_engine_is_lost(host: Host):
    other = replace(INFO, model="other", slots=2)
    host.wire.serves(Serving([INFO, other], engine=1))
    left = host.wire.lose(1, "gone")
    assert left and [(info.model, info.slots) for info in left.models] == [("m", 4)]
    assert host.wire.lose(0, "gone") is None
