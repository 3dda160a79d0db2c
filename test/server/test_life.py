"""Clients that leave, processes that die, signals: nothing hangs, nothing is left behind."""

import json
import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from serving import Server, alive, events, until

PROMPT = "User: What is the capital of France?\n\nAssistant:"
ENDLESS = {
    "contents": [PROMPT],
    "stop_tokens": [],
    "max_tokens": 10_000_000,
    "temperature": 0,
    "chunk_size": 1,
}
SHORT = {"contents": [PROMPT], "temperature": 0, "alpha_presence": 0, "alpha_frequency": 0, "max_tokens": 20}
DEADLINE = 60  # seconds until a test gives up on something that takes a fraction of one


def narrow_server() -> Iterator[Server]:
    running = Server("--device", "cpu", "--max-rows", "1", "--frontends", "1", "--hung-seconds", "8")
    yield running
    pids = running.children().values()
    assert running.stop() == 0, running.log()
    assert not [pid for pid in pids if alive(pid)], "processes stay behind"
    assert sorted(p.name for p in Path(running.scratch).iterdir()) == ["log", "sessions.db"], (
        "temporary files stay behind"
    )
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", running.port))


# One row at a time, one front end: what holds the slot keeps everybody else waiting. Tests share the
# first one, also those that kill a process of it, as another takes its place; the second is for a test that
# ends it.
narrow = pytest.fixture(narrow_server, scope="module", name="narrow")
ending = pytest.fixture(narrow_server, name="ending")


def answer(server: Server) -> str:
    reply = httpx.post(server.url + "/v1/chat/completions", json=SHORT, timeout=DEADLINE)
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["message"]["content"]


def test_of_two_servers_that_start_at_once_on_one_port_one_serves():
    one = Server("--device", "cpu", "--frontends", "1", wait=False)
    other = Server("--device", "cpu", "--frontends", "1", "--port", str(one.port), wait=False)
    try:
        until(lambda: one.process.poll() is not None or other.process.poll() is not None)
        refused, left = (one, other) if one.process.returncode is not None else (other, one)
        assert refused.process.returncode == 2 and "choose another --port" in refused.log()
        left.url = one.url
        left.wait_ready()
        assert "Paris" in answer(left)
        assert left.stop() == 0, left.log()
    finally:
        for each in (one, other):
            each.process.kill()


def test_a_front_end_may_have_more_connections_than_a_shell_gives_it(narrow: Server):
    for name, pid in narrow.children().items():
        if name.startswith("frontend"):
            limits = Path(f"/proc/{pid}/limits").read_text().splitlines()
            (line,) = [line for line in limits if "open files" in line]
            soft, hard = (int(number) for number in line.split()[3:5])
            assert soft >= min(hard, 4096)
            break
    else:
        raise AssertionError("there is no front end")


def test_a_client_that_leaves_a_stream_frees_its_row(narrow: Server):
    with httpx.stream(
        "POST", narrow.url + "/v1/chat/completions", json=ENDLESS | {"stream": True}, timeout=DEADLINE
    ) as response:
        next(events(response))
    assert "Paris" in answer(narrow)


def test_a_client_that_leaves_while_it_waits_for_a_whole_reply_frees_its_row(narrow: Server):
    body = json.dumps(ENDLESS).encode()
    with socket.create_connection(("127.0.0.1", narrow.port), timeout=DEADLINE) as raw:
        raw.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
        assert raw.recv(1)  # the head of the reply: the row runs
    assert "Paris" in answer(narrow)


def test_sigterm_lets_running_requests_end_and_refuses_new_ones(ending: Server):
    body = ENDLESS | {"max_tokens": 300, "stream": True}
    with httpx.stream("POST", ending.url + "/v1/chat/completions", json=body, timeout=DEADLINE) as response:
        stream = events(response)
        next(stream)
        ending.process.send_signal(signal.SIGTERM)
        rest = list(stream)
    assert rest[-1] == "[DONE]"
    assert isinstance(rest[-2], dict) and rest[-2]["choices"][-1]["finish_reason"] == "length"
    assert ending.process.wait(DEADLINE) == 0


def test_a_server_that_is_ended_while_it_loads_does_not_load_on():
    server = Server("--device", "cpu", "--frontends", "1", wait=False)
    until(lambda: "engine" in server.children())
    assert server.stop() == 0
    assert "draining" in server.log() and "rows that run at once" not in server.log()


def test_the_drain_deadline_cuts_requests_off_with_an_error_event():
    server = Server("--device", "cpu", "--frontends", "1", "--drain-seconds", "1")
    with httpx.stream(
        "POST", server.url + "/v1/chat/completions", json=ENDLESS | {"stream": True}, timeout=DEADLINE
    ) as response:
        stream = events(response)
        next(stream)
        server.process.send_signal(signal.SIGTERM)
        rest = list(stream)
    assert rest[-1] == "[DONE]" and isinstance(rest[-2], dict) and rest[-2]["error"]
    assert all("error" not in event for event in rest[:-2]), "text until the deadline"
    assert server.process.wait(DEADLINE) == 0
    assert "draining" in server.log() and "second signal" not in server.log()


def test_a_second_signal_cuts_requests_off(ending: Server):
    with httpx.stream(
        "POST", ending.url + "/v1/chat/completions", json=ENDLESS | {"stream": True}, timeout=DEADLINE
    ) as response:
        stream = events(
            response
        )  # kept: a generator that is dropped closes the response, and nothing were left to cut off
        next(stream)
        ending.process.send_signal(signal.SIGINT)
        until(lambda: "draining" in ending.log())
        ending.process.send_signal(signal.SIGINT)
        assert ending.process.wait(DEADLINE) == 0


