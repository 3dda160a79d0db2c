"""From the bytes of a request to a JSON object that is safe to work with."""

import json
import math

from routes.http.errors import ApiError

MAX_DEPTH = 64
MAX_DIGITS = 30


def parse(body: str | bytes, limit: int) -> dict:
    """The JSON object in `body`, which may have `limit` bytes.

    Raises ApiError 413 when it is longer, 400 when it is anything but an object that every part of the server
    can carry.
    """
    data = body if isinstance(body, bytes) else body.encode()
    if len(data) > limit:
        raise ApiError(
            413,
            f"The body has {len(data)} bytes and at most {limit} are taken; send fewer or shorter prompts "
            "at once.",
        )
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise ApiError(400, f"The body is not UTF-8: byte {error.start} cannot be decoded.") from None
    try:
        value = json.loads(text, parse_constant=_constant, parse_float=_float, parse_int=_int)
    except RecursionError:
        raise _too_deep() from None
    except json.JSONDecodeError as error:
        raise ApiError(
            400, f"Invalid JSON: {error.msg} at line {error.lineno}, column {error.colno}."
        ) from None
    if not isinstance(value, dict):
        raise ApiError(400, 'The body must be a JSON object, as in {"contents": ["..."]}.')
    if text.count("[") + text.count("{") > MAX_DEPTH or "\\u" in text:  # otherwise there is nothing to find
        _inspect(value)
    return value


def _constant(name: str) -> float:
    raise ApiError(400, f"Invalid JSON: {name} is not a JSON number.")


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ApiError(400, f"The number {text[:MAX_DIGITS]} is too large.")
    return value


def _int(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ApiError(400, f"The number {text[:MAX_DIGITS]}... is too large.")
    return int(text)


def _inspect(value: dict) -> None:
    """Refuse nesting deeper than MAX_DEPTH and strings that hold half a surrogate pair, which are no Unicode
    text.
    """
    level: list[tuple[str, object]] = [("", value)]
    for _ in range(MAX_DEPTH):
        deeper: list[tuple[str, object]] = []
        for place, container in level:
            if isinstance(container, dict):
                for key in container:
                    _check_text(key, f"a field name in {place}" if place else "a field name")
                named = [(f"{place}.{key}" if place else key, item) for key, item in container.items()]
            else:
                assert isinstance(container, list)
                named = [
                    (f"{place}[{i}]", item)
                    for i, item in enumerate(container)
                    if not isinstance(item, int | float)
                ]
            for name, item in named:
                if isinstance(item, str):
                    _check_text(item, name)
                elif isinstance(item, dict | list):
                    deeper.append((name, item))
        if not deeper:
            return
        level = deeper
    raise _too_deep()


def _check_text(text: str, place: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ApiError(
            400,
            f"The text of {place} is not valid Unicode: half a surrogate pair at character {error.start}.",
        ) from None


def _too_deep() -> ApiError:
    return ApiError(400, f"The body is nested too deeply; at most {MAX_DEPTH} levels are taken.")
