#!/usr/bin/env python3
"""The cost of resuming a session: the time to the first token of a turn.

Its state is in L1, L2 or L3, or the whole history is read again. The same by how the turn before has ended,
for a prompt with a prefix in the prefix cache, turns that end at stop strings, and a soak of many sessions.
`commits`: turns a second that several processes store in one database, without a model.

    python bench/sessions.py resume --model-path /tmp/rwkv7-0.1b.pth [--tokens 4000] [--rounds 7]
    python bench/sessions.py ends --model-path /tmp/rwkv7-0.1b.pth [--tokens 4000] [--rounds 7]
    python bench/sessions.py stops --size 0.4b --device cuda [--sessions 256] [--turns 3]
    python bench/sessions.py prefix --model-path /tmp/rwkv7-0.1b.pth [--tokens 1000]
    python bench/sessions.py soak [--sessions 1000] [--turns 3] [--concurrency 32] [--auto-tiers] [--check]
    python bench/sessions.py commits [--engines 1,2,4,8] [--at-once 16] [--seconds 5] [--rounds 7]
                                     [--state-db postgresql://...]
    python bench/sessions.py table --size 7.2b --device cuda --markdown bench/results/h200-sessions.md

`table` measures what `resume` and `prefix` do, with one engine, and writes a page. All of them run the engine
in this process, without HTTP, with a database in a temporary folder.
"""

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "test" / "helpers"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.session_engine import Bench  # first: it sets what torch reads when it is imported

# isort: split
import torch
from commit_load import CommitFigures, measure
from tqdm import tqdm

from bench.make_checkpoint import SIZES
from rwkv_batch.ops.weights.formats import FORMATS
from rwkv_batch.wire.protocol import RequestKey, Sampling, TokenLogprob, TurnInfo

ROOT = Path(__file__).resolve().parents[1]
TIERS = {"L1": "L1, a slot", "L2": "L2, host memory", "L3": "L3, the database", "fresh": "none: read again"}
ANSWER = {"max_tokens": 40, "stop_ids": [0, 261, 24281]}  # of a turn of the soak
AT_ONCE = 32  # long prompts
ASK = "User: What is my name?\n\nAssistant:"
STOP = "ab"  # in one of 110 tokens
NAMES = ["Anna", "Tom", "Lucy", "Jack", "Emma", "Max", "Nina", "Paul", "Mary", "Leo"]


def resume_seconds(bench: Bench, tokens: int, rounds: int) -> dict[str, list[float]]:
    """Seconds to the first token of a turn after `tokens` tokens, by where its state is; "fresh": nowhere.

    Other sessions push the session to each tier. The engine has two slots in L1 and two places in L2.
    """
    history = random.Random(0).choices(range(300, 60000), k=tokens)
    others = [f"other{i}" for i in range(4)]
    bench.run(bench.start(history, "long"))
    for other in others:
        bench.run(bench.start("hi", other))
    times: dict[str, list[float]] = {"fresh": [], "L1": [], "L2": [], "L3": []}
    for _ in tqdm(range(rounds), disable=None):
        times["fresh"].append(bench.run(bench.start([*history, 33], prefix_cache=False)))
        for tier, count in (("L1", 0), ("L2", 2), ("L3", 4)):
            bench.run(bench.start("x", "long"))
            for other in others[:count]:
                bench.run(bench.start("x", other))
            bench.wait_for_tier("long", tier)
            times[tier].append(bench.run(bench.start("x", "long")))
    return times


def seconds_by_end(bench: Bench, tokens: int, rounds: int) -> dict[str, list[float]]:
    """Seconds from the end of a turn to the first token of the next, by how it has ended.

    It comes after `tokens` tokens, and has 100 unless it is cancelled.
    """
    times: dict[str, list[float]] = {"max_tokens": [], "stop string": [], "cancelled": []}
    turn = {"max_tokens": 100, "stop_ids": []}
    for number in tqdm(range(rounds), disable=None):
        history = random.Random(number).choices(range(300, 60000), k=tokens)
        for end in times:
            bench.run(bench.start(history, f"{end} {number}", max_tokens=1))
        whole = bench.start("x", f"max_tokens {number}", **turn)
        bench.run(whole)
        stop = bench.texts[whole][-8:]  # of several tokens, as "\n\nUser:" is
        for end, name in ((end, f"{end} {number}") for end in times):
            if end != "max_tokens":
                key = bench.start("x", name, **turn, stop_strings=[stop] if end == "stop string" else [])
                while len(bench.texts[key]) < len(bench.texts[whole]) // 2:
                    bench.step()
                if end == "cancelled":
                    bench.engine.cancel(key)
                else:
                    bench.run(key)
            times[end].append(bench.run(bench.start("x", name)))
    return times


