"""From the bytes of a request to a JSON object that every part of the server can work with."""

import json
import math
from dataclasses import dataclass
from decimal import Context, Decimal

from routes.http.errors import ApiError, Json

MAX_DEPTH = 64
MAX_DIGITS = 30
EXACT_DIGITS = 15  # that fp64 always keeps
FIXED = ("const", "enum")  # keywords of schemas whose numbers come back in the answer


@dataclass(frozen=True)
class LargeNumber:
    """Takes the place of a number that is too large, until its field is known."""

    text: str


class RoundedNumber(float):
    """A number whose digits fp64 does not keep; `text` has them."""

    def __new__(cls, text: str) -> "RoundedNumber":
        made = super().__new__(cls, text)
        made.text = text
        return made

    text: str


def parse(body: str | bytes, limit: int) -> tuple[Json, ApiError | None]:
    """The JSON object in `body`, which may have `limit` bytes, and the error if it cannot be served.

    The error is a 413 for a longer body, a 400 for one that holds no JSON object; the object is empty then.
    A 400 that comes with an object is for its nesting, a number too large or text that is not Unicode.
    """
    data = body if isinstance(body, bytes) else body.encode()
    large: list[LargeNumber] = []
    rounded: list[RoundedNumber] = []

    def integer(text: str) -> int | LargeNumber:
        return int(text) if len(text) <= MAX_DIGITS else too_large(text)

    def real(text: str) -> float | LargeNumber:
        value = float(text)
        if not math.isfinite(value):
            return too_large(text)
        if len(text) > EXACT_DIGITS and not _is_kept(text, value):
            rounded.append(value := RoundedNumber(text))
        return value

    def too_large(text: str) -> LargeNumber:
        large.append(LargeNumber(text))
        return large[-1]

    fields: Json = {}
    try:
        if len(data) > limit:
            size = f"The body has {len(data)} bytes and at most {limit} are taken"
            raise ApiError(413, f"{size}; send fewer or shorter prompts at once.")
        text = data.decode().lstrip("\ufeff")  # byte order marks, which RFC 8259 lets a reader pass over
        value = json.loads(text, parse_constant=_constant, parse_float=real, parse_int=integer)
        if not isinstance(value, dict):
            raise ApiError(400, 'The body must be a JSON object, as in {"contents": ["..."]}.')
        fields = value
        if large or "\\u" in text or text.count("[") + text.count("{") > MAX_DEPTH:
            _inspect(fields)
        if rounded:
            _check_fixed(fields, "", False)
    except UnicodeDecodeError as error:
        return {}, ApiError(400, f"The body is not UTF-8: byte {error.start} cannot be decoded.")
    except json.JSONDecodeError as error:
        what = error.msg.removesuffix(" at")
        return {}, ApiError(400, f"Invalid JSON: {what} at line {error.lineno}, column {error.colno}.")
    except RecursionError:
        return {}, _too_deep()
    except ApiError as error:
        return fields, error
    return fields, None


def _is_kept(text: str, value: float) -> bool:
    """Whether the digits are those of this number: the fewest that name it, or more of them."""
    given = Decimal(text)
    return given in (Decimal(repr(value)), Context(len(given.as_tuple().digits)).create_decimal(value))


def _constant(name: str) -> float:
    raise ApiError(400, f"Invalid JSON: {name} is not a JSON number.")


def _inspect(fields: Json) -> None:
    """Raises ApiError 400 for nesting deeper than MAX_DEPTH, large numbers and half surrogate pairs."""
    level: list[tuple[str, object]] = [("", fields)]
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
                elif isinstance(item, LargeNumber):
                    shown = item.text if len(item.text) <= MAX_DIGITS else f"{item.text[:MAX_DIGITS]}..."
                    raise ApiError(400, f"The number {shown} of {name} is too large.", param=name)
                elif isinstance(item, dict | list):
                    deeper.append((name, item))
        if not deeper:
            return
        level = deeper
    raise _too_deep()


def _check_fixed(value: object, place: str, fixed: bool) -> None:
    """Raises ApiError 400 for a number in `const` or `enum` that an answer could not repeat."""
    if isinstance(value, dict):
        for key, item in value.items():
            _check_fixed(item, f"{place}.{key}" if place else key, fixed or key in FIXED)
    elif isinstance(value, list):
        for i, item in enumerate(value):
            _check_fixed(item, f"{place}[{i}]", fixed)
    elif fixed and isinstance(value, RoundedNumber):
        why = "has more digits than can be told apart; write it as a string"
        raise ApiError(400, f"The number {value.text[:MAX_DIGITS]} of {place} {why}.", param=place)


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
