#!/usr/bin/env python3
"""What keys, the audit log and a log of JSON lines cost: tokens a second with and without them, in turns.

Two servers run side by side, so that a turn costs no start: one as it is, one with --keys, --audit-log and
--log-format json, whose key has limits that hold nobody. The same load (bench/serve.py) goes to one, then to
the other. The figure is the median of the ratios of neighbours.

    python bench/key_cost.py --rounds 3 --streams 320 --output-tokens 256 -- --model-path m.pth
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.serve_all import Server  # noqa: E402
from rwkv_batch.keys import records  # noqa: E402
from rwkv_batch.keys.records import Key  # noqa: E402

MANY = 10**12  # of anything: a limit that is counted and holds nobody


def load(url: str, secret: str, options: argparse.Namespace, folder: Path) -> float:
    """Tokens a second of the answers."""
    file = folder / "figures.jsonl"
    file.unlink(missing_ok=True)
    command = [sys.executable, "bench/serve.py", "--url", url, "--api", "completions", "--json", str(file)]
    command += ["--concurrency", str(options.streams), "--requests", str(options.requests)]
    command += ["--input-tokens", "16", "--output-tokens", str(options.output_tokens)]
    command += ["--processes", str(options.processes)]
    if secret:
        command += ["--api-key", secret]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, encoding="utf-8")
    if done.returncode:
        sys.exit(f"bench/serve.py failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return float(json.loads(file.read_text(encoding="utf-8").splitlines()[-1])["output_tokens_per_s"])


def main(arguments: list[str]) -> int:
    own, flags = arguments, list[str]()
    if "--" in arguments:
        own, flags = arguments[: arguments.index("--")], arguments[arguments.index("--") + 1 :]
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=320)
    parser.add_argument("--requests", type=int, help="of a turn (default: as many as streams)")
    parser.add_argument("--output-tokens", type=int, default=256)
    parser.add_argument("--processes", type=int, default=max(1, min(4, (os.cpu_count() or 1) // 2)))
    options = parser.parse_args(own)
    options.requests = options.requests or options.streams
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rwkv-key-cost-")))
        limits = {
            "requests_per_minute": MANY,
            "tokens_per_minute": MANY,
            "tokens_per_day": MANY,
            "rows": MANY,
        }
        keys, places = scratch / "keys.json", [scratch / "off", scratch / "on"]
        secret = records.add(keys, Key("bench", "", 0, 0.0, admin=True, **limits))
        on = ["--keys", str(keys), "--audit-log", str(scratch / "audit.jsonl"), "--log-format", "json"]
        servers = []
        for place, more in zip(places, ([], on), strict=True):
            place.mkdir()
            servers.append(Server([*flags, "--log-level", "INFO", *more], place, secret))
            stack.callback(servers[-1].stop)
        for server in servers:
            server.wait()
        sides = [(servers[0].url, ""), (servers[1].url, secret)]
        for url, key in sides:  # graphs, and connections
            load(url, key, options, scratch)
        ratios = []
        for number in range(options.rounds):
            figures = [load(url, key, options, scratch) for url, key in sides[:: 1 if number % 2 else -1]]
            off, with_keys = figures if number % 2 else figures[::-1]
            ratios.append(with_keys / off)
            print(f"off {off:,.0f} tokens/s, on {with_keys:,.0f}: {ratios[-1]:.4f}", flush=True)
        print(f"median of {len(ratios)}: {statistics.median(ratios):.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
