"""Load generator for RWKV servers and any OpenAI-compatible one.

    python bench/serve.py --concurrency 32 --requests 200 --input-tokens 256 --output-tokens 128
    python bench/serve.py --rate 8 --requests 400 --api completions --prompts prompts.txt --json results.jsonl
    python bench/serve.py --api batch --batch 320 --requests 4

Counts the tokens that came, not those asked for: from the server's usage if it gives one, else from finish
reasons and the text. Exit code 0: every request succeeded; 1: some failed; 2: bad flags, or nothing answers
at --url; 130: stopped by Ctrl-C.
"""

import argparse
import asyncio
import itertools
import json
import math
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import report
from bench.load import NATIVE, PATHS, Load, LoadPlan, base_url, prompts_from_file, random_prompts
from bench.processes import GeneratorLost, Generators

OWN_FIELDS = {"messages", "prompt", "contents", "max_tokens", "stream", "stream_options", "model", "password"}


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        fail(f"{message}; --help lists every flag.")


def fail(message: str) -> NoReturn:
    print(f"bench/serve.py: {message}", file=sys.stderr)
    sys.exit(2)


def at_least(least: float, kind: type = int):
    """An argparse type: a number that is not below `least`."""

    def convert(text: str):
        value = kind(text)
        if not value >= least:
            raise argparse.ArgumentTypeError(f"{text} must be at least {least}")
        return value

    convert.__name__ = "number"
    return convert


def above_zero(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} must be above 0")
    return value


def json_object(text: str) -> dict:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("it must be a JSON object")
    return value


def parse_flags(argv: list[str] | None = None) -> argparse.Namespace:
    p = Parser(
        prog="bench/serve.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--url", default="http://127.0.0.1:8000", help="base address, with or without /v1")
    p.add_argument(
        "--api",
        choices=PATHS,
        default="chat",
        help="batch, big_batch: native routes, --batch prompts in one request",
    )
    arrival = p.add_mutually_exclusive_group()
    arrival.add_argument(
        "--rate", type=above_zero, help="requests a second, Poisson arrivals (inf: all at once)"
    )
    arrival.add_argument(
        "--concurrency",
        type=at_least(1),
        default=1,
        help="requests at a time, each followed by the next (default 1)",
    )
    p.add_argument("--requests", type=at_least(1), default=32, help="how many to send (default 32)")
    p.add_argument(
        "--batch", type=at_least(1), default=1, help="prompts in one request of --api batch or big_batch"
    )
    text = p.add_mutually_exclusive_group()
    text.add_argument(
        "--prompts",
        metavar="FILE",
        help='one a line, or a .jsonl file with "prompt"; they repeat when they run out',
    )
    text.add_argument(
        "--input-tokens",
        type=at_least(1),
        default=128,
        help="random prompts of this many World tokens (default 128)",
    )
    p.add_argument("--output-tokens", type=at_least(1), default=128, help="max_tokens (default 128)")
    p.add_argument(
        "--natural-stop", action="store_true", help="let the model end its answers before --output-tokens"
    )
    p.add_argument("--stream", action=argparse.BooleanOptionalAction, default=True)
    p.add_argument("--model", help="default: the first one of /v1/models")
    p.add_argument("--password", help="sent as a Bearer token and in the body")
    p.add_argument("--api-key", help="sent as a Bearer token")
    p.add_argument(
        "--extra-body",
        type=json_object,
        default={},
        metavar="JSON",
        help='more fields, such as {"temperature": 0}',
    )
    p.add_argument("--seed", type=int, default=0, help="of prompts and arrivals")
    p.add_argument(
        "--warmup",
        type=at_least(0),
        default=1,
        help="requests sent before, --concurrency at a time, not counted (default 1)",
    )
    p.add_argument("--timeout", type=above_zero, default=600.0, help="seconds for one request (default 600)")
    p.add_argument("--processes", type=at_least(1), default=1, help="generator processes (default 1)")
    p.add_argument("--json", metavar="FILE", help="append the figures as one line")
    p.add_argument("--note", default="", help="kept in the JSON line: machine, checkpoint, commit")
    flags = p.parse_args(argv)
    if flags.batch > 1 and flags.api not in NATIVE:
        p.error("--batch needs --api batch or big_batch")
    if taken := OWN_FIELDS & flags.extra_body.keys():
        p.error(f"--extra-body must not set {', '.join(sorted(taken))}, which other flags set")
    if math.isinf(flags.timeout):
        p.error("--timeout must be finite")
    try:
        if flags.json:
            open(flags.json, "a", encoding="utf-8").close()  # known before the run, not after it
    except OSError as error:
        p.error(f"--json {flags.json} cannot be written: {error.strerror}")
    return flags


