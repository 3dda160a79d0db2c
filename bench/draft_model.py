#!/usr/bin/env python3
"""What a draft model is worth for the bundled model: how much of its guesses is accepted, and the speed.

Three engines take turns, task by task: without drafts, with those of a row's own text, and with a draft model
besides. On a CPU figures are of CPU seconds of this process, on one thread, so that other load counts for
less; the texts of all are the same. On a GPU they are of seconds, and texts may differ where sums do: how
many do is a column. --always adds a fourth engine, which takes drafts and guesses to cost nothing: so it has
them always, and shows how many are right.

    python bench/draft_model.py --count 20 --rounds 2
    python bench/draft_model.py --rows 4 --task stories --task translation
    python bench/draft_model.py --device cuda --always
"""

import argparse
import logging
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from demo.training.encoding import prompt_ids  # noqa: E402
from demo.training.evaluate import tasks  # noqa: E402
from rwkv_batch.bundled.unpack import DRAFT  # noqa: E402
from rwkv_batch.engine.engine import Engine  # noqa: E402
from rwkv_batch.engine.speculation import drafting  # noqa: E402
from rwkv_batch.engine.speculation.cost import DraftCost  # noqa: E402
from rwkv_batch.wire.protocol import Sampling  # noqa: E402

STORIES = ("dog", "cat", "fox", "owl", "bear", "horse")


@dataclass
class Task:
    """Prompts that are continued one after the other, or several together."""

    prompts: list[list[int]]
    options: dict[str, Any]
    seconds: dict[str, list[float]] = field(default_factory=dict)  # by engine


def all_tasks(count: int, engine: Engine) -> dict[str, Task]:
    greedy, free = {"sampling": Sampling(temperature=0)}, {"sampling": Sampling(temperature=1, seed=1)}
    found = {
        name: Task([prompt_ids(example) for example in examples[:count]], greedy)
        for name, examples in tasks(count).items()
    }
    stories = [f"User: Tell me a story about a {animal}.\n\nAssistant:" for animal in STORIES]
    encoded = [engine.tokenizer.encode(story) for story in stories]
    return found | {
        "stories": Task(encoded, greedy),
        "stories, temperature 1": Task(encoded, free),
        "free text, temperature 1": Task(
            [engine.tokenizer.encode("Once upon")], free | {"stop_ids": [], "max_tokens": 100}
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draft-model", type=Path, default=DRAFT)
    parser.add_argument("--speculate", type=int, default=5, help="tokens of a draft")
    parser.add_argument("--count", type=int, default=20, help="prompts of each task")
    parser.add_argument("--rows", type=int, default=1, help="that run together")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--task", action="append", help="one that is measured, by its name (default: all)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--always", action="store_true", help="an engine besides that has all drafts there are"
    )
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("rwkv_batch.engine.speculation").setLevel(logging.INFO)
    fields = {"device": args.device, "max_rows": args.rows, "l1": 0, "prefix_cache_mb": 0}
    # On a GPU only so much is timed at the start as these prompts need.
    fields |= {"threads": 1} if args.device == "cpu" else {"prefill_tokens": 64}
    given = {"speculate": args.speculate, "draft_model": str(args.draft_model)}
    engines = {
        "none": Engine(**fields),
        "text": Engine(**fields, speculate=args.speculate),
        "model": Engine(**fields, **given),
    }
    if args.always:
        drafting.draft_cost, drafting.WAIT = lambda *of: DraftCost(0.0, 0.0), 0.0
        engines["always"] = Engine(**fields, **given)
    titles = ["task", "tokens", "tokens/s without drafts"]
    for each in engines:
        if each != "none":
            titles += [f"accepted, {each}", "rejected", "times", "other texts"]
    print("| " + " | ".join(titles) + " |\n" + "|---" * len(titles) + "|")
    for name, task in all_tasks(args.count, engines["none"]).items():
        if args.task is None or name in args.task:
            print(line(name, task, engines, args.rounds), flush=True)


def line(name: str, task: Task, engines: dict[str, Engine], rounds: int) -> str:
    found = {}
    for number in range(rounds):
        for each in sorted(engines, reverse=number % 2 == 1):
            rows, engine = engines[each].scheduler.max_rows, engines[each]
            clock = time.process_time if engine.runner.device.type == "cpu" else time.perf_counter
            begun, found[each] = clock(), []
            for first in range(0, len(task.prompts), rows):
                found[each] += engine.generate(task.prompts[first : first + rows], **task.options)
            task.seconds.setdefault(each, []).append(clock() - begun)
    tokens = sum(row.tokens for row in found["none"])
    columns: list[object] = [name, tokens, f"{tokens / median(task.seconds['none']):.0f}"]
    for each in engines:
        if each == "none":
            continue
        others = sum(a.text != b.text for a, b in zip(found[each], found["none"], strict=True))
        assert not others or engines[each].runner.device.type != "cpu", "the same text"
        pairs = zip(task.seconds["none"], task.seconds[each], strict=True)
        columns += [sum(row.accepted for row in found[each]), sum(row.rejected for row in found[each])]
        columns += [f"{median(a / b for a, b in pairs):.2f}", others]
    return "| " + " | ".join(map(str, columns)) + " |"


if __name__ == "__main__":
    main()
