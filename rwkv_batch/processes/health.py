"""Whether the server of a container would answer a request: python -m rwkv_batch.processes.health [PID]

It asks where the command line of process 1 lets the server listen, and no proxy. Exit code 0 if it is ready.
"""

import argparse
import http.client
import sys
from contextlib import closing
from pathlib import Path

from rwkv_batch.config import FrontendConfig

SECONDS = 8  # for an answer; the HEALTHCHECK of the Dockerfile waits for 10
EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def main(words: list[str]) -> int:
    process = words[0] if words else "1"
    address = _address(process)
    if address is None:
        return _unhealthy(f"process {process} is no server")
    try:
        with closing(http.client.HTTPConnection(*address, timeout=SECONDS)) as connection:
            connection.request("GET", "/health/ready")
            status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        return _unhealthy(f"{address[0]}:{address[1]} does not answer ({error})")
    return 0 if status == 200 else _unhealthy(f"{address[0]}:{address[1]} answers {status}")


def _address(process: str) -> tuple[str, int] | None:
    """Where the server listens that is this process, or that this process has started, as --init does."""
    try:
        words = Path(f"/proc/{process}/cmdline").read_text(encoding="utf-8", errors="replace").split("\0")
    except OSError:
        return None
    flags = [at for at, word in enumerate(words) if Path(word).name == "app.py"]
    if not flags:
        return None
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--host", default=FrontendConfig.host)
    parser.add_argument("--port", type=int, default=FrontendConfig.port)
    found, _ = parser.parse_known_args(words[flags[0] + 1 :])
    return EVERYWHERE.get(found.host, found.host), found.port


def _unhealthy(sentence: str) -> int:
    print(sentence)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
