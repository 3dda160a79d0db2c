"""The life of a front end as a process: its engine, clients that leave, crowds, drains and accidents."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
from fake_engine import INFO, FakeEngine
from frontend_process import FrontendProcess
from native_calls import V1
from serving import until

from routes.http.stream import HEARTBEAT_EVERY
from rwkv_batch.wire.supervision import (
    AllServe,
    Begun,
    Drain,
    EngineLost,
    Restarts,
    Serving,
    Stalled,
    Taken,
)

FLOOD = {
    "contents": ["flood" + "x" * (1 << 20)],
    "stream": True,
    "chunk_size": 1 << 16,
    "max_tokens": 1 << 30,
}


def post(server: FrontendProcess, prompt: str, **fields) -> httpx.Response:
    return server.http.post(V1, json={"contents": [prompt]} | fields)


@contextmanager
def streaming(server: FrontendProcess, prompt: str):
    """A stream of `prompt`, and an iterator over its lines, once it has begun."""
    body = {"contents": [prompt], "stream": True, "chunk_size": 1}
    with server.client() as http, http.stream("POST", V1, json=body) as answer:
        assert answer.status_code == 200
        yield answer.iter_lines()


def test_without_an_engine_it_says_so():
    with FrontendProcess(ready=False) as process:
        health = process.http.get("/health")
        assert (health.status_code, health.json()) == (503, {"status": "loading"})
        for answer in (post(process, "a"), process.http.get("/v1/models")):
            assert answer.status_code == 503
            assert int(answer.headers["retry-after"]) > 0
            assert "loading" in str(answer.json()["error"])
        assert post(process, "a", max_tokens=-1).status_code == 503
        process.serve(Serving([INFO]))
        assert process.until(lambda h: h.status_code == 200).json() == {
            "status": "ready",
            "model": "fake-rwkv",
        }
        assert post(process, "a").status_code == 200


def ready(server: FrontendProcess, status: str) -> dict:
    """What /health/ready answers once it has come to this."""
    server.until(lambda _: server.http.get("/health/ready").json()["status"] == status)
    answer = server.http.get("/health/ready")
    assert answer.status_code == (200 if status == "ready" else 503)
    return answer.json()


def test_the_probes_say_why_no_request_would_be_answered():
    """/health/live says that a process lives, and /health is what it was."""
    with FrontendProcess(ready=False) as process:
        assert "loading" in ready(process, "loading")["reason"]
        process.serve(Serving([INFO]))
        assert ready(process, "ready") == {"status": "ready"}
        process.control.send(Stalled(0, 12.0))
        assert "made no step for 1" in ready(process, "stalled")["reason"]
        assert process.http.get("/health").status_code == 200
        process.control.send(Stalled(0, 0))
        ready(process, "ready")
        process.serve(Serving([INFO], engine=1))
        process.control.send(Stalled(1, 12.0))
        process.control.send(Drain(0))
        process.process.join()
        said = [line for line in process.log.read_text().splitlines() if "/health/ready answers" in line]
    assert ["loading" in said[0], "no step" in said[1], len(said)] == [True, True, 2], "once each"


def test_it_is_ready_when_the_others_know_too_and_answers_before_that():
    with FrontendProcess(ready=False) as process:
        process.control.send(Serving([INFO]))
        process.until(lambda _: post(process, "a").status_code == 200)
        assert "loading" in ready(process, "loading")["reason"]
        assert process.http.get("/health").status_code == 503
        process.control.send(Stalled(0, 12.0))  # meanwhile
        assert process.control.recv() == Begun() and process.control.recv() == Taken()
        process.control.send(AllServe())
        ready(process, "stalled")
        process.control.send(Stalled(0, 0))
        ready(process, "ready")


def test_one_that_is_started_later_knows_what_serves_before_it_listens():
    with FrontendProcess(ready=None) as process:
        process.control.send(Serving([INFO]))
        process.control.send(Restarts())
        assert [process.control.recv(), process.control.recv()] == [Taken(), Begun()]
        assert post(process, "a").status_code == 200


def test_one_engine_of_two_that_stalls_leaves_the_other():
    with FrontendProcess() as process:
        process.serve(Serving([INFO], engine=1))
        process.control.send(Stalled(1, 12.0))
        process.control.send(EngineLost(2))  # which comes behind it
        assert ready(process, "loading")["status"] == "loading"
        process.serve(Serving([INFO], engine=0))
        ready(process, "ready")


def test_of_several_engines_it_says_what_each_does():
    """One that serves is enough to be ready."""
    with FrontendProcess(ready=False, missing=1) as process, FakeEngine(process.addresses[1]):

        def become(first: str, second: str) -> bool:
            wanted = {"engine-0": first, "engine-1": second}
            process.until(lambda _: process.http.get("/health/ready").json()["engines"] == wanted)
            return process.http.get("/health/ready").status_code == 200

        assert not become("down", "down")
        process.serve(Serving([INFO], engine=1))
        assert become("down", "ready")
        process.serve(Serving([INFO], engine=0))
        assert become("ready", "ready")
        process.control.send(Stalled(0, 12.0))
        assert become("stalled", "ready")
        process.control.send(EngineLost(0))
        assert become("down", "ready")


def test_it_says_how_many_front_ends_are_down():
    with FrontendProcess() as process:

        def says(wanted: dict) -> bool:
            process.until(lambda _: process.http.get("/health/ready").json() == {"status": "ready"} | wanted)
            return process.http.get("/health/ready").status_code == 200

        assert says({})
        process.control.send(Restarts(0, 3, {"frontends": 2, "batches": 1}))
        assert says({"down": {"frontends": 2, "batches": 1}})
        process.control.send(Restarts(0, 3, {"batches": 1}))
        assert says({"down": {"batches": 1}})
        process.control.send(Restarts(0, 3))
        assert says({})


def test_an_engine_that_has_died_is_not_ready_before_the_supervisor_says_so():
    with FrontendProcess() as process:
        process.engine.__exit__()
        assert "has stopped" in ready(process, "loading")["reason"]
        assert process.until(lambda h: h.status_code == 503).json()["status"] == "loading"
        process.control.send(EngineLost())
        with FakeEngine(process.engine.address):
            process.serve(Serving([INFO]))
            ready(process, "ready")
            assert post(process, "a").status_code == 200


def test_one_engine_of_two_that_has_died_is_down_before_the_supervisor_says_so():
    with FrontendProcess(missing=1) as process, FakeEngine(process.addresses[1]):
        process.serve(Serving([INFO], engine=1))
        wanted = {"engine-0": "down", "engine-1": "ready"}
        process.engine.__exit__()
        process.until(lambda _: process.http.get("/health/ready").json()["engines"] == wanted)
        assert process.http.get("/health/ready").json()["status"] == "ready"


def test_a_lost_engine_fails_what_runs_and_can_come_back():
    with FrontendProcess() as process, ThreadPoolExecutor() as pool:
        waiting = pool.submit(process.http.post, V1, json={"contents": ["hang"]})
        assert process.engine.wait_for(
            lambda: any(r.prompts == ["hang"] for r in process.engine.requests), 30
        )
        with streaming(process, "trickle") as lines:
            next(lines)
            process.control.send(EngineLost())
            rest = [line for line in lines if line.startswith("data:")]
        assert rest[-1] == "data: [DONE]"
        assert "engine" in json.loads(rest[-2].removeprefix("data: "))["error"]
        assert "engine" in waiting.result().json()["error"]
        assert process.http.get("/health").json() == {"status": "loading"}
        process.serve(Serving([INFO]))
        process.until(lambda h: h.status_code == 200)
        assert post(process, "a").status_code == 200


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("prompt", ["hang", "slow" * 5000])
def test_a_client_that_leaves_frees_its_rows(server, stream, prompt):
    body = json.dumps({"contents": [prompt], "stream": stream, "chunk_size": 1}).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
        assert b"200 OK" in client.recv(4096)
        request = server.engine.request(prompt)
        assert request.id not in server.engine.cancelled
    assert server.engine.wait_for(lambda: request.id in server.engine.cancelled, 30)


def test_a_client_that_stops_reading_frees_its_rows():
    body = json.dumps(
        {
            "contents": ["flood" + "x" * (12 << 20)],
            "stream": True,
            "chunk_size": 1 << 16,
            "max_tokens": 1 << 30,
        }
    ).encode()
    with (
        FrontendProcess(send_timeout=0.5) as process,
        socket.create_connection(("127.0.0.1", process.port)) as client,
    ):
        client.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
        assert process.engine.wait_for(lambda: bool(process.engine.cancelled), 30)
        assert process.logs(lambda text: "client stopped taking" in text)


def test_an_engine_that_does_not_answer():
    with FrontendProcess(patches={"routes.http.generate.ACCEPTED_WITHIN": 0.2}) as process:
        answer = post(process, "mute")
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) > 0
        assert process.engine.wait_for(lambda: len(process.engine.cancelled) == 1, 30)


def test_heartbeats_while_there_is_nothing_to_say(server):
    with streaming(server, "hang") as lines:
        assert [next(lines) for _ in range(3)] == [": ", "", ": "]
    with server.http.stream("POST", V1, json={"contents": ["held but well"]}) as late:
        assert late.headers["content-type"] == "application/json"
        pieces = late.iter_raw()
        assert next(pieces).strip(b"\n") == b""
        server.engine.release()
        reply = json.loads(b"".join(pieces))
    assert reply["choices"][0]["message"]["content"] == "held but well"
    assert "usage" in server.http.post("/v1/completions", json={"prompt": "late"}).json()


def test_a_slow_failure_is_told_in_the_body(server):
    with FrontendProcess() as process, ThreadPoolExecutor() as pool:
        answer = pool.submit(process.http.post, "/v1/completions", json={"prompt": "hang"})
        assert process.engine.wait_for(lambda: bool(process.engine.requests), 30)
        with streaming(process, "hang") as lines:  # by its first heartbeat the reply above has begun as well
            next(lines)
            process.control.send(EngineLost())
            assert set(answer.result().json()["error"]) == {"message", "type", "param", "code"}


def test_too_many_at_once():
    with FrontendProcess(max_streams=2) as process:
        with streaming(process, "hang") as first, streaming(process, "hang"):
            next(first)
            answer = post(process, "a")
            assert answer.status_code == 503
            assert int(answer.headers["retry-after"]) > 0
            ids = {r.id for r in process.engine.requests}
        assert process.engine.wait_for(lambda: ids <= set(process.engine.cancelled), 30)
        assert process.http.get("/health").status_code == 200


def test_a_stream_that_nobody_reads_leaves_room_for_another():
    with (
        FrontendProcess(max_streams=2, patches={"routes.http.frontend.STALLED": 1.0}) as process,
        streaming(process, "hang") as read,
        process.client().stream("POST", V1, json=FLOOD) as unread,
    ):
        next(read)
        until(lambda: post(process, "a").status_code == 200)
        assert process.engine.cancelled == [process.engine.request(FLOOD["contents"][0]).id]
        assert next(read) is not None and unread.status_code == 200


def test_each_stream_that_nobody_reads_leaves_room_for_one_more():
    """Also while those that have ended for others still wait for their clients to read."""
    with (
        FrontendProcess(max_streams=2, patches={"routes.http.frontend.STALLED": 1.0}) as process,
        process.client().stream("POST", V1, json=FLOOD),
        process.client().stream("POST", V1, json=FLOOD),
        ExitStack() as opened,
    ):
        for name in ("hang one", "hang two"):
            until(lambda name=name: reads(opened, process, name))
        assert len(process.engine.cancelled) == 2


def reads(opened: ExitStack, process: FrontendProcess, prompt: str) -> bool:
    """Whether a stream of that prompt begins."""
    return (
        opened.enter_context(
            process.client().stream("POST", V1, json={"contents": [prompt], "stream": True})
        ).status_code
        == 200
    )


def test_many_streams_at_once_all_end(server):
    def one(i: int) -> str:
        body = {"contents": [f"slow {i:03}" * 4], "stream": True, "chunk_size": 1}
        answer = http.post(V1, json=body)
        frames = [
            json.loads(line.removeprefix("data: "))
            for line in answer.text.split("\n\n")
            if line.startswith("data: {")
        ]
        return "".join(c["delta"].get("content", "") for f in frames for c in f["choices"])

    with ThreadPoolExecutor(64) as pool, server.client() as http:
        assert list(pool.map(one, range(64))) == [f"slow {i:03}" * 4 for i in range(64)]


def test_drain_finishes_what_is_live_and_takes_nothing_new():
    with FrontendProcess() as process:
        with streaming(process, "held but sure to reach its end") as lines:
            next(lines)
            process.control.send(Drain(120))
            process.until(lambda h: h.json()["status"] == "draining")
            refused = post(process, "a")
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) > 0
            process.engine.release()
            text = "".join(lines)
        assert text.endswith("data: [DONE]")
        process.process.join(60)
        assert process.process.exitcode == 0


def test_drain_has_a_deadline():
    with FrontendProcess() as process, streaming(process, "hang") as lines:
        next(lines)
        process.control.send(Drain(0.2))
        process.process.join(60)
        assert process.process.exitcode == 0


def test_signals_are_left_to_the_supervisor_whose_end_is_the_end():
    with FrontendProcess() as process:
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(process.process.pid, number)
        assert post(process, "still here").status_code == 200
        process.control.close()
        process.process.join(60)
        assert not process.process.is_alive()


def test_an_abort_costs_one_front_end_only(server):
    with FrontendProcess(engine=server.engine, name="second") as victim:
        os.kill(victim.process.pid, signal.SIGABRT)
        victim.process.join(60)
        assert victim.process.exitcode == -signal.SIGABRT
    assert post(server, "unharmed").json()["choices"][0]["message"]["content"] == "unharmed"
    with FrontendProcess(engine=server.engine, port=victim.port, name="third") as successor:
        assert post(successor, "back").status_code == 200


def test_an_abort_of_one_of_two_front_ends_leaves_the_port_and_the_streams_of_the_other(server):
    ask = {"contents": ["hang"], "stream": True}
    with ExitStack() as stack:
        victim = stack.enter_context(FrontendProcess(engine=server.engine, port=server.port, name="fifth"))
        beats, began = [], time.monotonic()
        for _ in range(24):  # each connection goes to either
            client = stack.enter_context(server.client())
            beats.append(stack.enter_context(client.stream("POST", V1, json=ask)).iter_raw())
            next(beats[-1])
        os.kill(victim.process.pid, signal.SIGABRT)
        victim.process.join(60)
        for _ in range(8):
            with server.client() as http:
                assert http.get("/health").status_code == 200
        ended = []
        most = int((time.monotonic() - began) / HEARTBEAT_EVERY) + 4  # that a stream can have had until now
        for stream in beats:
            try:
                ended.append(not [next(stream) for _ in range(most)])
            except httpx.TransportError:
                ended.append(True)
        assert set(ended) == {True, False}


def test_front_ends_share_a_port(server):
    with FrontendProcess(engine=server.engine, port=server.port, name="fourth") as second:
        for _ in range(40):  # each connection goes to either
            with server.client() as http:
                assert http.post(V1, json={"contents": ["a"]}).status_code == 200
        assert second.logs(lambda text: "POST /v1/chat/completions" in text)


@pytest.mark.parametrize("module", ["routes.server", "routes.table"])
def test_a_front_end_has_no_model_in_it(module):
    heavy = ("torch", "pyrwkv_tokenizer", "numpy")
    code = f"import sys, {module}; print([m for m in {heavy} if m in sys.modules])"
    root = Path(__file__).parents[2]
    assert (
        subprocess.run(
            [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
        ).stdout.strip()
        == "[]"
    )


def test_concurrent_requests_keep_to_themselves(server):
    barrier = threading.Barrier(16)

    def one(i: int) -> str:
        barrier.wait()
        return post(server, f"prompt {i}").json()["choices"][0]["message"]["content"]

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(one, range(16))) == [f"prompt {i}" for i in range(16)]
