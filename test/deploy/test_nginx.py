"""deploy/nginx.conf in front of a server with a password, as its users meet it."""

import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from serving import Server, events, free_port, until
from tools import absent

from deploy import check

PASSWORD = {"Authorization": "Bearer open sesame"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where nginx keeps its certificate and its log."""
    return tmp_path_factory.mktemp("nginx")


@pytest.fixture(scope="module")
def outside(locked_server: Server, folder: Path) -> Iterator[httpx.Client]:
    """A client of nginx, which sends the password. `outside.base_url` is that of the site."""
    plain, port = free_port(), free_port()
    try:
        command = check.nginx_command(
            folder,
            ("127.0.0.1:8000", f"127.0.0.1:{locked_server.port}"),
            ("listen 80;", f"listen 127.0.0.1:{plain};"),
            ("listen [::]:80;", ""),
            ("listen 443 ssl;", f"listen 127.0.0.1:{port} ssl;"),
            ("listen [::]:443 ssl;", ""),
        )
    except check.MissingTool as missing:
        absent(str(missing))
    with subprocess.Popen([*command, "-g", "daemon off;"], stderr=subprocess.PIPE, text=True) as nginx:

        def listens() -> bool:
            assert nginx.poll() is None, nginx.stderr.read()
            try:
                return httpx.get(f"http://127.0.0.1:{plain}/health", timeout=60).status_code == 301
            except httpx.TransportError:
                return False

        try:
            until(listens)
            trusted = ssl.create_default_context(cafile=str(folder / "fullchain.pem"))
            url = f"https://127.0.0.1:{port}"
            with httpx.Client(base_url=url, headers=PASSWORD, verify=trusted, timeout=60) as client:
                yield client
        finally:
            nginx.terminate()


def test_a_client_gets_an_answer_with_the_password_alone(outside: httpx.Client):
    body = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
    done = outside.post("/v1/chat/completions", json=body)
    assert done.status_code == 200 and "Paris" in done.json()["choices"][0]["message"]["content"]
    refused = outside.post("/v1/chat/completions", json=body, headers={"Authorization": "Bearer wrong"})
    assert refused.status_code == 401


def test_an_event_arrives_before_there_is_a_next_one(outside: httpx.Client, locked_server: Server):
    """Two rows end at a word, one soon and one later; the third says nothing for a million tokens."""
    apples = "The teacher is reading a book in the garden. My brother bought two apples yesterday."
    body = {
        "contents": [
            "User: What is the capital of France?\n\nAssistant:",
            f"English: {apples}\n\nFrench:",
            "User: Tell me a story.\n\nAssistant:",
        ],
        "stop_tokens": ["capital of France", "pommes hier"],
        "temperature": 0,
        "max_tokens": 1_000_000,
        "chunk_size": 1_000_000,
        "stream": True,
    }
    named = {"X-Request-Id": "three-rows"}

    def running() -> str:
        return httpx.get(f"{locked_server.url}/v1/server/status", headers=PASSWORD, timeout=60).text

    with outside.stream("POST", "/v1/chat/completions", json=body, headers=named) as stream:
        arrived = events(stream)
        ended: list[int] = []
        while len(ended) < 2:
            ended += [each["index"] for each in next(arrived)["choices"] if each.get("finish_reason")]
        assert ended == [0, 1] and "three-rows" in running()
    # the client has left, which the server notices behind nginx too
    until(lambda: "three-rows" not in running())


@pytest.mark.parametrize(
    "path", ["/metrics", "/metrics/", "//metrics", "/%6Detrics", "/x/../metrics", "/metrics?a=1", "/stats"]
)
def test_figures_are_not_for_the_outside(outside: httpx.Client, locked_server: Server, path: str):
    inside = path.partition("?")[0].strip("/").replace("%6D", "m").removeprefix("x/../")
    assert httpx.get(f"{locked_server.url}/{inside}", headers=PASSWORD, timeout=60).status_code == 200
    request = outside.build_request("GET", "/")
    request.url = httpx.URL(str(outside.base_url).rstrip("/") + "/").copy_with(raw_path=path.encode())
    refused = outside.send(request)
    assert refused.status_code == 404 and "rwkv:" not in refused.text


def test_a_client_of_nginx_is_not_this_machine(outside: httpx.Client, locked_server: Server):
    """Routes that load files are open to this machine, and nginx runs on it."""
    body = {"model_filename": "x.pth"}
    refused = outside.post("/loadmodel", json=body)
    assert refused.status_code == 403 and "this machine only" in refused.text
    here = httpx.post(f"{locked_server.url}/loadmodel", json=body, headers=PASSWORD, timeout=60)
    assert "this machine only" not in here.text


def test_the_server_itself_says_which_body_is_too_large(outside: httpx.Client):
    refused = outside.post("/v1/chat/completions", content=b" " * (17 << 20))
    assert refused.status_code == 413 and "error" in refused.json()


@pytest.mark.parametrize(
    ("head", "status"),
    [("Transfer-Encoding: chunked\r\n\r\nZZ\r\n", b"400"), ("Content-Length: 300000000\r\n\r\n", b"413")],
    ids=["a chunk without a length", "300 MB"],
)
def test_nginx_itself_refuses_what_a_front_end_cannot(
    outside: httpx.Client, locked_server: Server, head: str, status: bytes
):
    """Robyn alone would end its process at the one, and read the other whole before the server sees it."""
    frontends = locked_server.children()
    host, port = outside.base_url.host, outside.base_url.port
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with context.wrap_socket(socket.create_connection((host, port), 30)) as connection:
        connection.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\n{head}".encode())
        assert connection.recv(4096).split()[1] == status
    assert locked_server.children() == frontends


def test_the_log_has_no_password(outside: httpx.Client, folder: Path):
    done = outside.get("/v1/models", params={"password": "open sesame"}, headers={"Authorization": ""})
    assert done.status_code == 200
    log = folder / "rwkv.log"
    until(lambda: '"GET /v1/models" 200' in log.read_text())
    assert "sesame" not in log.read_text()
