"""One server of the bundled model for all clients, which run in an environment of their own."""

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

# Before any client is imported: none of them asks anybody but the server.
os.environ |= {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "OPENAI_API_KEY": "unused",
    "DO_NOT_TRACK": "1",
}

import pytest
from serving import Server

HERE = Path(__file__).parent
TIMEOUT = 120  # seconds after which a client hangs


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--server-python", default=sys.executable, help="runs the server")
    parser.addoption("--node-modules", type=Path, help="that folder, of the clients for Node.js")


@pytest.fixture(scope="session")
def server(pytestconfig: pytest.Config) -> Iterator[Server]:
    python = shlex.quote(pytestconfig.getoption("--server-python"))
    running = Server("--device", "cpu", through=f'shift; exec {python} "$@"')
    yield running
    assert running.stop() == 0, running.log()


@pytest.fixture(scope="session")
def url(server: Server) -> str:
    return server.url


@pytest.fixture(scope="session")
def node_modules(pytestconfig: pytest.Config) -> Path:
    return pytestconfig.getoption("--node-modules").resolve()


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(node_modules: Path, tmp_path: Path) -> Run:
    """Runs a command with the tools of node_modules, in an empty folder that is also its home."""

    def run(*command: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
        path = f"{Path(sys.executable).parent}:{node_modules / '.bin'}:{os.environ['PATH']}"
        return subprocess.run(
            command,
            cwd=tmp_path,
            env={"HOME": str(tmp_path), "PATH": path, **env},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
        )

    return run
