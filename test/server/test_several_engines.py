"""A server with two engines: who runs what, and what happens when one of them dies."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from host_crash import Tally
from server_crash import ServerCrashes
from serving import Server, events, until

GREEDY = {"temperature": 0, "alpha_presence": 0, "alpha_frequency": 0, "max_tokens": 20}
CAPITAL = "User: What is the capital of France?\n\nAssistant:"
ENDLESS = GREEDY | {"contents": [CAPITAL], "stop_tokens": [], "max_tokens": 10_000_000, "chunk_size": 1}
ENGINES = ("engine-0", "engine-1")
ALL_READY = {"status": "ready", "engines": dict.fromkeys(ENGINES, "ready")}


@pytest.fixture(scope="module")
def host() -> Iterator[Server]:
    running = Server("--device", "cpu,cpu", "--frontends", "2", "--max-rows", "4", "--hung-seconds", "5")
    yield running
    assert running.stop() == 0, running.log()


def post(server: Server, path: str, body: dict) -> dict:
    reply = httpx.post(server.url + path, json=body, timeout=120)
    assert reply.status_code == 200, reply.text
    return reply.json()


def answer(server: Server) -> str:
    return post(server, "/v1/chat/completions", GREEDY | {"contents": [CAPITAL]})["choices"][0]["message"][
        "content"
    ]


def rows_run(server: Server) -> dict[str, float]:
    """How many each engine has accepted."""
    return figures(server, "request_rows_total")


def figures(server: Server, family: str) -> dict[str, float]:
    """What /metrics says of each engine, once both have answered it soon enough."""
    found: dict[str, float] = {}

    def answered() -> bool:
        text = httpx.get(server.url + "/metrics", timeout=60).text
        for line in text.splitlines():
            if line.startswith(f"rwkv:{family}{{"):
                found[line.split('engine="')[1].split('"')[0]] = float(line.rpartition(" ")[2])
        return all(f'rwkv:engine_up{{engine="{name}"}} 1.0' in text for name in ENGINES)

    until(answered)
    return found


def test_new_sessions_at_once_are_divided_and_their_turns_go_where_their_states_are(host: Server):
    """Two front ends get them in any order."""

    def stored_and_fed_again() -> tuple[list[float], list[float]]:
        stored, fed, asked = (
            figures(host, name)
            for name in ("session_commits_total", "prefill_tokens_total", "prompt_tokens_total")
        )
        return [stored[name] for name in ENGINES], [fed[name] - asked[name] for name in ENGINES]

    path, body = "/state/chat/completions", GREEDY | {"stop_tokens": [], "max_tokens": 2}
    prompts = "User: Hi.", "User: Hello, dear friend. " * 40, "User: Bye."
    before, _ = stored_and_fed_again()
    with ThreadPoolExecutor(16) as pool:
        for turns, prompt in enumerate(prompts, start=1):
            asked = [
                pool.submit(post, host, path, body | {"contents": [prompt], "session_id": f"even {number}"})
                for number in range(16)
            ]
            for each in asked:
                each.result()
            stored, again = stored_and_fed_again()
            assert [after - was for after, was in zip(stored, before, strict=True)] == [8 * turns] * 2
            # Behind a text its last token may have to be fed; a session that moves feeds hundreds.
            assert max(again) <= 8 * turns, "no turn had to read its session again"


def test_rows_of_a_request_are_spread_and_have_the_texts_of_one_engine(host: Server):
    before = rows_run(host)
    body = GREEDY | {"contents": [f"User: What is {i} + 2?\n\nAssistant:" for i in range(8)]}
    whole = [c["message"]["content"] for c in post(host, "/v1/chat/completions", body)["choices"]]
    after = rows_run(host)
    assert all(after[name] - before[name] == 4 for name in ENGINES)
    alone = []
    for prompt in body["contents"]:
        found = post(host, "/v1/chat/completions", body | {"contents": [prompt]})
        alone.append(found["choices"][0]["message"]["content"])
    assert whole == alone


def test_draws_with_a_seed_do_not_depend_on_where_a_row_runs(host: Server):
    drawn = {"seed": 7, "max_tokens": 12, "temperature": 2.0, "top_p": 1.0}
    body = {"model": "rwkv7", "prompt": "zq 7", "n": 6} | drawn
    first, again = (
        [choice["text"] for choice in post(host, "/v1/completions", body)["choices"]] for _ in range(2)
    )
    with httpx.stream(
        "POST", host.url + "/v1/chat/completions", json=ENDLESS | {"stream": True}, timeout=60
    ) as stream:
        next(events(stream))  # so that the rows are divided otherwise
        other = [choice["text"] for choice in post(host, "/v1/completions", body)["choices"]]
    assert first == again == other and len(set(first)) > 1


def test_a_request_that_is_spread_is_paused_and_resumed_as_one(host: Server):
    prompts = [f"User: Tell me {n} stories.\n\nAssistant:" for n in ("two", "three", "four")]
    body = ENDLESS | {"contents": prompts, "max_tokens": 120, "use_prefix_cache": False}
    expected = [c["message"]["content"] for c in post(host, "/v1/chat/completions", body)["choices"]]
    for _ in range(20):  # tries, as all rows run still when their client has its turn on a core
        texts, active, reasons = _paused(host, body | {"stream": True})
        if reasons == ["paused"] * 3:
            break
        httpx.post(host.url + "/v1/server/stop", json={"request_id": "tales"}, timeout=60)
    ((name, rows),) = [(each["request_id"], each["rows"]) for each in active]
    assert (name, rows) == ("tales", 3)
    listed = httpx.get(host.url + "/v1/server/status", timeout=60).json()["paused_requests"]
    assert [each["request_id"] for each in listed] == ["tales"]
    rest = post(host, "/v1/server/resume", {"request_id": "tales", "stream": False})
    for choice in rest["choices"]:
        texts[choice["index"]] += choice["message"]["content"]
    assert [texts[row] for row in range(3)] == expected
    assert httpx.get(host.url + "/v1/server/status", timeout=60).json()["paused_requests"] == []


def _paused(server: Server, body: dict) -> tuple[dict[int, str], list[dict], list[str]]:
    """A request of three rows, which is paused: its texts, who ran before, and why its rows ended."""
    texts, reasons = dict.fromkeys(range(3), ""), list[str]()

    def add(event: dict | str) -> None:
        for choice in event["choices"] if isinstance(event, dict) else ():
            texts[choice["index"]] += choice["delta"].get("content", "")
            if reason := choice.get("finish_reason"):
                reasons.append(reason)

    named, path = {"X-Request-Id": "tales"}, "/v1/chat/completions"
    with httpx.stream("POST", server.url + path, json=body, headers=named, timeout=60) as stream:
        said = events(stream)
        add(next(said))
        active = httpx.get(server.url + "/v1/server/status", timeout=60).json()["active_requests"]
        answer = post(server, "/v1/server/pause", {"request_id": "tales"})
        for event in said:
            add(event)
    assert answer["paused"] == ("paused" in reasons) and len(reasons) == 3
    return texts, active, reasons


def turn(server: Server, session: str, prompt: str) -> str:
    body = GREEDY | {"contents": [f"User: {prompt}\n\nAssistant:"], "session_id": session}
    return post(server, "/state/chat/completions", body)["choices"][0]["message"]["content"]


@pytest.fixture(scope="module")
def loaded(host: Server) -> None:
    """The start state pirate and the adapter capitals."""
    post(host, "/loadstatemodel", {"state_filename": "pirate.pth", "state_viewname": "pirate"})
    load = {"lora_name": "capitals", "lora_path": "capitals.pth", "adapter_alpha": 32}
    answer = httpx.post(host.url + "/v1/load_lora_adapter", json=load, timeout=60)
    assert answer.status_code == 200, answer.text


def test_an_adapter_and_a_start_state_are_on_every_engine(host: Server, loaded: None):
    _same_on_all(host, {"adapter": "capitals"})
    _same_on_all(host, {"state_id": "pirate"})


def _same_on_all(server: Server, chosen: dict) -> None:
    """Rows of all engines have the same text."""
    before = rows_run(server)
    found = post(server, "/v1/chat/completions", GREEDY | chosen | {"contents": [CAPITAL] * 8})
    assert len({choice["message"]["content"] for choice in found["choices"]}) == 1
    assert all(rows_run(server)[name] > before.get(name, 0) for name in ENGINES)


def test_kill_9_of_an_engine_under_load_loses_no_turn(host: Server, loaded: None):
    """Sessions go on at once on the other engine, whole replies come from there, and streams say so."""
    sessions = [f"s{number}" for number in range(8)]
    said = {session: [turn(host, session, f"I am {session}.")] for session in sessions}
    before = host.children()
    until(lambda: not any(_running(host).values()))  # nor a stream that another test has left
    with (
        httpx.stream(
            "POST", host.url + "/v1/chat/completions", json=ENDLESS | {"stream": True}, timeout=60
        ) as stream,
        ThreadPoolExecutor(16) as pool,
    ):
        seen = events(stream)
        next(seen)
        ((victim, _),) = [
            (name, rows) for name, rows in _running(host).items() if rows
        ]  # the engine that has the stream
        waiting = [pool.submit(answer, host) for _ in range(12)]
        os.kill(before[victim], signal.SIGKILL)
        rest = list(seen)
        assert isinstance(rest[-2], dict) and "error" in rest[-2] and rest[-1] == "[DONE]"
        assert all("Paris" in each.result() for each in waiting)
        for session in sessions:
            said[session].append(turn(host, session, "And now?"))
    until(lambda: victim in host.children() and host.children()[victim] != before[victim])
    starting = host.children()[victim]
    os.kill(starting, signal.SIGSTOP)
    load = {"lora_name": "late", "lora_path": "capitals.pth", "adapter_alpha": 32}  # while it starts
    assert httpx.post(host.url + "/v1/load_lora_adapter", json=load, timeout=60).status_code == 200
    assert not _all_up(host)
    os.kill(starting, signal.SIGCONT)
    until(
        lambda: (
            httpx.get(host.url + "/metrics", timeout=60).text.count("rwkv:engine_up{") == 2 and _all_up(host)
        )
    )
    until(lambda: httpx.get(host.url + "/health/ready", timeout=60).json() == ALL_READY, 60)
    for session in sessions:
        history = httpx.get(
            host.url + "/v1/state/history", params={"session_id": session}, timeout=60
        ).json()["turns"]
        assert [each["completion"] for each in history] == said[session]
    _same_on_all(host, {"adapter": "capitals"})  # it takes its share again, of what was loaded too
    _same_on_all(host, {"adapter": "late"})
    _same_on_all(host, {"state_id": "pirate"})


def test_turns_outlive_random_ends_of_processes(host: Server):
    tally = Tally()
    crashes = ServerCrashes(host, seed=7, stop_seconds=(0.2, 1.0), tally=tally)
    assert len([*crashes.run(3)]) == 3
    crashes.stop()
    until(lambda: _all_up(host))
    crashes.check(host)
    assert tally.failures == [] and tally.turns["stored"] > 0


def test_one_that_hangs_is_started_again(host: Server):
    before = host.children()["engine-0"]
    os.kill(before, signal.SIGSTOP)
    found = post(host, "/v1/chat/completions", GREEDY | {"contents": [CAPITAL] * 8})
    assert all("Paris" in choice["message"]["content"] for choice in found["choices"])
    until(lambda: host.children().get("engine-0", before) != before)
    assert "engine-0 has made no step" in host.log()


def _running(server: Server) -> dict[str, float]:
    return figures(server, "num_requests_running")


def _all_up(server: Server) -> bool:
    text = httpx.get(server.url + "/metrics", timeout=60).text
    return all(f'rwkv:engine_up{{engine="{name}"}} 1.0' in text for name in ENGINES)


def test_a_turn_is_stored_though_the_database_dies_while_the_server_drains(host: Server):
    """The last test, as it ends the server."""
    body = ENDLESS | {"max_tokens": 60, "session_id": "last", "stream": True}
    with httpx.stream("POST", host.url + "/state/chat/completions", json=body, timeout=120) as stream:
        seen = events(stream)
        next(seen)
        (writer,) = (pid for name, pid in host.children().items() if name.endswith(".db"))
        os.kill(writer, signal.SIGSTOP)  # it does not end before it is killed, nor does the turn
        host.process.send_signal(signal.SIGTERM)
        until(lambda: "draining" in host.log())
        os.kill(writer, signal.SIGKILL)
        rest = list(seen)
    assert rest[-1] == "[DONE]" and not any("error" in event for event in rest if isinstance(event, dict))
    assert host.stop() == 0
