"""Sessions through the real server: facts are remembered, whichever tiers the state has been in."""

import os
import random
import signal
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from serving import START_SECONDS, Server, alive, events, on_gpu, until

from rwkv_batch.text.tokenizer import Tokenizer

GREEDY = {
    "temperature": 0,
    "alpha_presence": 0,
    "alpha_frequency": 0,
    "max_tokens": 60,
    "stop_tokens": [0, 24281],
}
NAMES = ["Anna", "Tom", "Lucy", "Jack", "Emma", "Max", "Nina", "Paul", "Mary", "Leo"]
INTRODUCE = "User: My name is {}.\n\nAssistant:"
ASK = "User: What is my name?\n\nAssistant:"
TOKENIZER = Tokenizer()
BETWEEN = "User: What is {} + {}?\n\nAssistant:"


class Sessions:
    """A server with small tiers, and a client that knows what it has said."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.database = folder / "sessions.db"
        self.flags = (
            "--device",
            "cpu",
            "--frontends",
            "1",
            "--l1",
            "4",
            "--l2",
            "8",
            "--state-db",
            str(self.database),
            *flags,
        )
        self.said: dict[str, list[tuple[str, str]]] = {}
        self.start()

    def start(self) -> None:
        self.server = Server(*self.flags)
        self.http = httpx.Client(base_url=self.server.url, timeout=120)

    def stop(self) -> None:
        assert self.server.stop() == 0, self.server.log()

    def kill(self) -> None:
        """kill -9 of everything at once."""
        pids = [self.server.process.pid, *self.server.children().values()]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        self.server.stop(signal.SIGKILL)
        until(lambda: not any(alive(pid) for pid in pids))

    def turn(self, session: str, prompt: str) -> str:
        reply = self.http.post(
            "/state/chat/completions", json=GREEDY | {"contents": [prompt], "session_id": session}
        )
        assert reply.status_code == 200, reply.text
        text = reply.json()["choices"][0]["message"]["content"]
        self.said.setdefault(session, []).append((prompt, text))
        return text

    def post(self, path: str, body: dict) -> httpx.Response:
        return self.http.post(path, json=body)

    def stored(self) -> list[str]:
        """The names of all sessions."""
        info = self.post("/state/status", {}).json()
        names = [session["session_id"] for session in info["sessions"]]
        assert info["total_sessions"] == len(names)
        return sorted(names)


@pytest.fixture(scope="module")
def sessions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sessions]:
    """For tests that neither stop it nor use the sessions of each other."""
    running = Sessions(tmp_path_factory.mktemp("sessions"))
    yield running
    running.stop()


def one_prompt(said: list[tuple[str, str]]) -> tuple[list[int], str]:
    """The tokens of a session up to its last answer as one prompt, and that answer."""
    tokens = []
    for number, (prompt, text) in enumerate(said):
        tokens += TOKENIZER.encode(prompt if number == 0 else "\n\n" + prompt)
        if number < len(said) - 1:
            tokens += TOKENIZER.encode(text)
    return tokens, said[-1][1]


@pytest.mark.thorough
def test_200_sessions_remember_through_every_tier_restart_and_kill(tmp_path: Path):
    sessions, draw = Sessions(tmp_path), random.Random(1)
    name = {f"s{i}": NAMES[i % len(NAMES)] for i in range(200)}

    def everybody(prompt) -> None:
        order = list(name)
        draw.shuffle(order)
        with ThreadPoolExecutor(12) as pool:
            list(pool.map(lambda session: sessions.turn(session, prompt(session)), order))

    everybody(lambda session: INTRODUCE.format(name[session]))
    sessions.stop()
    sessions.start()
    everybody(lambda session: BETWEEN.format(len(session), draw.randrange(9)))
    sessions.kill()
    sessions.start()
    everybody(lambda session: ASK)
    forgotten = [session for session in name if name[session] not in sessions.said[session][-1][1]]
    assert not forgotten
    for turns in (1, 2, 3):  # and every turn is what one long prompt would have brought
        prompts, texts = zip(*(one_prompt(sessions.said[session][:turns]) for session in name), strict=True)
        body = {
            "prompt": prompts,
            "temperature": 0,
            "max_tokens": 60,
            "stop_tokens": [0, 24281],
            "use_prefix_cache": False,
        }
        choices = sessions.post("/v1/completions", body).json()["choices"]
        assert tuple(choice["text"] for choice in choices) == texts
    sessions.stop()


@pytest.mark.parametrize("stream", [False, True])
def test_a_turn_that_is_sent_again_is_answered_and_not_appended(sessions: Sessions, stream: bool):
    session = f"again-{stream}"
    body = GREEDY | {"contents": [INTRODUCE.format("Nina")], "session_id": session, "stream": stream}
    sent = [
        sessions.http.post("/state/chat/completions", json=body, headers={"Idempotency-Key": "one"})
        for _ in range(2)
    ]
    if stream:
        texts = {
            "".join(
                event["choices"][0]["delta"].get("content", "")
                for event in events(reply)
                if event != "[DONE]"
            )
            for reply in sent
        }
    else:
        texts = {reply.json()["choices"][0]["message"]["content"] for reply in sent}
    assert len(texts) == 1 and texts != {""}
    history = sessions.http.get("/v1/state/history", params={"session_id": session}).json()
    assert [turn["completion"] for turn in history["turns"]] == [*texts]
    other = body | {"contents": [ASK]}
    refused = sessions.http.post("/state/chat/completions", json=other, headers={"Idempotency-Key": "one"})
    assert refused.status_code == 400 and "Idempotency-Key" in refused.json()["error"]
    assert "Nina" in sessions.turn(session, ASK)


def test_branches_and_forks_do_not_touch_each_other(sessions: Sessions):
    def branch(node: int, prompt: str) -> tuple[str, int]:
        body = GREEDY | {"contents": [prompt], "session_id": "tree", "dialogue_idx": node}
        reply = sessions.post("/multi_state/chat/completions", body).json()
        return reply["choices"][0]["message"]["content"], reply["dialogue_idx"]

    _, root = branch(0, INTRODUCE.format("Anna"))
    _, left = branch(root, "User: I live in Paris.\n\nAssistant:")
    _, right = branch(root, "User: I live in Berlin.\n\nAssistant:")
    where = "User: Where do I live?\n\nAssistant:"
    for node, place in ((left, "Paris"), (right, "Berlin"), (left, "Paris")):
        assert place in branch(node, where)[0]
        assert "Anna" in branch(node, ASK)[0]
    sessions.turn("origin", INTRODUCE.format("Tom"))
    assert (
        sessions.post("/v1/state/fork", {"session_id": "origin", "new_session_id": "copy"}).status_code == 200
    )
    sessions.turn("copy", "User: My name is Lucy.\n\nAssistant:")
    assert "Tom" in sessions.turn("origin", ASK)
    assert "Lucy" in sessions.turn("copy", ASK)


def test_a_history_is_shown_rewound_and_branched_from(sessions: Sessions):
    for prompt in (INTRODUCE.format("Tom"), "User: My name is Lucy.\n\nAssistant:", ASK):
        sessions.turn("told", prompt)
    history = sessions.http.get("/v1/state/history", params={"session_id": "told"}).json()
    for (prompt, text), turn in zip(sessions.said["told"], history["turns"], strict=True):
        assert turn["prompt"].removeprefix("\n\n") == prompt and turn["completion"] == text
        assert TOKENIZER.encode(turn["prompt"]) == turn["prompt_tokens"]
        assert turn["end"] - turn["start"] == len(turn["prompt_tokens"]) + len(turn["completion_tokens"])
    assert [turn["start"] for turn in history["turns"][1:]] == [turn["end"] for turn in history["turns"][:-1]]
    assert history["position"] == history["turns"][-1]["end"]
    fork = {"session_id": "told", "new_session_id": "early", "turn": 1}
    assert sessions.post("/v1/state/fork", fork).status_code == 200
    rewound = sessions.post("/v1/state/rewind", {"session_id": "told", "turn": 2}).json()
    assert rewound["position"] == history["turns"][1]["end"]
    assert sessions.turn("told", ASK) == sessions.said["told"][2][1]
    assert "Tom" in sessions.turn("early", ASK)
    assert sessions.post("/v1/state/rewind", {"session_id": "told", "turn": 9}).status_code == 404
    assert sessions.post("/v1/state/rewind", {"session_id": "told", "turn": 0}).json()["position"] == 0
    assert "Tom" not in sessions.turn("told", ASK)


def test_two_turns_at_once_run_one_after_the_other(sessions: Sessions):
    others = sessions.stored()
    sessions.turn("both", INTRODUCE.format("Emma"))
    with ThreadPoolExecutor() as pool:
        turns = [pool.submit(sessions.turn, "both", f"User: What is {n} + 1?\n\nAssistant:") for n in (2, 5)]
        assert sorted("3" in turn.result() for turn in turns) == [False, True]
    assert "Emma" in sessions.turn("both", ASK)
    assert sessions.stored() == sorted([*others, "both"])


def test_a_turn_that_is_cut_off_leaves_the_state_before_it(sessions: Sessions):
    sessions.turn("cut", INTRODUCE.format("Jack"))
    body = GREEDY | {
        "contents": ["User: My name is Max.\n\nAssistant:"],
        "session_id": "cut",
        "stream": True,
        "stop_tokens": [],
        "max_tokens": 1_000_000,
        "chunk_size": 1,
    }
    with sessions.http.stream("POST", "/state/chat/completions", json=body) as response:
        next(events(response))
    assert "Jack" in sessions.turn("cut", ASK)


def test_a_session_deleted_during_its_turn_is_gone(sessions: Sessions):
    others = sessions.stored()
    sessions.turn("gone", INTRODUCE.format("Nina"))
    body = GREEDY | {
        "contents": [ASK],
        "session_id": "gone",
        "stream": True,
        "stop_tokens": [],
        "max_tokens": 300,
        "chunk_size": 1,
    }
    with sessions.http.stream("POST", "/state/chat/completions", json=body) as response:
        stream = events(response)
        next(stream)
        assert sessions.post("/state/delete", {"session_id": "gone"}).status_code == 200
        assert list(stream)[-1] == "[DONE]"
    assert sessions.stored() == others
    assert "Nina" not in sessions.turn("gone", ASK)


def test_a_stop_string_leaves_exactly_the_text_before_it(sessions: Sessions):
    """The state has seen tokens of the stop string when it is complete; they must not stay in it."""
    body = GREEDY | {
        "contents": ["User: What is the capital of France?\n\nAssistant:"],
        "session_id": "stopped",
        "stop_tokens": [0, "ital of"],
    }
    text = sessions.post("/state/chat/completions", body).json()["choices"][0]["message"]["content"]
    assert text == " The cap"
    tokens = TOKENIZER.encode(body["contents"][0]) + TOKENIZER.encode(text) + TOKENIZER.encode("\n\n" + ASK)
    expected = sessions.post(
        "/v1/completions", {"prompt": tokens, "temperature": 0, "max_tokens": 60, "stop_tokens": [0, 24281]}
    ).json()
    assert sessions.turn("stopped", ASK) == expected["choices"][0]["text"]


@pytest.mark.thorough
def test_damage_costs_at_most_its_session(tmp_path: Path):
    sessions = Sessions(tmp_path)
    for session in ("good", "bad", "lucky"):
        sessions.turn(session, INTRODUCE.format("Paul"))
    sessions.stop()
    images = list(Path(f"{sessions.database}.images").glob("*"))
    assert images or on_gpu(), "a GPU reads so few tokens again in less time than an image"
    for image in images:
        data = bytearray(image.read_bytes())
        data[len(data) // 2] ^= 1
        image.write_bytes(data)
    with sqlite3.connect(sessions.database) as database:
        where = "id = (SELECT turn FROM sessions WHERE key = x'626164')"
        assert database.execute(f"UPDATE turns SET completion = prompt WHERE {where}").rowcount == 1
    database.close()
    sessions.start()
    reply = sessions.post("/state/chat/completions", GREEDY | {"contents": [ASK], "session_id": "bad"})
    assert reply.status_code >= 400 and "damaged" in reply.json()["error"]
    for session in ("good", "lucky"):
        assert "Paul" in sessions.turn(session, ASK), "its tokens are fed in place of its image"
    assert sessions.turn("bad", ASK)  # it is gone, so the next turn begins anew
    assert ("passed over" in sessions.server.log()) == bool(images)
    sessions.stop()


def test_greedy_text_is_the_same_on_every_route(sessions: Sessions):
    for number, prompt in enumerate(
        ("User: Write a short story about a cat.\n\nAssistant:", "English: Good morning\n\nGerman:", ASK)
    ):
        native = GREEDY | {"contents": [prompt], "stop_tokens": [0]}
        routes = {
            "/v1/chat": {},
            "/v2/chat": {"pad_zero": False},
            "/big_batch": {"stream": False},
            "/state/chat": {"session_id": f"new-{number}"},
            "/multi_state/chat": {"session_id": f"tree-{number}", "dialogue_idx": 0},
        }
        texts = {
            route: sessions.post(f"{route}/completions", native | extra).json()["choices"][0]["message"][
                "content"
            ]
            for route, extra in routes.items()
        }
        completion = {"prompt": prompt, "temperature": 0, "max_tokens": 60}
        texts["/v1"] = sessions.post("/v1/completions", completion).json()["choices"][0]["text"]
        assert len(set(texts.values())) == 1, texts
    chat = {"messages": [{"role": "user", "content": "What is 7 + 5?"}], "temperature": 0}
    texts = {
        sessions.post("/openai/v1/chat/completions", chat | extra).json()["choices"][0]["message"]["content"]
        for extra in ({}, {"session_id": "chat"}, {"stop_tokens": [0]})
    }
    assert texts == {"7 + 5 = 12"}


def test_a_file_of_something_else_is_no_place_for_sessions(tmp_path: Path):
    other = tmp_path / "model.pth"
    other.write_bytes(b"PK\3\4 a checkpoint")
    refused = Server("--device", "cpu", "--state-db", str(other), wait=False)
    assert refused.process.wait(START_SECONDS) == 2
    assert f"{other} is no database; name another file for it." in refused.log()
    assert "Traceback" not in refused.log() and other.read_bytes() == b"PK\3\4 a checkpoint"


@pytest.mark.thorough
def test_a_database_that_is_damaged_all_over_is_put_aside(tmp_path: Path):
    (tmp_path / "sessions.db").write_bytes(b"SQLite format 3\0" + b"and not a database" * 1000)
    sessions = Sessions(tmp_path)
    sessions.turn("new", INTRODUCE.format("Mary"))
    sessions.stop()
    assert len(list(tmp_path.glob("sessions.db.damaged*"))) == 1


def test_two_servers_do_not_share_a_database(sessions: Sessions):
    second = Server(*sessions.flags, wait=False)
    assert second.process.wait(START_SECONDS) == 2
    assert "sessions.db" in second.log() and "Traceback" not in second.log()


def test_a_state_travels_as_a_file_to_the_same_model_only(sessions: Sessions):
    sessions.turn("home", INTRODUCE.format("Leo"))
    exported = sessions.post("/v1/state/export", {"session_id": "home"})
    assert exported.status_code == 200
    imported = sessions.http.post("/v1/state/import", params={"session_id": "away"}, content=exported.content)
    assert imported.status_code == 200, imported.text
    assert "Leo" in sessions.turn("away", ASK)
    damaged = bytearray(exported.content)
    damaged[len(damaged) // 3] ^= 4
    for content in (bytes(damaged), exported.content[:-1], b"", b"hello"):
        refused = sessions.http.post("/v1/state/import", params={"session_id": "bad"}, content=content)
        assert refused.status_code == 400 and refused.json()["error"]
