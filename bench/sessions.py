#!/usr/bin/env python3
"""What it costs to come back to a session: time to the first token of a turn whose state lies in L1, L2 or
L3, against reading the whole history again; the same for a prompt whose beginning is in the prefix cache; and
a soak of many sessions.

    python bench/sessions.py resume --model-path /tmp/rwkv7-0.1b.pth [--tokens 4000] [--rounds 7]
    python bench/sessions.py prefix --model-path /tmp/rwkv7-0.1b.pth [--tokens 1000]
    python bench/sessions.py soak [--sessions 1000] [--turns 3] [--concurrency 32]

All of them run the engine in this process, without HTTP; the database is a temporary file beside the others
of this machine.
"""

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ |= {
    "LRU_CACHE_CAPACITY": "64",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
}  # as app.py sets them for the engine

from tqdm import tqdm

from rwkv_batch.engine.engine import Engine
from rwkv_batch.engine.outbox import RequestKey
from rwkv_batch.state.store import Store
from rwkv_batch.wire.protocol import Failed, GenerateRequest, Progress, Rejected, Sampling, SessionTurn

GREEDY = Sampling(temperature=0)
ASK = "User: What is my name?\n\nAssistant:"
NAMES = ["Anna", "Tom", "Lucy", "Jack", "Emma", "Max", "Nina", "Paul", "Mary", "Leo"]


class Bench:
    """An engine, and what its requests have brought."""

    def __init__(self, options: argparse.Namespace, folder: str, l1: int, l2: int) -> None:
        self.engine = Engine(
            options.model_path,
            device=options.device,
            l1=l1,
            l2=l2,
            store=Store(Path(folder) / "sessions.db"),
            prefix_cache_mb=512,
        )
        self.texts: dict[RequestKey, str] = {}
        self.first: dict[RequestKey, float] = {}  # when the first text came
        self.ended: set[RequestKey] = set()
        self._number = 0
        info = self.engine.info
        print(
            f"{info.model}: {info.layers} layers, width {info.width}, {info.dtype} on {info.device}; "
            f"{self.engine.states.memory.shape[1] / 1e6:.2f} MB a state"
        )

    def start(
        self, prompt: str | list[int], session: str | None = None, max_tokens: int = 2, **fields
    ) -> RequestKey:
        self._number += 1
        key = (b"bench", str(self._number))
        turn = SessionTurn(source=session, target=session, seam="\n\n") if session else None
        self.texts[key] = ""
        self.engine.add(
            key,
            GenerateRequest(
                id=key[1],
                prompts=[prompt],
                max_tokens=max_tokens,
                sampling=GREEDY,
                flush_tokens=1,
                turn=turn,
                **fields,
            ),
        )
        return key

    def step(self) -> None:
        for key, event in self.engine.step():
            if isinstance(event, Failed | Rejected):
                sys.exit(f"a request failed: {event.message}")
            if isinstance(event, Progress):
                self.first.setdefault(key, time.perf_counter())
                self.texts[key] += "".join(d.text for d in event.rows)
                if event.rows[-1].finish_reason:
                    self.ended.add(key)

    def run(self, key: RequestKey) -> float:
        """Until the request has ended; seconds from now to its first text."""
        began = time.perf_counter()
        while key not in self.ended:
            self.step()
        return self.first[key] - began


def resume(options: argparse.Namespace) -> None:
    """One long session, brought to each tier by others that push it there."""
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(options, folder, l1=2, l2=2)
        history = random.Random(0).choices(range(300, 60000), k=options.tokens)
        others = [f"other{i}" for i in range(4)]
        bench.run(bench.start(history, "long"))
        for other in others:
            bench.run(bench.start("hi", other))

        def push(count: int) -> None:
            bench.run(bench.start("x", "long"))
            for other in others[:count]:
                bench.run(bench.start("x", other))

        times: dict[str, list[float]] = {"fresh": [], "L1": [], "L2": [], "L3": []}
        for _ in tqdm(range(options.rounds), disable=None):
            times["fresh"].append(bench.run(bench.start([*history, 33], prefix_cache=False)))
            for tier, count in (("L1", 0), ("L2", 2), ("L3", 4)):
                push(count)
                found = bench.engine.pool.find("long")
                assert found and found.tier == tier, (
                    f"the session is in {found and found.tier}, not in {tier}"
                )
                times[tier].append(bench.run(bench.start("x", "long")))
        fresh = statistics.median(times["fresh"])
        print(f"time to the first token of a turn after {options.tokens} tokens, median of {options.rounds}")
        for tier, values in times.items():
            median = statistics.median(values)
            print(f"  {tier:6} {median * 1e3:9.2f} ms  {median / fresh:7.2%} of fresh")

        states = [f"moved{i}" for i in range(64)]
        began = time.perf_counter()
        for state in states:
            bench.run(bench.start("x", state, max_tokens=1))
        print(
            f"  {len(states) / (time.perf_counter() - began):.0f} new sessions a second, one by one, each "
            "committed"
        )
        bench.engine.close()


