"""`app.py` with a package that is installed and broken: one sentence, or a server that goes on without it."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from serving import ROOT, START_SECONDS, Server, alive, free_port, until

LIBRARY = "import ctypes; ctypes.CDLL('libnothing.so.5')"
SHARED = ("--state-db", "postgresql://postgres@127.0.0.1:1/d", "--image-store", "s3://bucket/images")
ONE_FRONT_END = ("--device", "cpu", "--frontends", "1")


def broken(folder: Path, package: str, code: str) -> Path:
    """A folder for PYTHONPATH that has such a package."""
    (folder / package).mkdir()
    (folder / package / "__init__.py").write_text(code + "\n")
    return folder


def with_packages(folder: Path) -> str:
    """For `through` of serving.Server: what lies there is imported first."""
    return f'PYTHONPATH={folder} exec "$@"'


def chat(server: Server) -> int:
    """The status of a short request."""
    body = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 2}
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).status_code


def down(server: Server) -> dict[str, int]:
    """What /health/ready counts."""
    return httpx.get(f"{server.url}/health/ready", timeout=60).json().get("down", {})


def front_ends(server: Server) -> list[int]:
    return [pid for name, pid in server.children().items() if name.startswith("frontend")]


@pytest.mark.parametrize(
    ("package", "code", "flags", "sentence"),
    [
        ("torch", LIBRARY, (), "error: the engine needs torch, which is installed but"),
        ("psycopg", "def (", SHARED, "error: --state-db with a URL needs psycopg, which is installed but"),
        (
            "opentelemetry",
            "from json import nothing",
            ("--traces", "http://127.0.0.1:4318/v1/traces"),
            "error: argument --traces: this needs opentelemetry, which is installed but",
        ),
    ],
)
def test_a_broken_package_ends_the_start_with_one_sentence(
    package: str, code: str, flags: tuple[str, ...], sentence: str, tmp_path: Path
) -> None:
    environment = os.environ | {"PYTHONPATH": str(broken(tmp_path, package, code))}
    given = ["--device", "cpu", "--port", str(free_port()), "--state-db", ":memory:", *flags]
    done = subprocess.run(
        [sys.executable, "app.py", *given],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert sentence in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("code", "status", "sentence"),
    [
        (LIBRARY, 2, "error: a front end needs robyn, which is installed but"),
        ("import os; os._exit(3)", 1, "died (exit code 3) after 3 restarts in a row; the server ends"),
    ],
    ids=["it says why", "it dies"],
)
def test_a_server_whose_front_ends_can_never_begin_ends(
    code: str, status: int, sentence: str, tmp_path: Path
) -> None:
    server = Server(*ONE_FRONT_END, wait=False, through=with_packages(broken(tmp_path, "robyn", code)))
    assert server.process.wait(START_SECONDS) == status, server.log()
    log = server.log()
    assert sentence in log.splitlines()[-1] and "Traceback" not in log
    assert len(re.findall("frontend-.* started as process", log)) == 4
    assert not server.children()


def test_a_front_end_that_can_never_begin_is_left_out_where_another_serves(tmp_path: Path) -> None:
    """As where the system has room for one of them only."""
    folder = broken(
        tmp_path,
        "robyn",
        f"""
import os, sys
os.close(os.open({str(tmp_path / "taken")!r}, os.O_CREAT | os.O_EXCL))
sys.path.remove({str(tmp_path)!r})
del sys.modules["robyn"]
import robyn  # the real one
""",
    )
    server = Server("--device", "cpu", "--frontends", "2", through=with_packages(folder))
    try:
        until(lambda: "after 3 restarts in a row; the others go on" in server.log())
        assert chat(server) == 200
        assert down(server) == {"frontends": 1}
        assert len(front_ends(server)) == 1
    finally:
        assert server.stop() == 0, server.log()


def test_a_server_that_serves_tries_on_until_a_front_end_begins(tmp_path: Path) -> None:
    """As where a package is replaced by one that is broken, and mended."""
    server = Server("--device", "cpu", "--frontends", "2", through=with_packages(tmp_path))
    try:
        until(lambda: len(front_ends(server)) == 2)
        broken(tmp_path, "robyn", LIBRARY)
        os.kill(front_ends(server)[0], signal.SIGKILL)
        # More often than a server that starts would try it.
        until(lambda: server.log().count("a front end needs robyn, which is installed but") > 5)
        assert down(server) == {"frontends": 1} and chat(server) == 200
        shutil.rmtree(tmp_path / "robyn")
        until(lambda: not down(server))
        assert len(front_ends(server)) == 2
    finally:
        assert server.stop() == 0, server.log()
    assert "started in 1.0 s" in server.log() and "Traceback" not in server.log()


def test_tracing_that_breaks_while_the_server_runs_ends_no_front_end(tmp_path: Path) -> None:
    """As a package that is replaced meanwhile: the front end that is started next sends no spans."""
    traces = ("--traces", f"http://127.0.0.1:{free_port()}/v1/traces")
    server = Server(*ONE_FRONT_END, *traces, through=with_packages(tmp_path))
    try:
        broken(tmp_path, "opentelemetry", LIBRARY)
        front = server.children()["frontend-1"]
        os.kill(front, signal.SIGKILL)
        until(lambda: not alive(front))
        server.wait_ready()
        assert chat(server) == 200
        assert "no spans are sent (OSError: libnothing.so.5" in server.log()
        assert "frontend-2" in server.children(), "it has not ended meanwhile"
    finally:
        assert server.stop() == 0, server.log()
    assert "Traceback" not in server.log()
