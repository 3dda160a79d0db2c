"""Files of examples: one JSON object a line, or a text."""

import json
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from rwkv_batch.evaluate.asks import EvaluationError

Json = dict[str, Any]
Example = TypeVar("Example")


def read_lines(path: Path, read: Callable[[Json], Example], limit: int | None = None) -> list[Example]:
    """What `read` makes of each line, which may raise ValueError that says what is wrong with it.

    limit: how many at most. Raises EvaluationError, which names the line.
    """
    examples: list[Example] = []
    for number, line in _lines(path):
        if len(examples) == limit:
            break
        try:
            fields = json.loads(line)
            if not isinstance(fields, dict):
                raise ValueError("a JSON object should stand here")
            json.dumps(fields, ensure_ascii=False).encode()  # which a tokenizer could not read
            examples.append(read(fields))
        except UnicodeEncodeError as error:
            raise EvaluationError(f"{path}, line {number}: a text has half a surrogate pair.") from error
        except RecursionError as error:
            raise EvaluationError(f"{path}, line {number}: this is nested too deeply.") from error
        except json.JSONDecodeError as error:
            raise EvaluationError(f"{path}, line {number}: this is not JSON ({error.msg}).") from error
        except ValueError as error:
            raise EvaluationError(f"{path}, line {number}: {error}.") from error
    if not examples:
        raise EvaluationError(f"{path} has no examples.")
    return examples


def read_texts(path: Path, limit: int | None = None) -> list[str]:
    """The texts of a .jsonl file, or one text, which any other file is. Raises EvaluationError."""
    if path.suffix == ".jsonl":
        return read_lines(path, text_of, limit)
    text = "".join(line for _, line in _lines(path, keep=True))
    if not text:
        raise EvaluationError(f"{path} is empty.")
    return [text]


def text_of(fields: Json) -> str:
    """The field `text`. Raises ValueError."""
    text = fields.get("text")
    if not isinstance(text, str) or not text:
        raise ValueError('the field "text" should hold a text')
    return text


def _lines(path: Path, keep: bool = False) -> Iterator[tuple[int, str]]:
    """The lines that are not empty, with their numbers; `keep`: all, as they are."""
    number = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                line = line.removeprefix(BOM_UTF8) if number == 1 else line  # as editors of Windows write it
                if keep or line.strip():
                    yield number, line.decode()
    except OSError as error:
        raise EvaluationError(f"{path} cannot be read ({error.strerror}).") from error
    except UnicodeDecodeError as error:
        raise EvaluationError(f"{path}, line {number}: this is not UTF-8.") from error
