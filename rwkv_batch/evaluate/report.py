"""Progress bars, tables and JSONL."""

import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from rwkv_batch.evaluate.asks import ModelAnswer
from rwkv_batch.ops.progress import hidden

Json = dict[str, Any]


@dataclass(frozen=True)
class Result:
    """What an evaluation has found."""

    records: list[Json]  # one an example
    summary: Json
    tables: list[list[Sequence[object]]]  # each with its head first


def collect(
    answers: Iterable[tuple[int, ModelAnswer]],
    count: int,
    label: str,
    note: Callable[[int, ModelAnswer], str] | None = None,
) -> list[ModelAnswer]:
    """Collect so many answers, which come with their places, in order, behind a progress bar.

    note: what the bar says after an answer, which is given with its place. Raises EvaluationError.
    """
    found: dict[int, ModelAnswer] = {}
    with tqdm(total=count, desc=label, unit="row", disable=hidden()) as bar:
        for place, answer in answers:
            found[place] = answer
            if note:
                bar.set_postfix_str(note(place, answer), refresh=False)
            bar.update()
    return [found[place] for place in range(count)]


def perplexity_of(logprob: float, count: int) -> float:
    """Of so many words or tokens with that log probability together, at most e^700."""
    return math.exp(min(-logprob / count, 700.0))


def summary_table(summary: Json) -> list[Sequence[object]]:
    """A row for each figure."""
    return [("figure", "value"), *((name.replace("_", " "), value) for name, value in summary.items())]


def table(rows: Sequence[Sequence[object]]) -> str:
    """A table of Markdown, the first row being its head."""
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    lines = [" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
    lines.insert(1, " | ".join("-" * width for width in widths))
    return "\n".join(f"| {line} |" for line in lines)


def write_jsonl(path: Path, records: Iterable[Json], summary: Json) -> None:
    """A line for each example, and last the summary. Raises OSError."""
    with path.open("w", encoding="utf-8") as file:
        for record in [*records, {"summary": summary}]:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


def stamp() -> str:
    """Now, as names of files have it."""
    return time.strftime("%Y%m%d_%H%M%S")


def _cell(value: object) -> str:
    text = f"{value:.5g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", "\\n")
