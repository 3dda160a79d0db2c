#!/usr/bin/env python3
"""Seconds from the start of app.py until /health answers, of one or more checkouts in turns.

The first start in a checkout may build kernels and tune GEMMs, so each starts once before the rounds.

    python bench/startup.py . -- --model-path rwkv7-g1-7.2b.pth
    python bench/startup.py ../old . --rounds 3 -- --model-path rwkv7-g1-7.2b.pth
"""

import argparse
import contextlib
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from statistics import median

PATIENCE = 600  # seconds


def start(checkout: str, flags: list[str]) -> float:
    """Start the server of `checkout` with an empty database, stop it, and return its seconds to readiness."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        place = ["--port", str(port), "--state-db", f"{folder}/sessions.db", "--log-level", "WARNING"]
        begin = time.monotonic()
        server = subprocess.Popen(
            [sys.executable, "app.py", *place, *flags], cwd=checkout, stdout=subprocess.DEVNULL
        )
        try:
            while server.poll() is None and time.monotonic() - begin < PATIENCE:
                with (
                    contextlib.suppress(OSError),
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer,
                ):
                    if answer.status == 200:
                        return time.monotonic() - begin
                time.sleep(0.05)
        finally:
            server.terminate()
            server.wait()
    sys.exit(f"The server of {checkout} ended, or was not ready within {PATIENCE} s.")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkouts", nargs="+", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    own, flags = sys.argv[1:], []
    if "--" in own:
        own, flags = own[: own.index("--")], own[own.index("--") + 1 :]
    args = parser.parse_args(own)
    checkouts = [str(c) for c in args.checkouts]
    for checkout in checkouts:
        start(checkout, flags)
    seconds: dict[str, list[float]] = {c: [] for c in checkouts}
    for turn in range(args.rounds):
        for checkout in checkouts if turn % 2 == 0 else reversed(checkouts):
            seconds[checkout].append(start(checkout, flags))
    for checkout, taken in seconds.items():
        print(f"{checkout}: {median(taken):.2f} s ({', '.join(f'{s:.2f}' for s in taken)})")


if __name__ == "__main__":
    main()
