"""Replies whose rows are known one after the other: one job for those who read them."""

import asyncio
import threading

import pytest
from msgspec.structs import replace

from routes.callers.caller import Caller
from routes.callers.metering import Accounts
from routes.callers.wire import CallerWire
from routes.http.errors import native_shape
from routes.translate import rounds
from routes.translate.rounds import TranslationReply, request_of
from rwkv_batch.keys import records
from rwkv_batch.keys.ledger import OverLimit
from rwkv_batch.keys.records import Key
from rwkv_batch.translation.forms import TranslationForm
from rwkv_batch.translation.glossary import from_pairs
from rwkv_batch.translation.translator import TextsAsked, Translator, Words
from rwkv_batch.wire.client import Job, MakeJob, RequestFailed, RequestRejected
from rwkv_batch.wire.protocol import Accepted, GenerateRequest, Progress, Rejected, RowDelta


class AnsweringWire:
    """Has an answer for each request, which is an event behind Accepted."""

    most_rows = None

    def __init__(self, *answers: list[str] | Rejected | None) -> None:
        self.answers = list(answers)
        self.requests: list[GenerateRequest] = []
        self.jobs: list[Job] = []
        self.cancelled: list[str] = []

    def submit(self, request: GenerateRequest, kind: MakeJob = Job) -> Job:
        self.requests.append(request)
        job = kind(request, self.cancelled.append)
        self.jobs.append(job)
        answer = self.answers.pop(0) if self.answers else None
        if isinstance(answer, Rejected):
            job.put(answer)
            return job
        job.put(Accepted(request.id, [len(prompt) for prompt in request.prompts]))
        if answer is not None:
            job.put(Progress(request.id, [RowDelta(i, text, 1, "stop") for i, text in enumerate(answer)]))
        return job


def begun(wire: AnsweringWire) -> tuple[TranslationReply, Job]:
    asked = TextsAsked(["The {0} sees.", "Fine."], "de", "en")
    translator = Translator(asked, TranslationForm(), Words())
    reply = TranslationReply(translator, native_shape, lambda done: {"texts": done.texts()})
    return reply, reply.begin(wire, request_of(reply.rows))


def test_what_an_answer_lacks_is_asked_for_by_one_job():
    wire = AnsweringWire(["Der sieht.", "Gut."], ["Der", "sieht."])
    reply, job = begun(wire)
    asyncio.run(job.accepted())
    deltas = []
    while not job.exhausted:
        deltas += job.read(1)
    assert reply.whole(job, deltas) == {"texts": ["Der {0} sieht.", "Gut."]}
    first, second = wire.requests
    assert len(first.prompts) == 2 and second.prompts == [
        "English: The\n\nGerman:",
        "English: sees.\n\nGerman:",
    ]
    assert first.id != second.id and not second.pausable
    assert len(job.acceptance.prompt_tokens) == 2, "those of the first request"


@pytest.mark.parametrize("otherwise", [{"adapter": "loud"}, {"start_state": "pirate"}])
def test_words_of_a_model_with_an_adapter_or_state_are_not_those_of_others(otherwise):
    words, dog = Words(), from_pairs({"dog": "Rüde"})

    def translated(word: str, **fields: str) -> str:
        translator = Translator(TextsAsked(["The dog sees."], "de", "en", dog), TranslationForm(), words)
        reply = TranslationReply(translator, native_shape, lambda done: {"texts": done.texts()})
        wire = AnsweringWire(["Der Hund sieht."], ["Der Hund sieht.", word])
        job = reply.begin(wire, replace(request_of(reply.rows), **fields))
        while not job.exhausted:
            job.read(1)
        (text,) = translator.texts()
        return text

    assert translated("Der", **otherwise) == "Rüde Hund sieht."
    assert translated("Hund") == "Der Rüde sieht."


def test_a_later_round_that_is_refused_ends_the_job():
    wire = AnsweringWire(["Der sieht.", "Gut."], Rejected("x", "overloaded", "The queue is full."))
    _, job = begun(wire)
    job.read(1)
    with pytest.raises(RequestRejected, match="full"):
        job.read(1)