def turns_with_stops(bench: Bench, sessions: int | None, at_once: int, turns: int) -> str:
    """Turns of 40 tokens and an answer up to a stop string, which random weights write somewhere.

    sessions: None for the same prompts without sessions. Of all turns, the first ones included.
    """
    draw = random.Random(0)
    left, running = [turns] * at_once, dict[RequestKey, int]()
    fed, drawn = bench.engine.counts.prefill_tokens, bench.engine.counts.generation_tokens
    began = time.perf_counter()
    while any(left) or running:
        for place in {place for place, more in enumerate(left) if more} - set(running.values()):
            how = Sampling(temperature=1, seed=draw.getrandbits(62))
            fields = {"max_tokens": 1000, "stop_ids": [], "stop_strings": [STOP], "prefix_cache": False}
            session = None if sessions is None else f"{sessions}-{place}"
            prompt = draw.choices(range(300, 60000), k=40)
            running[bench.start(prompt, session, sampling=how, **fields)] = place
            left[place] -= 1
        bench.step()
        for key in running.keys() & bench.ended:
            running.pop(key)
    seconds = time.perf_counter() - began
    fed, drawn = bench.engine.counts.prefill_tokens - fed, bench.engine.counts.generation_tokens - drawn
    count = at_once * turns
    return (
        f"{count / seconds:.1f} turns a second, {drawn / seconds:.0f} tokens/s; "
        f"{drawn / count:.0f} tokens a turn, {fed / count:.0f} fed for it"
    )


def decode_step_seconds(bench: Bench, tokens: int = 64) -> float:
    """Seconds a token of one stream, the engine's work included."""
    key = bench.start([33], max_tokens=tokens + 1, stop_ids=[])
    bench.run(key)
    return (time.perf_counter() - bench.first[key]) / tokens


def new_sessions_a_second(bench: Bench, count: int, at_once: int) -> float:
    """New sessions of one token each, `at_once` at a time, each committed before its last event."""
    names = [f"new{at_once}-{i}" for i in range(count)]
    began = time.perf_counter()
    for first in range(0, count, at_once):
        for key in [bench.start("x", name, max_tokens=1) for name in names[first : first + at_once]]:
            bench.run(key)
    return count / (time.perf_counter() - began)


def prefix_seconds(bench: Bench, tokens: int, rounds: int) -> tuple[list[float], list[float], int]:
    """Seconds to the first token of prompts with `tokens` tokens in common and 8 of their own.

    Without the prefix cache, with it, and in how many rounds both drew the same 16 tokens.
    """
    draw = random.Random(0)
    shared = draw.choices(range(300, 60000), k=tokens)
    bench.run(bench.start([*shared, 33, 34, 35]))
    # It differs from the first where `shared` ends, so the state after `shared` is kept.
    bench.run(bench.start([*shared, 36, 37, 38]))
    times: dict[bool, list[float]] = {False: [], True: []}
    same = 0
    for _ in range(rounds):
        tail = draw.choices(range(300, 60000), k=8)
        keys = {}
        for cached in (False, True):
            keys[cached] = bench.start(shared + tail, max_tokens=16, prefix_cache=cached)
            times[cached].append(bench.run(keys[cached]))
        same += bench.texts[keys[False]] == bench.texts[keys[True]]
    return times[False], times[True], same


def resume(options: argparse.Namespace) -> None:
    """One long session, read from each tier."""
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(options, folder, l1=2, l2=2)
        times = resume_seconds(bench, options.tokens, options.rounds)
        fresh = statistics.median(times["fresh"])
        print(f"time to the first token of a turn after {options.tokens} tokens, median of {options.rounds}")
        for tier, values in times.items():
            median = statistics.median(values)
            print(f"  {tier:6} {median * 1e3:9.2f} ms  {median / fresh:7.2%} of fresh")
        print(
            f"  {new_sessions_a_second(bench, 64, 1):.0f} new sessions a second, one by one, each committed"
        )
        bench.engine.close()


