#!/usr/bin/env python3
"""What keys, the audit log and a log of JSON lines cost: tokens a second and CPU time, with and without.

Two servers run side by side, so that a turn costs no start: one as it is ("off"), and one with --keys,
--audit-log and --log-format json, whose key has limits that hold nobody ("on"). A round is the same load four
times, off, on, on, off, so that both meet alike what drifts. The figures are medians of rounds: tokens a
second of on over off, which other work on the machine changes; and the CPU time of front ends for each event
of a stream, which it hardly does. Each line is printed as soon as it is known. Linux only: it reads /proc.

    python bench/key_cost.py --rounds 3 --streams 320 --output-tokens 256 -- --model-path m.pth
    python bench/key_cost.py --parts          # CPU time of an event of a stream, and of a request
"""

import argparse
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench import report  # noqa: E402
from bench.load import LoadPlan, random_prompts  # noqa: E402
from bench.processes import Generators  # noqa: E402
from bench.serve import find_server  # noqa: E402
from bench.serve_all import Server  # noqa: E402
from bench.startup import own_and_servers  # noqa: E402
from rwkv_batch.keys import records  # noqa: E402
from rwkv_batch.keys.records import Key  # noqa: E402

MANY = 10**12  # of anything: a limit that is counted and holds nobody
PROMPT = 16  # tokens
STEPS = 22  # of the engine that an event of a stream joins, where 320 have 140,000 tokens a second
SETTLE = 0.3  # seconds behind a turn in which usage and the audit log are written
STARTED = re.compile(r"frontend-\d+ started as process (\d+)")
BEGAN = time.monotonic()


class CostTurn(NamedTuple):
    """Of one turn of the load."""

    seconds: float
    tokens: int  # of answers
    events: int  # with text, as the clients have counted them
    cpu: float  # seconds of all front ends

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    @property
    def event_us(self) -> float:
        return self.cpu / self.events * 1e6


class Side:
    """One of the two servers, and the load for it."""

    def __init__(self, name: str, flags: list[str], folder: Path, plan: LoadPlan, secret: str) -> None:
        """secret: the key that its clients send; "": none."""
        folder.mkdir()
        self.name, self._log = name, folder / "server.log"
        self.server = Server([*flags, "--log-level", "INFO"], folder, secret)
        self.plan = replace(plan, url=self.server.url, api_key=secret or None)

    def wait(self) -> None:
        """Until it is as fast as it gets."""
        self.server.wait()
        self.plan = replace(self.plan, model=find_server(self.plan.url, self.plan.headers()))

    def turn(self, generators: Generators) -> CostTurn:
        """Run the load once. Ends this process if a request fails."""
        before = self._cpu()
        run = generators.run(self.plan)
        time.sleep(SETTLE)
        after = self._cpu()
        if before.keys() != after.keys():
            sys.exit(f"{self.name}: a front end has died meanwhile; {self._log} says why")
        figures = report.summarize(self.plan, run.records, run.unfinished, run.cpu)
        if figures["failed"] or figures["unfinished"]:
            sys.exit(f"{self.name}: {figures['failed']} requests have failed: {figures['failures']}")
        cpu = sum(after.values()) - sum(before.values())
        return CostTurn(figures["duration_s"], figures["output_tokens"], figures["text_events"], cpu)

    def _cpu(self) -> dict[str, float]:
        """Seconds that each front end has run, by process."""
        found = {}
        for pid in STARTED.findall(self._log.read_text(encoding="utf-8", errors="replace")):
            with suppress(FileNotFoundError):  # it has died, and another one was started
                fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
                found[pid] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return found


def say(text: str) -> None:
    print(f"{time.monotonic() - BEGAN:5.0f} s  {text}", flush=True)


