#!/usr/bin/env python3
"""What keys, the audit log and a log of JSON lines cost: tokens a second with and without them, in turns.

Two servers run side by side, so that a turn costs no start: one as it is, one with --keys, --audit-log and
--log-format json, whose key has limits that hold nobody. The same load (bench/serve.py) goes to one, then to
the other. The figure is the median of the ratios of neighbours.

    python bench/key_cost.py --rounds 3 --streams 320 --output-tokens 256 -- --model-path m.pth
    python bench/key_cost.py --parts          # CPU time of an event of a stream, and of a request
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
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


def parts(folder: Path) -> None:
    """CPU time of what a front end does more, for each event of a stream and each request."""
    from routes.callers.caller import Caller
    from routes.callers.metering import Accounts, MeteredJob
    from rwkv_batch.wire.client import Job
    from rwkv_batch.wire.protocol import GenerateRequest, Progress, RowDelta

    limits = {"requests_per_minute": MANY, "tokens_per_minute": MANY, "rows": MANY}
    secret = records.add(folder / "keys.json", Key("bench", "", 0, 0.0, **limits))
    accounts = Accounts(str(folder / "keys.json"))
    key = accounts.keys.find(secret.encode())
    assert key

    def events(kind: Callable[[GenerateRequest, Callable[[str], None]], Job]) -> float:
        job = kind(GenerateRequest("x", ["Hi"], max_tokens=MANY, to_model="m"), lambda id_: None)
        event = Progress("x", [RowDelta(0, " word" * 4, 4)])
        return _microseconds(lambda: (job.put(event), job.read(0)))

    def metered(hashes: bool) -> float:
        caller = Caller(hashes)
        caller.is_key(key)
        return events(partial(MeteredJob, caller=caller, accounts=accounts, number=1))

    measured = {
        "an event, off": lambda: events(Job),
        "an event, keys": lambda: metered(False),
        "an event, keys and audit log": lambda: metered(True),
        "a request: its key": lambda: _microseconds(lambda: accounts.keys.find(secret.encode())),
        "a request: its limits": lambda: _microseconds(
            lambda: (accounts.ledger.admit(key, 1), accounts.ledger.release(key, 1))
        ),
    }
    for name, measure in measured.items():
        print(f"{name}: {statistics.median(measure() for _ in range(7)):.1f} us")


def _microseconds(call: Callable[[], object], count: int = 10_000) -> float:
    before = time.process_time()
    for _ in range(count):
        call()
    return (time.process_time() - before) / count * 1e6


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
    parser.add_argument("--parts", action="store_true", help="without a server: the parts of the cost")
    options = parser.parse_args(own)
    if options.parts:
        with tempfile.TemporaryDirectory(prefix="rwkv-key-cost-") as counts:
            os.environ["PROMETHEUS_MULTIPROC_DIR"] = counts
            parts(Path(counts))
        return 0
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
