"""Numbers in schemas, for a library that reads them as fp64.

Where two bounds have the same integer part, and the one nearer to zero is a whole number that is excluded,
llguidance 1.9.1 takes that number too (its issue 206 is a brother: bounds between which no integer lies). So
such a bound is passed on as the next number that is read exactly.
"""

import math
from collections.abc import Iterable
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal, localcontext
from typing import Any

from rwkv_batch.text.json_schema.errors import SchemaError, inside

LARGEST_INTEGER = 2**53  # up to which fp64 has all
LARGEST_BOUND = 2**63 - 1024  # of those that the library has; beyond it, this is one that is within
LARGEST_LEAST = 10**18 - 1  # of those that a number must reach
LEAST = Decimal("1e-15")  # stands for the next number to zero
# Digits of numbers that are read exactly: fewer than 2**53 of them, times 10**-22 at least.
DIGITS, MOST_PLACES = 15, 22
WHOLE = 10**15  # from which bounds are whole numbers
LARGEST_MULTIPLE = 2**32 - 1
LOWER = ("minimum", "exclusiveMinimum")
UPPER = ("maximum", "exclusiveMaximum")


def bounds(schema: dict[str, Any], place: str) -> dict[str, int | float]:
    """What all four keywords say, in one for each side. Raises SchemaError."""
    found: dict[str, int | float] = {}
    for names, sign in ((LOWER, 1), (UPPER, -1)):
        inclusive, exclusive = names
        given = []
        if inclusive in schema:
            given.append(_inside(_number(schema, inclusive, place), sign, False))
        if isinstance(schema.get(exclusive), bool):  # as draft 4 has it
            if schema[exclusive] and inclusive in schema:
                given.append(_inside(_number(schema, inclusive, place), sign, True))
        elif exclusive in schema:
            given.append(_inside(_number(schema, exclusive, place), sign, True))
        if not given:
            continue
        bound, excluded = max(given, key=lambda each: (each[0] * sign, each[1]))
        if bound * sign > LARGEST_LEAST:
            each = next(each for each in names if each in schema)
            raise SchemaError(inside(place, each), f"is beyond {sign * LARGEST_LEAST}; use one nearer to 0")
        if abs(bound) > LARGEST_BOUND:
            bound, excluded = -sign * LARGEST_BOUND, False
        found[names[excluded]] = bound
    return found


def _number(schema: dict[str, Any], key: str, place: str) -> int | float:
    value = schema[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise SchemaError(inside(place, key), "is no number")
    return value


def _inside(bound: int | float, sign: int, excluded: bool) -> tuple[int | float, bool]:
    """The nearest number within a bound that is read exactly, and whether it is excluded itself.

    sign: 1 for a lower bound, -1 for an upper one.
    """
    exact = Decimal(bound) if isinstance(bound, int) else Decimal(repr(bound))
    with localcontext(prec=400):
        places = 0 if abs(exact) >= WHOLE else min(DIGITS - 1 - exact.adjusted(), MOST_PLACES)
        found = exact.quantize(Decimal(1).scaleb(-places), ROUND_CEILING if sign > 0 else ROUND_FLOOR)
        if excluded and found == exact:
            if found != found.to_integral_value() or (found * sign < 0 and places):
                return _as_number(found, sign), True
            found += sign * (Decimal(1).scaleb(-places) if found else LEAST)
        elif 0 < abs(found) < LEAST:
            found = sign * LEAST if found * sign > 0 else Decimal(0)
    return _as_number(found, sign), False


def _as_number(exact: Decimal, sign: int) -> int | float:
    if exact != exact.to_integral_value():
        return float(exact)
    whole = int(exact)
    if abs(whole) <= LARGEST_INTEGER:
        return whole
    if abs(whole) > LARGEST_BOUND:  # the caller knows no more of it
        return 2 * LARGEST_BOUND if whole > 0 else -2 * LARGEST_BOUND
    nearest = int(float(whole))
    return nearest if (nearest - whole) * sign >= 0 else int(math.nextafter(nearest, sign * math.inf))


def multiple(value: Any, place: str) -> int | float:
    """`multipleOf` as it is, if the library can have it. Raises SchemaError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise SchemaError(place, "should be a number above 0")
    coefficient, places = float(value), 0
    while coefficient != math.floor(coefficient) and places < 20:  # as the library does it
        coefficient, places = coefficient * 10, places + 1
    exact = Decimal(repr(value)) == Decimal(int(coefficient)).scaleb(-places)
    if coefficient > LARGEST_MULTIPLE or not exact:
        raise SchemaError(place, f"is {value}, which cannot be enforced; use another number, or leave it out")
    return value


def check_multiples(values: Iterable[int | float], place: str) -> None:
    """Raises SchemaError if the library could not find one number that all of these divide.

    It computes that in 32 bits without a look at what is beyond, in version 1.9.1 (no report of it is known).
    """
    found = {Decimal(repr(value)) for value in values}
    if len(found) < 2:
        return
    scale = max(-value.normalize().as_tuple().exponent for value in found)  # type: ignore[operator]
    product = math.prod(int(value.scaleb(max(scale, 0))) for value in found)
    if product > LARGEST_MULTIPLE:
        names = " and ".join(str(value) for value in sorted(found))
        raise SchemaError(place, f"has multipleOf {names} for one number; give one that all of them divide")


def check_fixed(value: Any, place: str) -> None:
    """Raises SchemaError for a number of `const` or `enum` that would be another one in the answer."""
    if isinstance(value, dict):
        for key, item in value.items():
            check_fixed(item, inside(place, key))
    elif isinstance(value, list):
        for i, item in enumerate(value):
            check_fixed(item, inside(place, i))
    elif isinstance(value, int | float) and not _is_read_exactly(value):
        why = "has more digits than can be told apart; write it as a string"
        raise SchemaError(place, f"is {value}, which {why}")


def _is_read_exactly(value: int | float) -> bool:
    """Whether the library reads the digits of a number as that number.

    Its parser of JSON multiplies and divides in fp64, which is exact up to some size; beyond it, 1.9.1 may be
    wrong by one in the last place.
    """
    if isinstance(value, int):
        return abs(value) <= LARGEST_INTEGER
    _, digits, exponent = Decimal(repr(value)).normalize().as_tuple()
    assert isinstance(exponent, int)
    return (
        abs(value) <= LARGEST_INTEGER
        and int("".join(map(str, digits))) <= LARGEST_INTEGER
        and exponent >= -MOST_PLACES
    )
