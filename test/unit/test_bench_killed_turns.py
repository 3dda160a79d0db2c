"""What the benchmark of killed engines says of clients that get no answer any more."""

import asyncio
import json
from functools import partial
from types import SimpleNamespace

import httpx
import pytest

from bench import killed_turns

pytestmark = pytest.mark.thorough

SECONDS, EACH = 1.0, 0.1  # of the measurement, and of a request, by a clock that nothing else moves


def test_a_session_that_is_answered_no_more_has_waited_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    tries = 0

    def server(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            turns = [{"prompt": text, "completion": "x"} for text in asked[:2]]
            return httpx.Response(200, json={"turns": turns})
        nonlocal tries
        tries += 1
        asked.append(json.loads(request.content)["contents"][0])
        found = {"choices": [{"message": {"content": "x"}}]}
        return httpx.Response(200, json=found) if len(asked) <= 2 else httpx.Response(503, json={})

    client = partial(httpx.AsyncClient, transport=httpx.MockTransport(server))
    monkeypatch.setattr(killed_turns.httpx, "AsyncClient", client)
    monkeypatch.setattr(killed_turns, "time", SimpleNamespace(monotonic=lambda: tries * EACH))
    monkeypatch.setattr(killed_turns.os, "kill", lambda process, number: None)
    monkeypatch.setattr(killed_turns, "BEFORE", 0.0)
    monkeypatch.setattr(killed_turns, "BEHIND", SECONDS)
    seen = asyncio.run(killed_turns.turns_under_kill("http://server", 1, 0))
    assert (seen.acknowledged, seen.lost, seen.twice, seen.failed) == (2, 0, 0, 8)
    assert seen.gap == pytest.approx(SECONDS - 2 * EACH)
