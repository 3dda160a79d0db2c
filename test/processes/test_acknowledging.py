"""When front ends say that an engine is ready: once each of them sends requests to it."""

from typing import cast

import pytest

from rwkv_batch.processes import acknowledging
from rwkv_batch.processes.acknowledging import Acknowledged
from rwkv_batch.processes.child import Child
from rwkv_batch.wire.supervision import AllServe, Serving


class FrontEnd:
    """What it has been sent."""

    def __init__(self, name: str) -> None:
        self.name, self.sent = name, list[object]()

    def send(self, message: object) -> None:
        self.sent.append(message)


class Frontends:
    """Two front ends and what is sent to them."""

    def __init__(self) -> None:
        self.one, self.two = FrontEnd("one"), FrontEnd("two")
        self.running = [self.one, self.two]
        self.acknowledged = Acknowledged(cast("list[Child]", self.running))

    def serves(self, engine: int, begins: bool = True) -> None:
        self.acknowledged.serves(Serving([], engine=engine), begins)

    def take(self, *frontends: FrontEnd) -> list[list[int]]:
        """They acknowledge one message each; the engines that each of all may call ready by now."""
        for frontend in frontends:
            self.acknowledged.taken(cast("Child", frontend))
        self.acknowledged.look()
        return self.ready

    @property
    def ready(self) -> list[list[int]]:
        return [
            [message.engine for message in frontend.sent if isinstance(message, AllServe)]
            for frontend in (self.one, self.two)
        ]


@pytest.fixture
def frontends() -> Frontends:
    return Frontends()


def test_nobody_is_ready_before_all_have_taken_it(frontends: Frontends):
    frontends.serves(0)
    assert frontends.take() == [[], []]
    assert frontends.take(frontends.one) == [[], []]
    assert frontends.take(frontends.two) == [[0], [0]]
    assert frontends.take() == [[0], [0]] and frontends.acknowledged.due is None, "once each"


def test_an_answer_to_an_earlier_message_is_none_to_this_one(frontends: Frontends):
    frontends.serves(0)
    frontends.acknowledged.ends(0)  # it has died, and is back before a front end has read of either
    frontends.serves(0)
    assert frontends.take(frontends.one, frontends.two) == [[], []]
    assert frontends.take(frontends.one, frontends.two) == [[0], [0]]


def test_engines_are_ready_one_by_one_and_a_change_of_models_is_no_beginning(frontends: Frontends):
    frontends.serves(0)
    frontends.serves(1)
    assert frontends.take(frontends.one, frontends.two) == [[0], [0]]
    frontends.serves(0, begins=False)
    assert frontends.take(frontends.one, frontends.two) == [[0, 1], [0, 1]]
    assert frontends.take(frontends.one, frontends.two) == [[0, 1], [0, 1]]


def test_one_that_has_died_is_not_waited_for(frontends: Frontends):
    frontends.serves(0)
    assert frontends.take(frontends.two) == [[], []]
    frontends.running.remove(frontends.one)
    frontends.acknowledged.lost(cast("Child", frontends.one))
    assert frontends.take() == [[], [0]]


def test_one_that_comes_later_knows_what_the_others_say(frontends: Frontends):
    frontends.running.remove(frontends.two)
    frontends.serves(0)
    for _ in range(2):  # while the others do not say so yet, and when they do
        frontends.two.sent = []
        frontends.acknowledged.joins(cast("Child", frontends.two), Serving([]))
        assert frontends.two.sent[0] == Serving([])
        assert frontends.ready[1] == frontends.ready[0]
        frontends.take(frontends.one)


def test_one_that_is_stopped_is_not_waited_for_for_ever(
    frontends: Frontends, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(acknowledging, "PATIENCE", 0.0)
    frontends.serves(0)
    assert frontends.acknowledged.due == 0
    assert frontends.take(frontends.one) == [[0], [0]]
    assert "two: nothing is read" in caplog.text