def test_a_front_end_that_is_killed_comes_back_and_the_engine_never_noticed(narrow: Server):
    before = narrow.children()
    (name,) = before.keys() - {"engine"}
    with httpx.stream(
        "POST", narrow.url + "/v1/chat/completions", json=ENDLESS | {"stream": True}, timeout=DEADLINE
    ) as response:
        stream = events(response)
        next(stream)
        os.kill(before[name], signal.SIGKILL)
        with pytest.raises(httpx.TransportError):
            list(stream)
    until(lambda: len(narrow.children()) == 2 and name not in narrow.children())
    narrow.wait_ready()
    assert "Paris" in answer(narrow)  # so the row of the dead front end has been dropped too
    assert narrow.children()["engine"] == before["engine"]


@pytest.mark.parametrize(
    "chunks", [b"2\r\n{}\r\n0\r\nX: 1\r\n\r\n", b"ZZZ\r\nnonsense\r\n"], ids=["trailers", "no sizes"]
)
def test_a_body_in_chunks_ends_no_process(narrow: Server, chunks: bytes):
    before = narrow.children()
    with socket.create_connection(("127.0.0.1", narrow.port), timeout=DEADLINE) as raw:
        raw.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks
        )
        assert raw.recv(12) == b"HTTP/1.1 400"
    assert "Paris" in answer(narrow)
    assert narrow.children() == before


def test_an_engine_that_dies_is_replaced_and_its_streams_are_told(narrow: Server):
    engine = narrow.children()["engine"]
    with httpx.stream(
        "POST", narrow.url + "/v1/chat/completions", json=ENDLESS | {"stream": True}, timeout=DEADLINE
    ) as response:
        stream = events(response)
        next(stream)
        os.kill(engine, signal.SIGKILL)
        rest = list(stream)
    assert rest[-1] == "[DONE]" and isinstance(rest[-2], dict) and rest[-2]["error"]
    until(lambda: narrow.children().get("engine", engine) != engine)
    narrow.wait_ready()
    assert "Paris" in answer(narrow)


def test_an_engine_that_hangs_is_not_ready_and_is_replaced(narrow: Server):
    assert httpx.get(narrow.url + "/health/ready", timeout=60).json() == {"status": "ready"}
    engine = narrow.children()["engine"]
    os.kill(engine, signal.SIGSTOP)
    seen: list[httpx.Response] = []

    def stalls() -> bool:
        seen.append(httpx.get(narrow.url + "/health/ready", timeout=60))
        return seen[-1].json()["status"] == "stalled"

    until(stalls)
    assert seen[-1].status_code == 503 and "made no step for" in seen[-1].json()["reason"]
    assert httpx.get(narrow.url + "/health/live", timeout=60).json() == {"status": "live"}
    until(lambda: narrow.children().get("engine", engine) != engine)
    url = narrow.url + "/v1/chat/completions"
    # The front end may still learn that the first has died.
    until(lambda: httpx.post(url, json=SHORT, timeout=DEADLINE).status_code == 200)
    assert "Paris" in answer(narrow)
    assert httpx.get(narrow.url + "/health/ready", timeout=60).status_code == 200


def test_everything_ends_when_the_supervisor_is_killed():
    server = Server("--device", "cpu", "--frontends", "1")
    pids = list(server.children().values())
    assert len(pids) == 2
    server.stop(signal.SIGKILL)
    until(lambda: not any(alive(pid) for pid in pids))


def test_the_server_ends_though_a_process_does_not():
    """One whose device has hung cannot be killed; nobody waits for it for ever."""
    kept = 'python=$1; shift 2; exec "$python" test/helpers/kept_engine.py "$@"'
    server = Server("--device=cpu", "--frontends", "1", through=kept)
    pids = server.children()
    try:
        assert server.stop() == 0
        assert [name for name, pid in pids.items() if alive(pid)] == ["engine"]
        said = "engine cannot be ended, as a device or a disk keeps it; the server ends without waiting"
        assert server.log().count(said) == 1
    finally:
        os.kill(pids["engine"], signal.SIGKILL)


def test_text_keeps_flowing_while_a_long_prompt_is_read(server: Server):
    """A 4000-token prompt takes dozens of steps; in each of them the running stream gets a token."""
    long = {"contents": ["one two three four " * 1000], "max_tokens": 1, "temperature": 0}
    with (
        ThreadPoolExecutor() as pool,
        httpx.stream(
            "POST", server.url + "/v1/chat/completions", json=ENDLESS | {"stream": True}, timeout=DEADLINE
        ) as response,
    ):
        stream = events(response)
        next(stream)
        reading = pool.submit(httpx.post, server.url + "/v1/chat/completions", json=long, timeout=DEADLINE)
        tokens = 0
        while not reading.done():
            next(stream)
            tokens += 1
    assert reading.result().status_code == 200
    assert tokens >= 4


def test_64_streams_at_once_all_finish(server: Server):
    def one(number: int) -> str:
        body = SHORT | {"stream": True, "contents": [f"User: What is {number % 10} + 1?\n\nAssistant:"]}
        with httpx.stream("POST", server.url + "/v1/chat/completions", json=body, timeout=120) as response:
            return "".join(
                c["delta"].get("content", "")
                for e in events(response)
                if isinstance(e, dict)
                for c in e["choices"]
            )

    with ThreadPoolExecutor(64) as pool:
        texts = list(pool.map(one, range(64)))
    assert [str(number % 10 + 1) in text for number, text in enumerate(texts)] == [True] * 64
