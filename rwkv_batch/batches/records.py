"""What is known of a file and of a batch."""

import os
from typing import Literal

from msgspec import Struct

BatchStatus = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
UNDER_WAY: tuple[BatchStatus, ...] = ("validating", "in_progress", "finalizing", "cancelling")
Purpose = Literal["batch", "batch_output"]


class StoredFile(Struct, frozen=True):
    """A file; its contents lie beside the database, under its id."""

    id: str
    owner: str  # the name of the key that it belongs to; "": nobody's in particular
    filename: str
    purpose: Purpose
    bytes: int
    created: int  # seconds since 1970, as all times are
    expires: int | None = None


class LineError(Struct, frozen=True):
    """What is wrong with an input file. line: from 1; None: with all of it."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchRecord(Struct, frozen=True, kw_only=True):
    """A batch. `at` has the time at which it came to each status."""

    id: str
    owner: str
    endpoint: str  # the path of the route that answers each row
    input_file: str  # an id
    window: str  # as it was given: 24h
    created: int
    expires: int
    status: BatchStatus = "validating"
    at: dict[str, int] = {}
    metadata: dict[str, str] | None = None
    output_file: str | None = None
    error_file: str | None = None
    total: int = 0  # rows
    completed: int = 0
    failed: int = 0
    errors: list[LineError] = []
    late: bool = False  # rows were left when it expired


class RowResult(Struct, frozen=True):
    """What came of a row. line: of the input, from 0; text: the line of the output or of the errors."""

    line: int
    succeeded: bool
    text: str


def new_id(kind: str) -> str:
    """An id that nobody can guess."""
    return f"{kind}{os.urandom(16).hex()}"
