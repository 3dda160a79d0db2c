"""Two engines, and two stages, on one GPU say what one engine says to each question.

`--servers-on` runs the other tests of servers there: two engines by `cuda:0,cuda:0`, stages by `[0,0]`.
Texts of an adapter are those of its training, which stay the same however many rows a step has.
"""

import os
import signal
from collections.abc import Iterator

import httpx
import pytest
from cuda_gpu import needs_gpu
from serving import Server, events, until

pytestmark = needs_gpu

MEMORY = ["--gpu-memory", "4", "--frontends", "2", "--max-adapters", "2"]
ONE = ["--device", "cuda:0", *MEMORY]
TOGETHER = {
    "two engines": ["--device", "cuda:0,cuda:0", *MEMORY],
    "two stages": ["--pp-devices", "[0,0]", *MEMORY],
    "two engines of two stages": ["--pp-devices", "[0,0],[0,0]", *MEMORY],
}
GREEDY = {"temperature": 0, "alpha_presence": 0, "alpha_frequency": 0, "max_tokens": 24}
COUNTRIES = ("France", "Japan", "Germany", "Italy", "Spain", "China", "Egypt", "Canada")
NAME, SKY = "User: What is my name?\n\nAssistant:", "User: What colour is the sky?\n\nAssistant:"
PIRATE = {"state_filename": "pirate.pth", "state_viewname": "pirate"}
CAPITALS = {"lora_name": "capitals", "lora_path": "capitals.pth", "adapter_alpha": 16}
LONG = GREEDY | {"stop_tokens": [], "max_tokens": 80, "chunk_size": 1, "use_prefix_cache": False}


class Asking:
    """A client of a server, and what it was answered, in order."""

    def __init__(self, server: Server) -> None:
        self.server, self.http = server, httpx.Client(base_url=server.url, timeout=120)
        self.said: list[object] = []
        self.post("/loadstatemodel", PIRATE)
        self.load()

    def load(self) -> None:
        """The adapter, which a single engine has no more that has died."""
        if not self.http.get("/v1/adapters").json()["data"]:
            reply = self.http.post("/v1/load_lora_adapter", json=CAPITALS)
            assert reply.status_code == 200, reply.text

    def post(self, path: str, body: dict) -> dict:
        reply = self.http.post(path, json=body)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def texts(self, path: str, body: dict) -> list[str]:
        found = [choice["message"]["content"] for choice in self.post(path, GREEDY | body)["choices"]]
        self.said.append(found)
        return found

    def turn(self, session: str, prompt: str) -> str:
        return self.texts("/state/chat/completions", {"contents": [prompt], "session_id": session})[0]

    def prompts(self) -> None:
        questions = [f"User: What is the capital of {each}?\n\nAssistant:" for each in COUNTRIES]
        for chosen in ({}, {"adapter": "capitals"}, {"state_id": "pirate"}):
            self.texts("/v1/chat/completions", {"contents": questions} | chosen)
        body = GREEDY | {"contents": questions, "stream": True}
        rows = dict.fromkeys(range(len(questions)), "")
        with self.http.stream("POST", "/v1/chat/completions", json=body) as stream:
            for event in events(stream):
                for choice in event["choices"] if isinstance(event, dict) else ():
                    rows[choice["index"]] += choice["delta"].get("content", "")
        self.said.append(rows)

    def sessions(self) -> None:
        for number, name in enumerate(("Anna", "Tom", "Lucy", "Jack")):
            session = f"s{number}"
            self.turn(session, f"User: My name is {name}.\n\nAssistant:")
            self.turn(session, SKY)
            fork = {"session_id": session, "new_session_id": f"{session} fork", "turn": 1}
            self.post("/v1/state/fork", fork)
            assert name in self.turn(session, NAME) and name in self.turn(f"{session} fork", NAME)
            self.post("/v1/state/rewind", {"session_id": session, "turn": 2})
            assert name in self.turn(session, NAME)

    def responses(self) -> None:
        exact, previous = {"model": "rwkv7", "temperature": 0, "max_output_tokens": 24}, None
        for text in ("My name is Alice.", "What colour is the sky?", "What is my name?"):
            body = exact | {"input": text, "previous_response_id": previous}
            found = self.post("/v1/responses", body)
            previous = found["id"]
            self.said.append([part["text"] for item in found["output"] for part in item["content"]])
        assert self.said[-1] == ["Your name is Alice."]

    def pauses(self) -> None:
        tales = [f"User: Tell me {n} stories.\n\nAssistant:" for n in ("two", "three", "four")]
        rows = dict.fromkeys(range(len(tales)), "")
        body, named = LONG | {"contents": tales, "stream": True}, {"X-Request-Id": "tales"}
        with self.http.stream("POST", "/v1/chat/completions", json=body, headers=named) as stream:
            said = events(stream)
            next_one = next(said)
            assert self.post("/v1/server/pause", {"request_id": "tales"})["paused"]
            for event in (next_one, *said):
                for choice in event["choices"] if isinstance(event, dict) else ():
                    rows[choice["index"]] += choice["delta"].get("content", "")
        rest = self.post("/v1/server/resume", {"request_id": "tales", "stream": False})
        for choice in rest["choices"]:
            rows[choice["index"]] += choice["message"]["content"]
        self.said.append(rows)

    def kill(self) -> None:
        """Every engine, one after the other; sessions go on."""
        for name, pid in self.server.children().items():
            if not name.startswith("engine"):
                continue
            os.kill(pid, signal.SIGKILL)
            until(lambda name=name, pid=pid: self.server.children().get(name, pid) != pid, 60)
            until(self._all_up, 120)
        self.load()
        for number in range(4):
            self.turn(f"s{number}", NAME)

    def _all_up(self) -> bool:
        text = self.http.get("/metrics").text
        ready = self.http.get("/health").json()["status"] == "ready"
        return (
            ready
            and "rwkv:engine_up" in text
            and not any(
                line.startswith("rwkv:engine_up") and line.endswith(" 0.0") for line in text.splitlines()
            )
        )


def all_said(flags: list[str]) -> list[object]:
    """What a server with these flags answers."""
    server = Server(*flags)
    try:
        asking = Asking(server)
        for ask in (asking.prompts, asking.sessions, asking.responses, asking.pauses, asking.kill):
            ask()
        asking.prompts()
    finally:
        code = server.stop()
    assert code == 0, server.log()
    return asking.said


@pytest.fixture(scope="module")
def alone() -> Iterator[list[object]]:
    yield all_said(ONE)


@pytest.mark.parametrize("flags", TOGETHER.values(), ids=[*TOGETHER])
def test_what_is_said_is_what_one_engine_says(flags: list[str], alone: list[object]):
    found = all_said(flags)
    different = [(ours, theirs) for ours, theirs in zip(found, alone, strict=True) if ours != theirs]
    assert not different
