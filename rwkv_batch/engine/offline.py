"""What a caller of `Engine.generate` gets of the events of its request."""

from collections.abc import Iterable

from rwkv_batch.engine.scheduling.sequence import Outbox
from rwkv_batch.wire.protocol import Failed, Progress, RowDelta


def whole_rows(steps: Iterable[Outbox]) -> list[RowDelta]:
    """The rows of the only request whose events these are, in order. Raises RuntimeError if it has failed."""
    rows: list[RowDelta] = []
    for events in steps:
        for _, event in events:
            if isinstance(event, Failed):
                raise RuntimeError(event.message)
            if isinstance(event, Progress):
                rows += event.rows
    return sorted(rows, key=lambda row: row.row)
