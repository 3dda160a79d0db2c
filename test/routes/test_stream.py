"""The iterators that HTTP replies are made from, fed by hand."""

import json
from collections.abc import Callable

import pytest

from routes.http.replies import JsonLines, Reply, TypedEvents, encode_json, merge
from routes.http.stream import EventStream, SlowJson
from routes.native.batch import NativeReply
from rwkv_batch.wire.client import Job
from rwkv_batch.wire.protocol import Accepted, Failed, GenerateRequest, Progress, RowDelta, TokenLogprob


class Desk:
    """A job whose events the test supplies, and what becomes of it."""

    def __init__(self, rows: int = 1) -> None:
        self.cancelled: list[str] = []
        self.outcomes: list[str] = []
        self.dropped: list[Callable[[], object]] = []
        self.job = Job(GenerateRequest("job", ["p"] * rows, 8), self.cancelled.append)
        self.put(Accepted("job", [1] * rows))

    def put(self, *events) -> None:
        for event in events:
            self.job.put(event)

    def says(self, *deltas: RowDelta) -> None:
        self.put(Progress("job", list(deltas)))

    def events(self, crowded: bool = False) -> EventStream:
        return EventStream(
            self.job, NativeReply("m"), self.outcomes.append, self.dropped.append, lambda: crowded
        )

    def slow(self) -> SlowJson:
        return SlowJson(self.job, NativeReply("m"), self.outcomes.append, self.dropped.append, [])


