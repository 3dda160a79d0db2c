"""The lines of an input file: one request each."""

from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from rwkv_batch.batches.records import LineError

MOST_LINES = 50_000
MOST_ERRORS = 100  # that a batch reports
MOST_ID = 512  # characters


class InputLine(msgspec.Struct):
    """A request of a batch."""

    custom_id: str
    url: str
    body: dict[str, Any]
    method: str = "POST"


class InvalidLine(Exception):
    """One sentence, with a code and the field that is wrong."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.param = code, param


def parse(text: bytes, endpoint: str) -> InputLine:
    """One line, for rows of that endpoint; "": for any. Raises InvalidLine.

    A byte order mark in front, as some programs begin a file with one, is passed over.
    """
    try:
        line = msgspec.json.decode(text.removeprefix(BOM_UTF8), type=InputLine)
    except msgspec.ValidationError as error:
        raise InvalidLine("invalid_request", f"The line is no request of a batch: {error}.") from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise InvalidLine("invalid_json_line", "The line is no JSON object.") from None
    except RecursionError:
        raise InvalidLine("invalid_json_line", "The JSON of the line is nested too deeply.") from None
    if not line.custom_id or len(line.custom_id) > MOST_ID:
        raise InvalidLine(
            "invalid_custom_id", f"`custom_id` should have 1 to {MOST_ID} characters.", "custom_id"
        )
    if line.method != "POST":
        raise InvalidLine("invalid_method", "`method` should be POST.", "method")
    if endpoint and line.url != endpoint:
        raise InvalidLine("mismatched_endpoint", f"`url` should be {endpoint}, the batch's.", "url")
    return line


def numbered(lines: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, with their places from 0."""
    for number, text in enumerate(lines):
        if text.strip():
            yield number, text


def check(lines: Iterable[bytes], endpoint: str) -> tuple[int, list[LineError]]:
    """How many requests there are, and what is wrong."""
    seen: set[str] = set()
    errors: list[LineError] = []
    count = 0
    for number, text in numbered(lines):
        count += 1
        if count > MOST_LINES:
            return count, [
                LineError("too_many_tasks", f"A batch may have {MOST_LINES} lines; divide the file.")
            ]
        try:
            line = parse(text, endpoint)
            if line.custom_id in seen:
                raise InvalidLine("duplicate_custom_id", "Another line has this `custom_id`.", "custom_id")
            seen.add(line.custom_id)
        except InvalidLine as invalid:
            errors.append(LineError(invalid.code, str(invalid), number + 1, invalid.param))
            if len(errors) == MOST_ERRORS:
                break
    if not count:
        errors.append(LineError("empty_file", "The file has no lines."))
    return count, errors


def result_line(row: str, custom_id: str, response: dict[str, Any] | None, error: LineError | None) -> str:
    """A line of the output or of the errors. row: an id of the row."""
    said = {"code": error.code, "message": error.message} if error else None
    record = {"id": row, "custom_id": custom_id, "response": response, "error": said}
    return msgspec.json.encode(record).decode()
