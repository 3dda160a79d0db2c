"""deploy/cluster/haproxy.cfg in front of three servers that say who they are: which one gets a request."""

import json
import os
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import free_port, until
from tools import absent

from deploy import check
from deploy.cluster.haproxy import TEMPLATE, configuration
from deploy.cluster.sync_haproxy import Haproxy

KEY = {"Idempotency-Key": "k"}
USER = "haproxy" if os.geteuid() == 0 else ""  # nobody else may have its rights
NAMES = [f"user {number}" for number in range(24)]


class Stub(ThreadingHTTPServer):
    """A server that replies with its number. `mode`: "ready"; "drains": it refuses; "breaks": no reply."""

    daemon_threads = True

    def __init__(self, number: int) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.number, self.mode = number, "ready"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, request: object, client_address: object) -> None:
        """HAProxy closes connections of its probes when it knows enough."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Stub

    def do_GET(self) -> None:
        mode, probe = self.server.mode, self.path == "/health/ready"
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if mode == "breaks" and not probe:
            self.close_connection = True
            return
        self.send_response(503 if mode == "drains" else 200)
        body = b"refused" if mode == "drains" else str(self.server.number).encode()
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_DELETE = do_GET

    def log_message(self, *words: object) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def stubs() -> Iterator[list[Stub]]:
    stubs = [Stub(number) for number in (1, 2, 3)]
    yield stubs
    for stub in stubs:
        stub.shutdown()
        stub.server_close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("haproxy")


def program() -> str:
    """HAProxy, or the test is skipped."""
    try:
        return str(check.tool("haproxy"))
    except check.MissingTool as missing:
        absent(str(missing))


def answers(client: Any, url: str, **more: Any) -> bool:
    """Whether HAProxy does, and has a server."""
    try:
        return bool(client.get(url, **more).json() == {"status": "ready"})
    except httpx.TransportError:
        return False


@pytest.fixture(scope="module")
def proxy(stubs: list[Stub], folder: Path) -> Iterator[httpx.Client]:
    port = free_port()
    servers = [f"127.0.0.1:{stub.server_port}" for stub in stubs]
    file = folder / "haproxy.cfg"
    text = configuration(servers, f"127.0.0.1:{port}", f"{folder}/socket", user=USER)
    for usual in ("timeout connect 1s", "timeout check 2s"):  # which these stubs may need on a busy machine
        assert text.count(usual) == 1
        text = text.replace(usual, f"{usual.rpartition(' ')[0]} 60s")
    file.write_text(text)
    with subprocess.Popen([program(), "-f", file], stderr=subprocess.PIPE, text=True) as haproxy:
        url = f"http://127.0.0.1:{port}"

        def listens() -> bool:
            assert haproxy.poll() is None, haproxy.stderr and haproxy.stderr.read()
            return answers(httpx, f"{url}/haproxy/health", timeout=60)

        try:
            until(listens)
            with httpx.Client(base_url=url, timeout=60) as client:
                yield client
        finally:
            haproxy.terminate()


@pytest.fixture(autouse=True)
def healthy(stubs: list[Stub], proxy: httpx.Client) -> None:
    for stub in stubs:
        stub.mode = "ready"
    until(lambda: len({proxy.get("/").text for _ in range(6)}) == 3)


def home(proxy: httpx.Client, name: str, **headers: str) -> str:
    """The server that a session goes to."""
    reply = proxy.post(
        "/state/chat/completions", json={"session_id": name, "contents": ["x"]}, headers=headers
    )
    return reply.text if reply.status_code == 200 else str(reply.status_code)


def test_the_file_for_three_servers_is_what_is_written_for_them():
    servers = [f"127.0.0.1:{port}" for port in (8001, 8002, 8003)]
    assert configuration(servers, "127.0.0.1:8000", "/run/haproxy-rwkv.sock") == TEMPLATE.read_text()


def test_a_session_goes_to_one_server_however_it_is_named(proxy: httpx.Client):
    name = "räum 7"
    raw = json.dumps({"contents": ['"session_id": "other"'], "session_id": f"{name}:4"}, ensure_ascii=False)
    found = {
        home(proxy, name),
        proxy.get("/", headers={"X-RWKV-Session-Id": name.encode()}).text,
        proxy.post("/", content=b"{}", headers={"X-Session-Id": name.encode()}).text,
        proxy.post("/", content=b"[]", headers={"X-RWKV-Session-Id": f"{name}:a, b".encode()}).text,
        proxy.post("/", content=raw.encode()).text,
        proxy.get("/v1/state/history", params={"session_id": name}).text,
        proxy.post("/v1/state/import", params={"session_id": f"{name}:2"}, content=b"\0file").text,
        proxy.post(
            "/",
            content=json.dumps(
                {"session_id": name, "contents": ["x" * 200_000]}, ensure_ascii=False
            ).encode(),
        ).text,
    }
    assert len(found) == 1


def test_responses_of_one_chat_go_to_one_server(proxy: httpx.Client):
    tag = "1f" * 4
    found = {
        *(
            proxy.post("/v1/responses", json={"previous_response_id": f"resp_{tag}{n:024}"}).text
            for n in range(4)
        ),
        *(proxy.get(f"{prefix}/v1/responses/resp_{tag}{7:024}").text for prefix in ("", "/openai")),
        proxy.get(f"/v1/responses/resp_{tag}{8:024}/input_items").text,
        proxy.delete(f"/v1/responses/resp_{tag}{9:024}").text,
    }
    assert len(found) == 1


def test_files_and_batches_go_to_one_server(proxy: httpx.Client):
    found = {
        *(proxy.post(path, content=b"x").text for path in ("/v1/files", "/openai/v1/batches") * 2),
        proxy.post("/v1/batches", json={"session_id": "other"}, headers={"X-Session-Id": "user 3"}).text,
        *(proxy.get(f"/v1/{path}").text for path in ("files/file-1/content", "batches", "batches/batch_1")),
    }
    assert len(found) == 1
    others = Counter(proxy.post("/v1/batch/completions", json={"contents": ["x"]}).text for _ in range(6))
    assert len(others) == 3


def test_sessions_are_spread_and_so_is_everything_else(proxy: httpx.Client):
    assert min(Counter(home(proxy, name) for name in NAMES).values()) >= 3
    for body in ({"session_id": None, "contents": ["a"]}, {"contents": ["a"]}):
        assert Counter(proxy.post("/", json=body).text for _ in range(6)) == {"1": 2, "2": 2, "3": 2}


@pytest.mark.parametrize("mode", ["drains", "breaks"])
def test_a_turn_with_a_key_goes_on_elsewhere_and_the_others_stay(
    stubs: list[Stub], proxy: httpx.Client, mode: str
):
    before = {name: home(proxy, name) for name in NAMES}
    stubs[1].mode = mode
    after = {name: home(proxy, name, **KEY) for name in NAMES}
    assert set(after.values()) == {"1", "3"}
    assert all(after[name] == at for name, at in before.items() if at != "2")
    plain = [proxy.post("/v1/chat/completions", json={"messages": []}) for _ in range(6)]
    assert {reply.status_code for reply in plain} == {200}, "what only generates is sent again too"


def test_a_turn_without_a_key_is_not_sent_twice(stubs: list[Stub], proxy: httpx.Client):
    before = {name: home(proxy, name) for name in NAMES}
    name = next(name for name, at in before.items() if at == "2")
    stubs[1].mode = "breaks"
    with httpx.Client(
        base_url=proxy.base_url, timeout=60
    ) as client:  # whose connection nothing has been sent on
        reply = client.post("/state/chat/completions", json={"session_id": name})
    assert reply.status_code == 502 and "Idempotency-Key" in reply.json()["error"]


@pytest.mark.parametrize(
    ("path", "key", "again"),
    [
        ("/v1/responses", KEY, True),
        ("/v1/responses", {}, False),
        ("/v1/completions", {}, True),
        ("/v1/models/load", KEY, False),
        ("/FIM/v1/batch-FIM", {}, True),
        ("/v1/batches", KEY, False),
        ("/state/chat/completions", {}, False),
        ("/v1/chat/completions", {"Content-Encoding": "gzip"}, False),
        ("/v1/chat/completions", {"Content-Encoding": "gzip"} | KEY, True),
    ],
)
def test_what_changes_something_without_a_session_is_sent_again_if_its_key_says_so(
    stubs: list[Stub], proxy: httpx.Client, path: str, key: dict[str, str], again: bool
):
    used = {proxy.post(path, json={"input": "x"}, headers=key).text for _ in range(6)}
    for stub in stubs:  # one answers that there is to send it to again
        stub.mode = "breaks" if str(stub.number) in (used if len(used) == 1 else "12") else "ready"
    found = set()
    for _ in range(6):
        with httpx.Client(base_url=proxy.base_url, timeout=60) as client:
            found.add(client.post(path, json={"input": "x"}, headers=key).status_code)
    assert (502 in found) is not again


def test_metrics_are_not_for_outside(proxy: httpx.Client):
    url = str(proxy.base_url).rstrip("/")
    paths = ("/metrics", "/stats?password=W", "//metrics/", "/stats//", "/cluster/state?turn=1")
    assert [proxy.get(url + path).status_code for path in paths] == [404] * 5
    for target in (f"{url}/metrics", f"{url}/stats?a=b", "/%6Detrics", "/stats%2F"):
        reply = proxy.send(proxy.build_request("GET", "/", extensions={"target": target.encode()}))
        assert reply.status_code == 404, target
    assert proxy.get(f"{url}/stats-of-mine").status_code == 200


def test_servers_are_changed_while_it_runs(stubs: list[Stub], proxy: httpx.Client, folder: Path):
    haproxy = Haproxy(folder / "socket")
    before = {name: home(proxy, name) for name in NAMES}
    one, two, three = (f"127.0.0.1:{stub.server_port}" for stub in stubs)
    haproxy.apply({1: one, 3: three}, complete=False)
    assert {name: home(proxy, name) for name in NAMES} == before, "there may be others"
    haproxy.apply({1: one, 3: three}, complete=True)
    assert {home(proxy, name) for name in NAMES} == {"1", "3"}
    fourth = Stub(4)
    try:
        haproxy.apply({1: one, 2: f"127.0.0.1:{fourth.server_port}", 3: three}, complete=True)
        after = {name: home(proxy, name) for name in NAMES}
        assert after == {name: "4" if at == "2" else at for name, at in before.items()}
    finally:
        haproxy.apply({1: one, 2: two, 3: three}, complete=True)
        fourth.shutdown()
        fourth.server_close()
    assert {name: home(proxy, name) for name in NAMES} == before


def test_slots_without_a_server_are_not_used(tmp_path: Path):
    assert "    user " not in configuration(["127.0.0.1:8001"], ":1", "/s", user="")
    text = configuration(["127.0.0.1:8001"], ":1", "/s", slots=3)
    assert text.count(" disabled\n") == 4 and text.count("127.0.0.1:8001") == 2


def test_two_servers_that_end_together_cost_no_turn(folder: Path):
    """Before anything has looked: their sessions go to the third."""
    servers, port = [Stub(number) for number in (1, 2, 3)], free_port()
    addresses = [f"127.0.0.1:{stub.server_port}" for stub in servers]
    text = configuration(addresses, f"127.0.0.1:{port}", f"{folder}/socket3", user=USER)
    assert text.count(" inter 500ms") == 1
    (folder / "three.cfg").write_text(text.replace(" inter 500ms", " inter 1h"))
    with subprocess.Popen([program(), "-f", folder / "three.cfg"]) as haproxy:
        try:
            client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)
            until(lambda: answers(client, "/haproxy/health"))
            for stub in servers[:2]:
                stub.shutdown()
                stub.server_close()
            assert {name: home(client, name) for name in NAMES} == dict.fromkeys(NAMES, "3")
        finally:
            haproxy.terminate()
    servers[2].shutdown()
    servers[2].server_close()
