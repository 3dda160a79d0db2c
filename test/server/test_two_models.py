"""Two models behind one real server: texts, sessions and names."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from checkpoints import write_pth
from serving import START_SECONDS, Server, events, until

from bench.make_checkpoint import random_checkpoint
from rwkv_batch.bundled import unpack

GREEDY = {"temperature": 0, "max_tokens": 12}
CAPITAL = {"messages": [{"role": "user", "content": "What is the capital of France?"}], **GREEDY}


@pytest.fixture(scope="module")
def random_file(tmp_path_factory) -> Path:
    return write_pth(tmp_path_factory.mktemp("files") / "random.pth", random_checkpoint(2, 128, 65536))


@pytest.fixture(scope="module")
def both(random_file: Path) -> Iterator[Server]:
    bundled = random_file.with_name("rwkv7-demo.pth")
    write_pth(bundled, unpack.tensors())
    server = Server(
        "--device",
        "cpu",
        "--frontends",
        "2",
        "--model-path",
        str(bundled),
        "--model-path",
        f"wild={random_file}",
        "--models",
        str(random_file.parent),
    )
    yield server
    assert server.stop() == 0, server.log()


def test_each_answers_as_itself(both: Server, server: Server):
    url = f"{both.url}/v1/chat/completions"
    names = [model["id"] for model in httpx.get(f"{both.url}/v1/models", timeout=60).json()["data"]]
    assert names == ["rwkv7-demo", "wild"]
    demo, wild = (httpx.post(url, json=CAPITAL | {"model": name}, timeout=60) for name in names)
    single = httpx.post(f"{server.url}/v1/chat/completions", json=CAPITAL, timeout=60)
    assert "Paris" in demo.json()["choices"][0]["message"]["content"]
    assert demo.json()["choices"] == single.json()["choices"]
    assert wild.json()["choices"] != demo.json()["choices"]
    assert (demo.json()["model"], wild.json()["model"]) == ("rwkv7-demo", "wild")
    prints = [reply.headers["x-model-fingerprint"] for reply in (demo, wild, single)]
    assert prints[0] == prints[2] != prints[1] == wild.json()["system_fingerprint"]


def test_each_has_its_sessions_in_a_file_of_its_own(both: Server):
    turn = {"session_id": "s", "contents": ["User: Hi\n\nAssistant:"], **GREEDY}
    assert (
        httpx.post(
            f"{both.url}/state/chat/completions", json=turn | {"model": "wild"}, timeout=60
        ).status_code
        == 200
    )

    def sessions(**fields) -> list[str]:
        found = httpx.post(f"{both.url}/state/status", json=fields, timeout=60).json()["sessions"]
        return [session["session_id"] for session in found]

    assert (sessions(model="wild"), sessions()) == (["s"], [])
    assert {"sessions.db", "sessions.wild.db"} <= {file.name for file in Path(both.scratch).iterdir()}


def test_a_swap_while_a_stream_runs(both: Server, random_file: Path):
    url = f"{both.url}/v1/chat/completions"
    write_pth(random_file.with_name("next.pth"), random_checkpoint(2, 128, 65536, seed=5))
    random_file.with_name("cut.pth").write_bytes(random_file.read_bytes()[:5000])
    body = {"contents": ["hello"], "max_tokens": 800, "stop_tokens": [], "temperature": 0, "model": "wild"}
    alone = httpx.post(url, json=body, timeout=120).json()["choices"][0]["message"]["content"]
    with httpx.stream("POST", url, json=body | {"stream": True}, timeout=120) as stream:
        seen = events(stream)
        begun = next(seen)
        cut = httpx.post(
            f"{both.url}/loadmodel", json={"model_filename": "cut.pth", "model_viewname": "wild"}, timeout=60
        )
        assert cut.status_code == 400 and "cut.pth" in cut.json()["error"]
        load = {"model_filename": "next.pth", "model_viewname": "wild"}
        swapped = httpx.post(f"{both.url}/loadmodel", json=load, timeout=120)
        assert (swapped.status_code, swapped.json()) == (200, {"status": "success"})
        after = httpx.post(url, json=body | {"max_tokens": 40}, timeout=60)
        choices = [event["choices"][0] for event in (begun, *seen) if isinstance(event, dict)]
    text = "".join(choice["delta"].get("content", "") for choice in choices)
    assert (text, choices[-1]["finish_reason"]) == (alone, "length"), "it has gone on with its own weights"
    assert not alone.startswith(after.json()["choices"][0]["message"]["content"])
    remove = {"model_viewname": "wild"}
    until(lambda: httpx.post(f"{both.url}/removemodel", json=remove, timeout=60).status_code != 409)
    gone = httpx.post(url, json=CAPITAL | {"model": "wild"}, timeout=60)
    assert gone.status_code == 404 and "rwkv7-demo" in gone.json()["error"]["message"]
    only = httpx.post(f"{both.url}/removemodel", json={}, timeout=60)
    assert only.status_code == 400 and "only model" in only.json()["error"]


def test_two_of_a_name_are_refused(tmp_path: Path):
    server = Server("--model-path", "a.pth", "--model-path", "b/a.pth", wait=False)
    assert server.process.wait(START_SECONDS) == 2
    assert "two models are called a;" in server.log()
