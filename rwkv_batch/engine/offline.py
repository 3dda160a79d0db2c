"""What a caller of `Engine.generate` gives, and gets of the events of its request."""

from collections.abc import Iterable
from typing import Any, TypedDict

from tqdm import tqdm

from rwkv_batch.engine.scheduling.row import Outbox
from rwkv_batch.ops.progress import hidden
from rwkv_batch.text.tokenizer import END_OF_TEXT
from rwkv_batch.wire.protocol import (
    Failed,
    GenerateRequest,
    Grammar,
    MixturePart,
    Progress,
    Rejected,
    RowDelta,
    Sampling,
)


class Options(TypedDict, total=False):
    """What a call may give besides the prompts; where no default is named, that of GenerateRequest."""

    max_tokens: int  # of each row; 256
    stop_ids: Iterable[int]  # the end of the text
    stop_strings: Iterable[str]
    sampling: Sampling | None
    n: int
    start_state: str
    mixture: Iterable[MixturePart]
    adapter: str
    grammar: Grammar | None
    prediction: str


def request_of(prompts: Iterable[str | list[int]], options: Options) -> GenerateRequest:
    """The request of a call. Raises TypeError for other options, ValueError for what would be misread."""
    if unknown := ", ".join(options.keys() - Options.__annotations__.keys()):
        raise TypeError(f"generate has no option {unknown}; it has {', '.join(Options.__annotations__)}.")
    given: dict[str, Any] = {"prompts": prompts, "max_tokens": 256, "stop_ids": [END_OF_TEXT]}
    given |= {name: value for name, value in options.items() if value is not None}
    for name in given.keys() & {"prompts", "stop_ids", "stop_strings", "mixture"}:
        if isinstance(given[name], str):
            raise ValueError(f"{name} is one text, and its letters would be taken one by one; give a list.")
        given[name] = list(given[name])
    request = GenerateRequest("generate", **given)
    if request.n < 1:
        raise ValueError(f"n is {request.n}; give 1 or more.")
    return request


def whole_rows(steps: Iterable[Outbox], count: int, progress: bool) -> list[RowDelta]:
    """The rows of the only request whose events these are, in order.

    Raises RuntimeError if it has failed, or all of its rows have.

    progress: with a bar of how many of the `count` rows have ended.
    """
    rows: list[RowDelta] = []
    with tqdm(total=count, desc="rows", unit="row", disable=hidden(not progress)) as bar:
        for events in steps:
            for _, event in events:
                if isinstance(event, Failed | Rejected):
                    raise RuntimeError(event.message)
                if isinstance(event, Progress):
                    rows += event.rows
                    bar.update(len(event.rows))
    if rows and all(row.error for row in rows):
        raise RuntimeError(rows[0].error)
    return sorted(rows, key=lambda row: row.row)
