#!/usr/bin/env python3
"""Replicas on the GPUs of a host, or one model in stages on them: what n GPUs serve, next to one.

    python bench/several_gpus.py [--gpus 1 2 4] [--divide 1] [--stages] -- --model-path m7.2b.pth

For each number of GPUs a server is started, with an engine on each, and loaded with n times what one gets:
streams, many prompts in one request, turns of sessions, random arrivals. Where there are several engines one
is killed under streams, and another under turns, at the end. Prints a table; exit code 1 if a load fails, or
if a turn is lost.
"""

import argparse
import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.killed_turns import turns_under_kill
from bench.serve_all import BENCH, LoadCase, Server, measure

STREAMS = LoadCase("streams", 640, 32, 256, concurrency=320, processes=6)
PROMPTS = LoadCase("prompts in one request", 2, 32, 256, batch=960, api="batch")
SESSIONS = 64  # at once
ARRIVALS = 60  # a second, of 234 tokens that are answered with 200
KILLED_AFTER = 1.0  # seconds of many rows until an engine is killed
LOADS = ("streams", "prompts", "arrivals", "turns", "killed")
HEADINGS = ("GPUs", "load", "tokens/s", "first token, median ms", "P99 ms", "failed")


def row(*cells: object) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def figures_row(gpus: int, name: str, found: dict) -> str:
    first = found.get("ttft_ms") or {}
    times = (f"{first.get(key, 0):.0f}" for key in ("median", "p99"))
    return row(gpus, name, f"{found['output_tokens_per_s']:.0f}", *times, found.get("failed", 0))


def times(case: LoadCase, gpus: int, divide: int) -> LoadCase:
    """The load for so many GPUs."""
    smaller = case.divided(divide) if divide > 1 else case
    many = {"requests": smaller.requests * (gpus if case.batch == 1 else 1)}
    many |= {"concurrency": smaller.concurrency * gpus, "processes": smaller.processes * gpus}
    if case.batch > 1:
        many = {"batch": smaller.batch * gpus}
    return replace(smaller, name=f"{gpus * max(smaller.concurrency, smaller.batch)} {case.name}", **many)


def turns(url: str, sessions: int) -> str:
    """What bench/session_load.py says of so many sessions."""
    command = [sys.executable, str(BENCH / "session_load.py"), "turns", "--sessions", str(sessions)]
    done = subprocess.run([*command, "--rounds", "1", "--url", url], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{sessions} session turns: {done.stderr.strip()}")
    return done.stdout


def arrivals(url: str, rate: int, folder: Path) -> dict:
    """Requests at random moments, so many a second, for ten seconds."""
    file = folder / "arrivals.jsonl"
    flags = {"rate": rate, "requests": rate * 10, "input-tokens": 234, "output-tokens": 200, "processes": 6}
    command = [sys.executable, str(BENCH / "serve.py"), f"--url={url}", f"--json={file}"]
    command += [f"--{name}={value}" for name, value in flags.items()]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{rate} arrivals a second: {done.stderr.strip()}")
    return json.loads(file.read_text(encoding="utf-8").splitlines()[-1])


def last_engine(folder: Path) -> int:
    """The process of the engine that was started last."""
    log = (folder / "server.log").read_text(encoding="utf-8")
    return int(re.findall(r"engine-\d+ started as process (\d+)", log)[-1])


def wait_for_engines(url: str, engines: int) -> None:
    """Until all of them serve, such as one that was killed.  Raises RuntimeError after two minutes."""
    end = time.monotonic() + 120
    while len(re.findall(r"rwkv:engine_up\{[^}]*\} 1\.0", httpx.get(url + "/metrics").text)) < engines:
        if time.monotonic() > end:
            raise RuntimeError("an engine that was killed has not come back")
        time.sleep(0.2)


def kill_under_rows(url: str, case: LoadCase, engine: int) -> None:
    """Kill an engine once most of the streams of a load run."""
    running = 0.0
    while running < 0.9 * case.concurrency:
        text = httpx.get(url + "/metrics").text
        running = sum(map(float, re.findall(r"(?m)^rwkv:num_requests_running\{.*\} (\S+)", text)))
    time.sleep(KILLED_AFTER)
    os.kill(engine, signal.SIGKILL)


def killed_under_load(server: Server, case: LoadCase, folder: Path) -> str:
    """An engine is killed while streams run: what the others serve, and what fails."""
    killer = threading.Thread(target=kill_under_rows, args=(server.url, case, last_engine(folder)))
    killer.start()
    file = folder / "killed.jsonl"
    flags = [f"--url={server.url}", f"--json={file}", *case.flags(), "--warmup=0"]
    done = subprocess.run([sys.executable, str(BENCH / "serve.py"), *flags], capture_output=True, text=True)
    killer.join()
    return done.stdout + done.stderr


def measure_all(gpus: int, options: argparse.Namespace) -> bool:
    """The table's rows for so many GPUs; whether all loads succeeded."""
    devices = ",".join(
        f"{options.device}:{number}" if options.device == "cuda" else "cpu" for number in range(gpus)
    )
    fine = True
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        place = (
            ["--pp-devices", f"[{devices.replace('cuda:', '')}]"] if options.stages else ["--device", devices]
        )
        flags = [*place, "--log-level", "INFO", *options.app_flags]
        began = time.monotonic()
        server = Server(flags, folder)
        try:
            server.wait()
            print(row(gpus, f"ready after {time.monotonic() - began:.0f} s", "", "", "", ""), flush=True)
            for name, case in (("streams", STREAMS), ("prompts", PROMPTS)):
                if name in options.only:
                    case = times(case, gpus, options.divide)
                    print(figures_row(gpus, case.name, measure(server.url, case, folder)), flush=True)
            if "arrivals" in options.only:
                rate = max(1, ARRIVALS * gpus // options.divide)
                found = arrivals(server.url, rate, folder)
                print(figures_row(gpus, f"{rate} arrivals/s", found), flush=True)
            if "turns" in options.only:
                print(turns(server.url, max(2, SESSIONS * gpus // options.divide)), flush=True)
            if gpus > 1 and not options.stages and "killed" in options.only:
                case = times(STREAMS, gpus, options.divide)
                print(f"An engine is killed under {case.name}:")
                print(killed_under_load(server, case, folder), flush=True)
                wait_for_engines(server.url, gpus)
                sessions = max(2, SESSIONS * gpus // options.divide)
                print(f"An engine is killed under turns of {sessions} sessions:")
                seen = asyncio.run(turns_under_kill(server.url, sessions, last_engine(folder)))
                print(seen, flush=True)
                fine &= not seen.lost and not seen.twice
        except RuntimeError as error:
            print(error, flush=True)
            fine = False
        finally:
            server.stop()
    return fine


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=int, nargs="+", help="default: 1, 2, 4, 8 as far as there are")
    parser.add_argument("--divide", type=int, default=1, metavar="N", help="all loads N times smaller")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: engines without GPUs")
    parser.add_argument("--only", nargs="+", choices=LOADS, default=LOADS)
    parser.add_argument("--stages", action="store_true", help="one engine, whose layers they divide")
    argv = sys.argv[1:]
    at = argv.index("--") if "--" in argv else len(argv)
    options = parser.parse_args(argv[:at])
    options.app_flags = argv[at + 1 :]
    if options.gpus is None:
        import torch

        options.gpus = [count for count in (1, 2, 4, 8) if count <= torch.cuda.device_count()]
    print(row(*HEADINGS))
    print(row(*("---" for _ in HEADINGS)))
    return int(not all([measure_all(gpus, options) for gpus in options.gpus]))


if __name__ == "__main__":
    sys.exit(main())