def ends(options: argparse.Namespace) -> None:
    """The turn after one that has ended in each way."""
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(options, folder, l1=8, l2=8)
        times = seconds_by_end(bench, options.tokens, options.rounds)
        print(
            f"time to the first token of the turn behind one that has ended by this, after {options.tokens} "
            f"tokens, median of {options.rounds}"
        )
        for end, values in times.items():
            print(f"  {end:12} {statistics.median(values) * 1e3:9.2f} ms")
        bench.engine.close()


def prefix(options: argparse.Namespace) -> None:
    """Prompts with a common prefix, with and without the cache."""
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(options, folder, l1=0, l2=0)
        without, cached, same = prefix_seconds(bench, options.tokens, options.rounds)
        assert same == options.rounds, "the cache changed the text"
        before, after = statistics.median(without), statistics.median(cached)
        print(
            f"time to the first token after {options.tokens} shared and 8 new tokens, median of "
            f"{options.rounds}: {before * 1e3:.1f} ms without the cache, {after * 1e3:.1f} ms with it, "
            f"{before / after:.1f} times sooner, same text"
        )
        bench.engine.close()


def table(options: argparse.Namespace) -> None:
    """Everything about one model as a short markdown page, printed and written to --markdown."""
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(options, folder, l1=2, l2=2)
        tiers = resume_seconds(bench, options.tokens, options.rounds)
        step = statistics.median(decode_step_seconds(bench) for _ in range(options.rounds))
        rates = {at_once: new_sessions_a_second(bench, 64, at_once) for at_once in (1, 16, 64)}
        without, cached, same = prefix_seconds(bench, options.tokens, options.rounds)
        info, size = bench.engine.info, len(bench.engine.runner.states.read(0))
        bench.engine.close()
    git = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    medians = {tier: statistics.median(values) for tier, values in tiers.items()}
    rows = [
        f"| {where} | {medians[tier] * 1e3:.2f} | {(medians[tier] - step) * 1e3:+.2f} "
        f"| {medians[tier] / medians['fresh']:.2%} |"
        for tier, where in TIERS.items()
    ]
    before, after = statistics.median(without) * 1e3, statistics.median(cached) * 1e3
    page = [
        f"# Sessions and the prefix cache: {info.model}",
        "",
        f"{datetime.now(UTC):%Y-%m-%d}, commit {commit}, {info.device}, torch {torch.__version__}, "
        f"{info.dtype}, {size / 1e6:.2f} MB a state. Medians of {options.rounds}.",
        "",
        f"    python bench/sessions.py {' '.join(sys.argv[1:])}",
        "",
        f"Time to the first token of a turn after {options.tokens} tokens; a decode step of one stream takes "
        f"{step * 1e3:.2f} ms:",
        "",
        "| its state is in | ms | beside a decode step, ms | of reading the tokens again |",
        "|---|---|---|---|",
        *rows,
        "",
        f"Time to the first token of a prompt with {options.tokens} tokens in the prefix cache and 8 of its "
        f"own: {after:.1f} ms, without the cache {before:.1f} ms. Both drew the same 16 tokens in {same} of "
        f"{options.rounds} rounds.",
        "",
        "New sessions of one token each, committed before their last event:",
        "",
        "| at once | sessions a second |",
        "|---|---|",
        *(f"| {at_once} | {rate:.0f} |" for at_once, rate in rates.items()),
    ]
    print("\n".join(page))
    if options.markdown:
        options.markdown.write_text("\n".join(page) + "\n", encoding="utf-8")


def stops(options: argparse.Namespace) -> None:
    """Rounds of turns in sessions and of the same requests without."""
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(options, folder, None, None)
        for number in range(options.rounds + 1):  # the first one is not counted
            for name, sessions in ((f"{options.sessions} sessions", number), ("without sessions", None)):
                figures = turns_with_stops(bench, sessions, options.sessions, options.turns)
                if number:
                    print(f"{name}: {figures}", flush=True)
        bench.engine.close()


def soak(options: argparse.Namespace) -> None:
    """Every session is given a name, asked something else, and asked for the name, in random order."""
    draw = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        l1, l2 = (None, None) if options.auto_tiers else (16, 32)
        bench = Bench(options, folder, l1, l2)
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
                    running[bench.start(prompt(session), session, **ANSWER)] = session
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
        if options.check:
            gaps = differences(bench, list(name))
            print(f"{turns - len(gaps)} of {turns} texts are those of one long prompt")
            if gaps:
                print(f"where texts part, the likeliest tokens differ by at most {max(gaps):.2g} in logprob")
        bench.engine.close()
        if forgotten:
            sys.exit(1)