def compare(sides: dict[str, Side], generators: Generators, rounds: int) -> None:
    """Print the figures of each turn and round, and at the end the medians."""
    ratios, costs = list[float](), {"off": list[float](), "on": list[float]()}
    requests = {"off": list[float](), "on": list[float]()}  # ms of each
    for number in range(rounds):
        found: dict[str, list[CostTurn]] = {"off": [], "on": []}
        for name in ("off", "on", "on", "off"):
            figures = sides[name].turn(generators)
            found[name].append(figures)
            say(
                f"{name}: {figures.rate:,.0f} tokens/s in {figures.seconds:.2f} s, {figures.events:,} "
                f"events, front ends {figures.event_us:.2f} us of CPU an event"
            )
        seconds = {name: sum(each.seconds for each in turns) for name, turns in found.items()}
        ratios.append(seconds["off"] / seconds["on"])  # of tokens a second: both have the same tokens
        for name, turns in found.items():
            cpu = sum(each.cpu for each in turns)
            costs[name].append(cpu / sum(each.events for each in turns) * 1e6)
            requests[name].append(cpu / len(turns) / sides[name].plan.requests * 1e3)
        say(
            f"round {number + 1}: on has {ratios[-1]:.4f} of the tokens/s of off; CPU an event "
            f"{costs['off'][-1]:.2f} us off, {costs['on'][-1]:.2f} on"
        )
    off, on = statistics.median(costs["off"]), statistics.median(costs["on"])
    say(
        f"median of {rounds} rounds: on has {statistics.median(ratios):.4f} of the tokens/s of off "
        f"(wanted: above 0.99); CPU of the front ends an event {off:.2f} us off, {on:.2f} on: {on - off:+.2f}"
    )
    off, on = (statistics.median(each) for each in requests.values())
    say(f"CPU of the front ends a request: {off:.2f} ms off, {on:.2f} on: {on - off:+.2f}")


def parts(folder: Path) -> None:
    """CPU time of what a front end does more, for each event of a stream and each request."""
    from routes.callers.caller import Caller
    from routes.callers.metering import Accounts, MeteredJob
    from rwkv_batch.wire.client import Job
    from rwkv_batch.wire.protocol import Accepted, GenerateRequest, Progress, RowDelta

    limits = {"requests_per_minute": MANY, "tokens_per_minute": MANY, "rows": MANY}
    secret = records.add(folder / "keys.json", Key("bench", "", 0, 0.0, **limits))
    accounts = Accounts(str(folder / "keys.json"))
    key = accounts.find(secret.encode())
    assert key

    def events(kind: Callable[[GenerateRequest, Callable[[str], None]], Job]) -> float:
        job = kind(GenerateRequest("x", ["Hi"], max_tokens=MANY, to_model="m"), lambda id_: None)
        job.put(Accepted("x", [1], [0]))
        steps = [Progress("x", [RowDelta(0, " word", 1)])] * STEPS

        def event() -> None:
            for step in steps:
                job.ends(step)
                job.put(step)
            job.read(0)

        return _microseconds(event)

    def metered(hashes: bool) -> float:
        caller = Caller(hashes)
        caller.is_key(key)
        return events(partial(MeteredJob, caller=caller, accounts=accounts, number=1))

    measured = {
        "an event, off": lambda: events(Job),
        "an event, keys": lambda: metered(False),
        "an event, keys and audit log": lambda: metered(True),
        "a request: its key": lambda: _microseconds(lambda: accounts.find(secret.encode())),
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
    own, flags = own_and_servers(arguments)
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=320)
    parser.add_argument("--requests", type=int, help="of a turn, which should take seconds (10 a stream)")
    parser.add_argument("--output-tokens", type=int, default=256)
    parser.add_argument("--processes", type=int, default=max(1, min(4, (os.cpu_count() or 1) // 2)))
    parser.add_argument("--parts", action="store_true", help="without a server: the parts of the cost")
    options = parser.parse_args(own)
    if options.parts:
        with tempfile.TemporaryDirectory(prefix="rwkv-key-cost-") as counts:
            os.environ["PROMETHEUS_MULTIPROC_DIR"] = counts
            parts(Path(counts))
        return 0
    plan = LoadPlan(
        "",
        "completions",
        random_prompts(PROMPT, 0),
        options.requests or 10 * options.streams,
        None,
        options.streams,
        options.output_tokens,
    )
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rwkv-key-cost-")))
        limits = {
            "requests_per_minute": MANY,
            "tokens_per_minute": MANY,
            "tokens_per_day": MANY,
            "rows": MANY,
        }
        keys = scratch / "keys.json"
        secret = records.add(keys, Key("bench", "", 0, 0.0, admin=True, **limits))
        on = ["--keys", str(keys), "--audit-log", str(scratch / "audit.jsonl"), "--log-format", "json"]
        sides: dict[str, Side] = {}
        for name, more, key in (("off", [], ""), ("on", on, secret)):
            sides[name] = Side(name, [*flags, *more], scratch / name, plan, key)
            stack.callback(sides[name].server.stop)
        say("two servers are started")
        for name, side in sides.items():
            side.wait()
            say(f"the server {name} is ready")
        generators = stack.enter_context(Generators(options.processes))
        for name, side in sides.items():  # graphs, and connections
            say(f"{name}, not counted: {side.turn(generators).rate:,.0f} tokens/s")
        compare(sides, generators, options.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
