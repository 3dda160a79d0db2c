#!/usr/bin/env python3
"""How long a key that has been revoked is still taken by any front end.

A key is added and used until all front ends take it. It is revoked by the command that people use, and asked
with all the time, each time over a connection of its own, which any front end may get. The last answer of 200
counts from the end of the command.

    python bench/key_revoked.py --rounds 10 -- --device cpu --frontends 4
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.serve_all import Server  # noqa: E402
from bench.startup import own_and_servers  # noqa: E402
from rwkv_batch.keys import records  # noqa: E402
from rwkv_batch.keys.records import Key  # noqa: E402

ASKED = 32  # times in a row that a new key has to be taken
LOOKS = 3.0  # seconds behind the revocation


def main() -> None:
    own, server_flags = own_and_servers(sys.argv[1:])
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args(own)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "keys.json"
        admin = records.add(file, Key("admin", "", 0, 0.0, admin=True))
        server = Server(["--keys", str(file), *server_flags], Path(folder), admin)
        try:
            server.wait()
            waits = [still_taken(server.url, file, f"key{number}") for number in range(options.rounds)]
        finally:
            server.stop()
    print(", ".join(f"{wait:.3f}" for wait in waits))
    print(f"{len(waits)} keys, taken for at most {max(waits):.3f} s after they were revoked")


def still_taken(url: str, file: Path, name: str) -> float:
    """Seconds from the end of `revoke` to the last answer with that key; 0.0: there was none."""
    key = records.add(file, Key(name, "", 0, 0.0))
    taken = 0
    while taken < ASKED:
        taken = taken + 1 if _taken(url, key) else 0
    command = [sys.executable, "-m", "rwkv_batch.keys", "revoke", str(file), name]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    revoked, last = time.monotonic(), 0.0
    while (asked := time.monotonic()) < revoked + LOOKS:
        if _taken(url, key):
            last = asked - revoked
    return last


def _taken(url: str, key: str) -> bool:
    headers = {"Authorization": f"Bearer {key}", "Connection": "close"}
    status = httpx.get(f"{url}/v1/models", headers=headers, trust_env=False).status_code
    if status not in (200, 401):
        sys.exit(f"/v1/models answered {status}.")
    return status == 200


if __name__ == "__main__":
    main()