def data(chunk: bytes) -> list[dict | str]:
    lines = [line.removeprefix("data: ") for line in chunk.decode().split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def texts(chunk: bytes) -> list[list[str]]:
    return [
        [c["delta"].get("content", c.get("finish_reason")) for c in event["choices"]]
        for event in data(chunk)
        if event != "[DONE]"
    ]


def test_what_has_come_since_the_last_pull_is_one_event():
    desk = Desk(rows=2)
    stream = desk.events()
    desk.says(RowDelta(1, "b", 1))
    desk.says(RowDelta(0, "a", 1), RowDelta(1, "B", 1))
    assert texts(next(stream)) == [["bB", "a"]]
    desk.says(RowDelta(0, "z", 1, "stop"))
    assert texts(next(stream)) == [["z"], ["stop"]]
    desk.says(RowDelta(1, "", 0, "length"))
    assert data(next(stream))[-1] == "[DONE]"
    with pytest.raises(StopIteration):
        next(stream)
    assert desk.outcomes == ["ended"]


def test_in_a_crowd_events_are_joined_but_the_first(monkeypatch):
    desk = Desk()
    waits = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        desk.says(RowDelta(0, "c", 1))

    monkeypatch.setattr("routes.http.stream.EVENT_EVERY", 3600.0)  # not over before the second pull
    monkeypatch.setattr("routes.http.stream.time.sleep", wait)
    stream = desk.events(crowded=True)
    desk.says(RowDelta(0, "a", 1))
    assert texts(next(stream)) == [["a"]]
    assert waits == []
    desk.says(RowDelta(0, "b", 1))
    assert texts(next(stream)) == [["bc"]]
    assert 0 < waits[0] <= 3600.0


def test_merging_loses_nothing():
    logprobs = [TokenLogprob(b"x", -1.0, []), TokenLogprob(b"y", -2.0, [])]
    merged = merge(
        [
            RowDelta(3, "x", 1, None, logprobs[:1]),
            RowDelta(1, "", 2),
            RowDelta(3, "y", 1, "stop", logprobs[1:]),
        ]
    )
    assert merged == [RowDelta(3, "xy", 2, "stop", logprobs), RowDelta(1, "", 2)]


@pytest.mark.parametrize(
    "more",
    [
        {"logprobs": [TokenLogprob(b"x", -1.0, [])]},
        {"ids": [7]},
        {"prompt": [TokenLogprob(b"p", -1.0, [])]},
        {"accepted": 1},
        {"rejected": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_merging_keeps_what_one_delta_has_besides_text(more, place):
    deltas = [RowDelta(0, text, 1, **(more if place == number else {})) for number, text in enumerate("xyz")]
    assert merge(deltas) == [RowDelta(0, "xyz", 3, **more)]


def test_merging_keeps_how_a_row_has_ended():
    last = {"finish_reason": "stop", "stop": "END", "error": "broken"}
    assert merge([RowDelta(0, "x", 1), RowDelta(0, "y", 1, **last)]) == [RowDelta(0, "xy", 2, **last)]


def test_silence_is_a_comment_and_a_line_feed():
    assert next(Desk().events()) == b": \n\n"
    assert next(Desk().slow()) == b"\n"


def test_slow_json_ends_with_the_whole_reply():
    desk = Desk()
    stream = desk.slow()
    desk.says(RowDelta(0, "a", 1))
    assert next(stream) == b"\n"
    desk.says(RowDelta(0, "b", 1, "stop"))
    assert json.loads(next(stream))["choices"][0]["message"]["content"] == "ab"
    with pytest.raises(StopIteration):
        next(stream)


@pytest.mark.parametrize("kind", ["events", "slow"])
def test_a_dropped_iterator_cancels_its_job_once(kind):
    desk = Desk()
    stream = getattr(desk, kind)()
    next(stream)
    assert desk.cancelled == []
    stream.close("client stopped taking")
    stream.close()
    del stream
    assert (desk.cancelled, desk.outcomes) == (["job"], ["client stopped taking"])
    assert not desk.dropped, "it had been closed"
    dropped = getattr(desk, kind)()
    del dropped
    assert not desk.outcomes[1:], "who drops it may hold any lock"
    desk.dropped.pop()()
    assert desk.outcomes[1:] == ["client left"] and not desk.dropped


def test_a_failure_is_an_event_and_the_end():
    desk = Desk()
    stream = desk.events()
    desk.put(Failed("job", "It broke."))
    assert data(next(stream)) == [{"error": "It broke."}, "[DONE]"]
    with pytest.raises(StopIteration):
        next(stream)


def test_a_fault_in_the_reply_is_told_and_not_hidden():
    desk = Desk()
    stream = desk.events()
    stream.reply.events = lambda deltas: 1 / 0
    desk.says(RowDelta(0, "secret", 1))
    error, done = data(next(stream))
    assert "fault of the server" in error["error"]
    assert done == "[DONE]"


class Words(Reply):
    def whole(self, job, deltas):
        return {"text": "".join(delta.text for delta in deltas)}

    def events(self, deltas):
        return [{"text": delta.text} for delta in deltas]


class WordEvents(Words, TypedEvents):
    pass


class WordLines(Words, JsonLines):
    pass


FRAMES = [Words().frame, WordEvents().frame, WordLines().frame, encode_json]


@pytest.mark.parametrize("frame", FRAMES, ids=["events", "typed", "lines", "whole"])
@pytest.mark.parametrize("end", [*"\u2028\u2029\x85", *"\v\f\x1c\x1d\x1e\n\r"], ids=ascii)
def test_no_character_ends_a_line_of_json(frame, end):
    """httpx splits streams as str.splitlines does. Neighbours of these characters stay as they are."""
    event = {"type": "text", f"key{end}": f"\u2027{end}é—“{end}{end}\x86", "nested": [end, {"a": end}]}
    text = frame(event).decode()
    data = [line for line in text.splitlines() if line and not line.startswith("event: ")]
    assert len(data) == 1 and "\u2027" in text and "\x86" in text and "—" in text
    assert json.loads(data[0].removeprefix("data: ")) == event


@pytest.mark.parametrize("kind", ["events", "slow"])
def test_who_reads_on_after_too_long_gets_an_error(kind):
    """And no end, which would look as if the reply was complete."""
    desk = Desk()
    stream = getattr(desk, kind)()
    next(stream)
    assert stream.live
    stream.stop()
    assert not stream.live and desk.cancelled == ["job"]
    error = data(next(stream))[0]["error"] if kind == "events" else json.loads(next(stream))["error"]
    assert "not read for too long" in error
    with pytest.raises(StopIteration):
        next(stream)
    assert desk.outcomes == ["client stopped taking"]
