"""`app.py` with a package that is installed and broken: one sentence, or a server that goes on without it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from serving import ROOT, Server, alive, free_port, until

LIBRARY = "import ctypes; ctypes.CDLL('libnothing.so.5')"
SHARED = ("--state-db", "postgresql://postgres@127.0.0.1:1/d", "--image-store", "s3://bucket/images")
CHAT = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 2}


def broken(folder: Path, package: str, code: str) -> Path:
    """A folder for PYTHONPATH that has such a package."""
    (folder / package).mkdir()
    (folder / package / "__init__.py").write_text(code + "\n")
    return folder


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


def test_a_broken_robyn_is_named_in_one_sentence(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(broken(tmp_path, "robyn", LIBRARY))}
    given = ["--device", "cpu", "--port", str(free_port()), "--state-db", ":memory:", "--frontends", "1"]
    with subprocess.Popen(
        [sys.executable, "app.py", *given], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
    ) as server:
        assert server.stderr
        lines = list[str]()
        for line in server.stderr:
            lines.append(line)
            if "frontend-2 died" in line:
                break
        server.terminate()
        lines += server.stderr
    said = [line for line in lines if "a front end needs robyn, which is installed but" in line]
    assert len(said) >= 2 and "Traceback" not in "".join(lines)


def test_tracing_that_breaks_while_the_server_runs_ends_no_front_end(tmp_path: Path) -> None:
    """As a package that is replaced meanwhile: the front end that is started next sends no spans."""
    traces = ("--traces", f"http://127.0.0.1:{free_port()}/v1/traces")
    server = Server(
        "--device", "cpu", "--frontends", "1", *traces, through=f'PYTHONPATH={tmp_path} exec "$@"'
    )
    try:
        broken(tmp_path, "opentelemetry", LIBRARY)
        front = server.children()["frontend-1"]
        os.kill(front, signal.SIGKILL)
        until(lambda: not alive(front))
        server.wait_ready()
        reply = httpx.post(f"{server.url}/v1/chat/completions", json=CHAT, timeout=60)
        assert reply.status_code == 200
        assert "no spans are sent (OSError: libnothing.so.5" in server.log()
        assert "frontend-2" in server.children(), "it has not ended meanwhile"
    finally:
        assert server.stop() == 0, server.log()
    assert "Traceback" not in server.log()