def test_rows_of_several_requests_run_at_a_time():
    """What the first text lacks is asked for while the second one is not there yet."""
    wire = AnsweringWire()
    reply, job = begun(wire)
    (first,) = wire.jobs
    asyncio.run(job.accepted())
    first.put(Progress(first.request.id, [RowDelta(0, "Der sieht.", 2, "stop")]))
    assert [delta.row for delta in job.read(1)] == [0]
    second = wire.jobs[1]
    assert second.request.prompts == ["English: The\n\nGerman:", "English: sees.\n\nGerman:"]
    second.put(Progress(second.request.id, [RowDelta(1, "sie", 1)]))
    assert job.read(1) == [RowDelta(3, "sie", 1)], "rows are counted on"
    second.put(Progress(second.request.id, [RowDelta(0, "Der", 1, "stop")]))
    first.put(Progress(first.request.id, [RowDelta(1, "Gut.", 1, "stop")]))
    assert {delta.row for delta in asyncio.run(job.read_async(1))} == {1, 2}
    assert not job.exhausted
    second.put(Progress(second.request.id, [RowDelta(1, "ht.", 1, "stop")]))
    job.read(1)
    assert job.exhausted and reply.whole(job, []) == {"texts": ["Der {0} sieht.", "Gut."]}


@pytest.mark.parametrize("how", ["read", "read_async"])
def test_what_comes_while_it_is_read_wakes_the_reader(how):
    wire = AnsweringWire()
    _, job = begun(wire)
    wire.jobs[0].put(Progress("", [RowDelta(0, "Der sieht.", 1, "stop")]))
    job.read(1)
    last = wire.jobs[-1]
    answer = Progress(last.request.id, [RowDelta(0, "Der", 1, "stop")])
    threading.Timer(0.01, last.put, [answer]).start()
    found = job.read(60) if how == "read" else asyncio.run(job.read_async(60))
    assert [delta.text for delta in found] == ["Der"]


def test_so_many_rows_run_at_a_time(monkeypatch):
    monkeypatch.setattr(rounds, "MOST_ROWS", 3)
    texts = TextsAsked(["a {0} b"] * 4, "de", "en")
    reply = TranslationReply(Translator(texts, TranslationForm(), Words()), native_shape, lambda done: {})
    wire = AnsweringWire(["x"] * 3, ["x", "y", "y"], ["y"] * 3, ["y"] * 3)
    job = reply.begin(wire, request_of(reply.rows))
    while not job.exhausted:
        job.read(1)
    assert reply.translator.texts() == ["y {0} y"] * 4
    assert [len(request.prompts) for request in wire.requests] == [3, 3, 3, 3]


def test_a_key_with_a_limit_of_rows_has_no_more_at_a_time_in_any_round(tmp_path, monkeypatch):
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    file = str(tmp_path / "keys.json")
    secret = records.add(file, Key("alice", "", 0, 0.0, rows=2))
    accounts, caller = Accounts(file), Caller()
    caller.is_key(key := accounts.find(secret.encode()))
    asked = TextsAsked(["a {0} b"] * 3, "de", "en")
    reply = TranslationReply(Translator(asked, TranslationForm(), Words()), native_shape, lambda done: {})
    wire = AnsweringWire(["x"] * 2, ["x", "y"], ["y"] * 2, ["y"] * 2, ["y"])
    job = reply.begin(CallerWire(wire, caller, accounts), request_of(reply.rows))
    while len(wire.requests) < 4:
        job.read(1)
        with pytest.raises(OverLimit):
            accounts.ledger.admit(key, 1)
    while not job.exhausted:
        job.read(1)
    assert reply.translator.texts() == ["y {0} y"] * 3
    assert [len(request.prompts) for request in wire.requests] == [2, 2, 2, 2, 1]
    assert accounts.ledger.admit(key, 2), "none runs any more"


def test_a_row_that_is_lost_ends_the_job():
    """A text without its translation would look like one that needs none."""
    wire = AnsweringWire()
    _, job = begun(wire)
    wire.jobs[0].put(Progress("", [RowDelta(1, "", 0, "error", error="Its logits are not finite.")]))
    with pytest.raises(RequestFailed, match="not finite"):
        job.read(1)
    assert wire.cancelled == [wire.requests[0].id]


def test_a_client_that_leaves_cancels_all_that_runs():
    wire = AnsweringWire(["Der sieht."], None)
    _, job = begun(wire)
    job.read(1)
    job.cancel()
    assert wire.cancelled == [request.id for request in wire.requests]


def test_nothing_more_is_asked_for_when_a_client_has_left():
    wire = AnsweringWire(["Der sieht.", "Gut."])
    _, job = begun(wire)
    job.cancel()
    job.read(1)
    assert job.exhausted and len(wire.requests) == 1
