"""What a caller of `Engine.generate` gives, and gets of the events of its request."""

from collections.abc import Iterable

from tqdm import tqdm

from rwkv_batch.engine.scheduling.row import Outbox
from rwkv_batch.ops.progress import hidden
from rwkv_batch.wire.protocol import Failed, Progress, RowDelta


def check_call(prompts: object, stop_strings: object, n: int) -> None:
    """Raises ValueError for what would be read as something else."""
    for name, given in (("prompts", prompts), ("stop_strings", stop_strings)):
        if isinstance(given, str):
            raise ValueError(f"{name} is one text, and its letters would be taken one by one; give a list.")
    if n < 1:
        raise ValueError(f"n is {n}; give 1 or more.")


def whole_rows(steps: Iterable[Outbox], count: int, progress: bool) -> list[RowDelta]:
    """The rows of the only request whose events these are, in order. Raises RuntimeError if it has failed.

    progress: with a bar of how many of the `count` rows have ended.
    """
    rows: list[RowDelta] = []
    with tqdm(total=count, desc="rows", unit="row", disable=hidden(not progress)) as bar:
        for events in steps:
            for _, event in events:
                if isinstance(event, Failed):
                    raise RuntimeError(event.message)
                if isinstance(event, Progress):
                    rows += event.rows
                    bar.update(len(event.rows))
    return sorted(rows, key=lambda row: row.row)
