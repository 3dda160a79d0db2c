"""Prometheus with deploy/prometheus.yml, and a server with a password."""

import subprocess
from pathlib import Path

import httpx
import pytest
from serving import Server, free_port, until
from tools import absent

from deploy import check


@pytest.fixture
def prometheus(locked_server: Server, tmp_path: Path):
    """The address of its API."""
    try:
        program = Path(check.tool("promtool")).with_name("prometheus")
    except check.MissingTool as missing:
        absent(str(missing))
    if not program.exists():
        absent(f"There is no prometheus beside {program.with_name('promtool')}.")
    password, config = tmp_path / "password", tmp_path / "prometheus.yml"
    password.write_text("open sesame")
    text = (
        (check.DEPLOY / "prometheus.yml").read_text().replace("scrape_interval: 15s", "scrape_interval: 1s")
    )
    text = text.replace("server:8000", f"127.0.0.1:{locked_server.port}")
    config.write_text(text.replace("/run/secrets/metrics-password", str(password)))
    port = free_port()
    with subprocess.Popen(
        [
            program,
            f"--config.file={config}",
            f"--storage.tsdb.path={tmp_path / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as running:
        yield f"http://127.0.0.1:{port}/api/v1/query"
        running.terminate()


def test_it_gets_the_figures(prometheus: str):
    def value(query: str) -> str | None:
        try:
            found = httpx.get(prometheus, params={"query": query}, timeout=60).json()["data"]["result"]
        except (httpx.TransportError, ValueError, KeyError):  # it starts
            return None
        return found[0]["value"][1] if found else None

    # Each from a scrape that has had its answer within the second that it has here.
    until(lambda: value('up{job="rwkv"}') == "1")
    until(lambda: value("rwkv:engine_up") == "1")