def commits(options: argparse.Namespace) -> None:
    """Rounds in turns; the median of turns a second and of P99, and the worst of all."""
    kinds = {"through one that writes": (True, None), "each by itself": (False, None)}
    if options.state_db:
        kinds["in PostgreSQL, each by itself"] = (False, options.state_db)
    for engines in options.engines:
        runs: dict[str, list[CommitFigures]] = {name: [] for name in kinds}
        for _ in range(options.rounds):
            for name, kind in kinds.items():
                runs[name].append(measure(engines, options.at_once, options.seconds, *kind))
        for name, found in runs.items():
            middle = sorted(found, key=lambda figures: figures.turns_a_second)[len(found) // 2]
            p99 = statistics.median(figures.p99 for figures in found)
            print(
                f"| {engines} | {name} | {middle.turns_a_second:,.0f} | {middle.median * 1e3:.1f} | "
                f"{p99 * 1e3:.1f} | {max(figures.worst for figures in found) * 1e3:.0f} | "
                f"{sum(figures.refused for figures in found)} |",
                flush=True,
            )


def differences(bench: Bench, sessions: list[str]) -> list[float]:
    """Compare each turn's text with that of a prompt of all tokens before it, read at once without a state.

    For each that differs: by how much the two likeliest tokens differ in logprob where the texts part.
    """
    expected: dict[RequestKey, TurnInfo] = {}
    gaps = []
    for first in tqdm(range(0, len(sessions), AT_ONCE), desc="long prompts", disable=None):
        for session in sessions[first : first + AT_ONCE]:
            past: list[int] = []
            for turn in bench.history(session):
                past += turn.prompt_tokens
                key = bench.start(list(past), prefix_cache=False, top_logprobs=2, **ANSWER)
                expected[key] = turn
                past += turn.completion_tokens
        while not expected.keys() <= bench.ended:
            bench.step()
        for key, turn in expected.items():
            if bench.texts[key] != turn.completion:
                gaps.append(gap(bench, bench.logprobs[key], turn.completion_tokens))
        expected.clear()
    return gaps


def gap(bench: Bench, entries: list[TokenLogprob], other: list[int]) -> float:
    """Between the two likeliest tokens where these tokens part from the others."""
    text = bench.engine.tokenizer.token_bytes
    for place, entry in enumerate(entries):
        if place == len(other) or entry.token != text(other[place]):
            return entry.top[0][1] - entry.top[1][1]
    return float("inf")  # one of them ended at a stop id, whose logprob nobody gets


def resident() -> float:
    """Megabytes of this process (Linux)."""
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("resume", "ends", "stops", "prefix", "soak", "commits", "table"))
    parser.add_argument("--size", choices=SIZES, help="random weights of a published size")
    parser.add_argument("--model-path", help="a checkpoint (default: the bundled model)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--weights", choices=FORMATS, help="as of app.py")
    parser.add_argument("--threads", type=int, help="as of app.py")
    parser.add_argument(
        "--tokens",
        type=int,
        default=0,
        help="of the history (default 4000) or of the shared prefix (default 1000)",
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument(
        "--auto-tiers",
        action="store_true",
        help="of the soak: as many states in L1 and L2 as the server would keep there, not 16 and 32",
    )
    parser.add_argument(
        "--check", action="store_true", help="of the soak: compare each text with that of one long prompt"
    )
    parser.add_argument(
        "--engines",
        type=lambda text: [int(n) for n in text.split(",")],
        default=[1, 2, 4, 8],
        help="processes",
    )
    parser.add_argument("--state-db", metavar="URL", help="of a PostgreSQL, beside the files of `commits`")
    parser.add_argument("--at-once", type=int, default=16, help="turns that each of them has under way")
    parser.add_argument("--seconds", type=float, default=5.0, help="of a round of commits")
    parser.add_argument("--markdown", type=Path, help="file for the page of `table`")
    options = parser.parse_args()
    options.tokens = options.tokens or (1000 if options.what == "prefix" else 4000)
    asked = {"resume": resume, "ends": ends, "stops": stops, "prefix": prefix, "soak": soak, "table": table}
    asked |= {"commits": commits}
    asked[options.what](options)


if __name__ == "__main__":
    main()
