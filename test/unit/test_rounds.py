"""Replies whose rows come in rounds: one job for those who read them."""

import asyncio

import pytest

from routes.http.errors import native_shape
from routes.translate.rounds import TranslationReply, request_of
from rwkv_batch.translation.forms import TranslationForm
from rwkv_batch.translation.translator import TextsAsked, Translator, Words
from rwkv_batch.wire.client import Job, RequestRejected
from rwkv_batch.wire.protocol import Accepted, GenerateRequest, Progress, Rejected, RowDelta


class AnsweringWire:
    """Has an answer for each request, which is an event behind Accepted."""

    def __init__(self, *answers: list[str] | Rejected) -> None:
        self.answers = list(answers)
        self.requests: list[GenerateRequest] = []
        self.cancelled: list[str] = []

    def submit(self, request: GenerateRequest) -> Job:
        self.requests.append(request)
        job = Job(request, self.cancelled.append)
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
    assert len(job.acceptance.prompt_tokens) == 2, "those of the first round"


def test_a_later_round_that_is_refused_ends_the_job():
    wire = AnsweringWire(["Der sieht.", "Gut."], Rejected("x", "overloaded", "The queue is full."))
    _, job = begun(wire)
    job.read(1)
    with pytest.raises(RequestRejected, match="full"):
        job.read(1)


def test_a_client_that_leaves_cancels_the_round_that_runs():
    wire = AnsweringWire(["Der sieht.", "Gut."])
    _, job = begun(wire)
    job.read(1)
    job.cancel()
    assert wire.cancelled == [wire.requests[-1].id]


def test_no_round_begins_for_a_client_that_has_left():
    wire = AnsweringWire(["Der sieht.", "Gut."])
    _, job = begun(wire)
    job.cancel()
    job.read(1)
    assert job.exhausted and len(wire.requests) == 1