def find_server(url: str, headers: dict[str, str]) -> str:
    """The id of the server's first model; "rwkv7" if it has no list.

    Raises httpx.HTTPError if nothing answers.
    """
    reply = httpx.get(f"{url}/v1/models", headers=headers, timeout=10, trust_env=False)
    try:
        return str(reply.json()["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        return "rwkv7"


def make_plan(flags: argparse.Namespace) -> LoadPlan:
    """The plan that the flags ask for. Ends the process with code 2 if there is no server."""
    try:
        url = base_url(flags.url)
        texts = (
            prompts_from_file(flags.prompts)
            if flags.prompts
            else random_prompts(flags.input_tokens, flags.seed)
        )
    except ValueError as error:
        fail(str(error))
    plan = LoadPlan(
        url,
        flags.api,
        texts,
        flags.requests,
        flags.rate,
        flags.concurrency,
        flags.output_tokens,
        stream=flags.stream,
        fixed_length=not flags.natural_stop,
        rows=flags.batch,
        password=flags.password,
        api_key=flags.api_key,
        extra=flags.extra_body,
        seed=flags.seed,
        timeout=flags.timeout,
    )
    try:
        model = find_server(url, plan.headers())
    except httpx.HTTPError as error:
        fail(f"nothing answers at {flags.url} ({error}); start the server or correct --url.")
    return replace(plan, model=flags.model or model)


def warm_up(plan: LoadPlan, requests: int) -> None:
    """Send requests whose answers are not counted. Their prompts are not those of the run."""
    numbers = itertools.count(-requests)
    asyncio.run(Load(replace(plan, requests=0, rate=None), lambda: next(numbers), time.monotonic()).run())


def describe(flags: argparse.Namespace, plan: LoadPlan) -> dict:
    """What was run, for the JSON line; passwords left out."""
    left_out = ("json", "password", "api_key", "rate", "concurrency", "input_tokens", "output_tokens")
    asked = {k: v for k, v in vars(flags).items() if k not in left_out}
    asked |= {
        "asked_input_tokens": None if flags.prompts else flags.input_tokens,
        "asked_output_tokens": flags.output_tokens,
    }
    arrival = (
        {"concurrency": plan.concurrency}
        if plan.rate is None
        else {"rate": plan.rate if math.isfinite(plan.rate) else "inf"}
    )
    return {"date": datetime.now(UTC).isoformat(timespec="seconds"), **asked, **arrival, "model": plan.model}


def main(argv: list[str] | None = None) -> int:
    flags = parse_flags(argv)
    plan = make_plan(flags)
    try:
        with Generators(flags.processes) as generators:
            if flags.warmup:
                warm_up(plan, flags.warmup)
            run = generators.run(plan)
    except GeneratorLost as error:
        print(f"bench/serve.py: {error}", file=sys.stderr)
        return 1
    figures = report.summarize(plan, run.records, run.unfinished, run.cpu)
    print(report.table(figures))
    if flags.json:
        with open(flags.json, "a", encoding="utf-8") as file:
            file.write(json.dumps(describe(flags, plan) | figures, ensure_ascii=False) + "\n")
    if run.interrupted:
        return 130
    return 1 if figures["failed"] else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # before anything was measured
        sys.exit(130)