def prefix(options: argparse.Namespace) -> None:
    """Prompts that begin alike, with and without the cache."""
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(options, folder, l1=0, l2=0)
        draw = random.Random(0)
        shared = draw.choices(range(300, 60000), k=options.tokens)
        bench.run(bench.start([*shared, 33, 34, 35]))
        bench.run(
            bench.start([*shared, 36, 37, 38])
        )  # parts from the first where `shared` ends: that state is kept
        times: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(options.rounds):
            tail = draw.choices(range(300, 60000), k=8)
            keys = {}
            for cached in (False, True):
                keys[cached] = bench.start(shared + tail, max_tokens=16, prefix_cache=cached)
                times[cached].append(bench.run(keys[cached]))
            assert bench.texts[keys[False]] == bench.texts[keys[True]], "the cache changed the text"
        without, with_ = (statistics.median(times[cached]) for cached in (False, True))
        print(
            f"time to the first token after {options.tokens} shared and 8 new tokens, median of "
            f"{options.rounds}: "
            f"{without * 1e3:.1f} ms without the cache, {with_ * 1e3:.1f} ms with it, {without / with_:.1f} "
            "times sooner, same text"
        )
        bench.engine.close()


def soak(options: argparse.Namespace) -> None:
    """Every session is told a name, asked something else, and asked for the name, in random order."""
    draw = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(options, folder, l1=16, l2=32)
        name = {f"s{i}": draw.choice(NAMES) for i in range(options.sessions)}
        middle = [lambda s: "User: What is 3 + 4?\n\nAssistant:"] * (options.turns - 2)
        rounds: list[Callable[[str], str]] = [
            lambda s: f"User: My name is {name[s]}.\n\nAssistant:",
            *middle,
            lambda s: ASK,
        ]
        memory, forgotten, began = [], 0, time.perf_counter()
        for number, prompt in enumerate(rounds):
            order = list(name)
            draw.shuffle(order)
            waiting, running = list(order), {}
            bar = tqdm(total=len(order), desc=f"turn {number + 1}", disable=None)
            while waiting or running:
                while waiting and len(running) < options.concurrency:
                    session = waiting.pop()
                    running[
                        bench.start(prompt(session), session, max_tokens=40, stop_ids=[0, 261, 24281])
                    ] = session
                bench.step()
                for key in [key for key in running if key in bench.ended]:
                    session = running.pop(key)
                    forgotten += prompt is rounds[-1] and name[session] not in bench.texts.pop(key)
                    bar.update()
            bar.close()
            memory.append(resident())
        seconds = time.perf_counter() - began
        turns = options.sessions * len(rounds)
        print(
            f"{options.sessions} sessions, {turns} turns, {options.concurrency} at a time: "
            f"{turns / seconds:.0f} turns a second, "
            f"{forgotten} forgotten; resident memory after each round of turns: "
            f"{', '.join(f'{m:.0f} MB' for m in memory)}"
        )
        bench.engine.close()
        if forgotten:
            sys.exit(1)


def resident() -> float:
    """Megabytes of this process (Linux)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("resume", "prefix", "soak"))
    parser.add_argument("--model-path", help="a checkpoint (default: the bundled model)")
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--tokens",
        type=int,
        default=0,
        help="of the history (default 4000) or of the shared beginning (default 1000)",
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--concurrency", type=int, default=32)
    options = parser.parse_args()
    options.tokens = options.tokens or {"resume": 4000, "prefix": 1000, "soak": 0}[options.what]
    {"resume": resume, "prefix": prefix, "soak": soak}[options.what](options)


if __name__ == "__main__":
    main()
