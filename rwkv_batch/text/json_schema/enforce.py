"""A JSON schema as llguidance enforces it, or what of it cannot be enforced.

What the library gets wrong, in its version 1.9.1, is written otherwise, or refused with its place. Keywords
that are not known are annotations, as JSON Schema has it, and so are formats that are not known.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from rwkv_batch.text.json_schema.closing import closed
from rwkv_batch.text.json_schema.errors import SchemaError, inside
from rwkv_batch.text.json_schema.formats import OF_LIBRARY, PATTERNS
from rwkv_batch.text.json_schema.numbers import (
    LOWER,
    UPPER,
    bounds,
    check_fixed,
    check_multiples,
    multiple,
)
from rwkv_batch.text.json_schema.patterns import to_rust
from rwkv_batch.text.json_schema.shapes import TYPES, Shapes, as_list, references, target

Schema = Any  # an object or a boolean
DRAFTS = (
    "json-schema.org/schema",
    *(f"json-schema.org/draft-0{number}/schema" for number in (4, 6, 7)),
    *(f"json-schema.org/draft/{year}/schema" for year in ("2019-09", "2020-12")),
)
MAPS = ("properties", "patternProperties", "$defs", "definitions")
LISTS = ("anyOf", "allOf", "oneOf", "prefixItems")
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
# How much of a schema may be left out: nothing; what cannot be enforced; also what may be too complex; all.
STRICT, LENIENT, ROUGH, ANY_OBJECT = range(4)
SINGLE = ("items", "additionalItems", "additionalProperties")
FINE = frozenset({"pattern", "patternProperties", "format", "multipleOf", *LOWER, *UPPER, *COUNTS})
MOST_VISITS = 50_000
IN_PLACE = {"allOf", "anyOf", "oneOf", "$ref"}  # whose schemas hold for the same value
ANYTHING: tuple[Any, ...] = (True, {})
SHORT_ESCAPES = 'nrbtf\\"'
UNWRITABLE = {*map(chr, range(32)), "\x7f"} - set("\n\r\b\t\f")  # in JSON with these escapes
# Keywords that are not enforced -> whether a schema with one means the same without it.
UNENFORCED: dict[str, Callable[[dict[str, Any]], bool]] = {
    "not": lambda schema: schema["not"] is False,
    "if": lambda schema: not ("then" in schema or "else" in schema),
    "then": lambda schema: "if" not in schema,
    "else": lambda schema: "if" not in schema,
    "uniqueItems": lambda schema: schema["uniqueItems"] is False,
    "contains": lambda schema: schema.get("minContains") == 0 and "maxContains" not in schema,
    "minContains": lambda schema: "contains" not in schema,
    "maxContains": lambda schema: "contains" not in schema,
    "dependentRequired": lambda schema: not any(schema["dependentRequired"].values()),
    "dependentSchemas": lambda schema: all(v in ANYTHING for v in schema["dependentSchemas"].values()),
    "dependencies": lambda schema: all(v in (*ANYTHING, []) for v in schema["dependencies"].values()),
    "propertyNames": lambda schema: schema["propertyNames"] in (*ANYTHING, {"type": "string"}),
    "unevaluatedProperties": lambda schema: schema["unevaluatedProperties"] in ANYTHING,
    "unevaluatedItems": lambda schema: schema["unevaluatedItems"] in ANYTHING,
    "$dynamicRef": lambda schema: False,
    "$recursiveRef": lambda schema: False,
}


@dataclass(frozen=True)
class Enforced:
    """A schema for the library. `escapes`: those that JSON may have in it; None: all of the library's."""

    schema: Schema
    escapes: str | None


def enforced(schema: Schema, leniency: int = STRICT) -> Enforced:
    """A schema whose objects are closed unless they say otherwise. Raises SchemaError if it is strict."""
    if leniency == ANY_OBJECT:
        return Enforced({"type": "object"}, None)
    root = closed(schema)
    work = _Reading(root, leniency)
    made = work.node(root, "#")
    if not work.has_open_names:
        return Enforced(made, None)
    for place, text in work.fixed_texts:
        if not set(text).isdisjoint(UNWRITABLE):
            if leniency:
                return Enforced(made, None)
            raise SchemaError(place, "has a control character; let objects have no additionalProperties then")
    # An object that takes other keys than those it names must not take one of these again, spelled with an
    # escape such as \\u0061: 1.9.1 lets that pass (no report of it is known).
    return Enforced(made, SHORT_ESCAPES)


class _Reading:
    def __init__(self, root: Schema, leniency: int) -> None:
        self.has_open_names = False  # whether an object takes other keys beside those that it names
        self.fixed_texts: list[tuple[str, str]] = []  # of `const` and `enum`, with their places
        self._root, self._shapes, self._leniency = root, Shapes(root), leniency
        self._targets = set(references(root))
        self._visits = 0  # of schemas, for what their parts say together
        self._left_out = FINE if leniency >= ROUGH else frozenset()
        multiples = set(_multiples_in(root))
        if leniency:
            try:
                check_multiples(multiples, "#")
            except SchemaError:
                self._left_out |= {"multipleOf"}
        self._has_multiples = len(multiples) > 1 and "multipleOf" not in self._left_out

    def node(self, schema: Schema, place: str) -> Schema:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            self._refuse(SchemaError(place, "is neither an object nor a boolean"))
            return True
        schema = {key: value for key, value in schema.items() if key not in self._left_out}
        out: dict[str, Any] = {}
        for key, value in schema.items():
            with self._leaving_out():
                self._keyword(out, schema, key, value, inside(place, key))
        with self._leaving_out():
            out |= bounds(schema, place)
        if "oneOf" in out:
            self._one_of(out, schema, inside(place, "oneOf"))
        if "format" in schema:
            with self._leaving_out():
                _format(out, schema["format"], inside(place, "format"))
        if self._has_multiples and not IN_PLACE.isdisjoint(schema):
            check_multiples(self._multiples(schema, set()), place)
        named, by_pattern = bool(out.get("properties")), bool(out.get("patternProperties"))
        is_open = out.get("additionalProperties") is not False
        self.has_open_names |= (named and by_pattern) or (is_open and (named or by_pattern))
        return out

    def _refuse(self, error: SchemaError) -> None:
        """Raises it, unless what cannot be enforced is left out."""
        if not self._leniency:
            raise error

    @contextmanager
    def _leaving_out(self) -> Iterator[None]:
        try:
            yield
        except SchemaError as error:
            self._refuse(error)

    def _keyword(self, out: dict[str, Any], schema: dict[str, Any], key: str, value: Any, at: str) -> None:
        """What stands for it goes into `out`."""
        if key in LOWER or key in UPPER or key == "format":
            return
        if key in UNENFORCED:
            _check_neutral(schema, key, at)
        elif key in MAPS:
            out[key] = self._map(key, value, at)
        elif key in LISTS or (key == "items" and isinstance(value, list)):
            if not isinstance(value, list):
                raise SchemaError(at, "is no list of schemas")
            out[key] = [self.node(each, inside(at, i)) for i, each in enumerate(value)]
        elif key in SINGLE:
            out[key] = self.node(value, at)
        elif key in COUNTS:
            if (count := _count(schema, key, value, at)) is not None:
                out[key] = count
        elif key in ("const", "enum"):
            self._fixed(key, value, at)
            out[key] = value
        elif key in CHECKS:
            out[key] = CHECKS[key](value, at)
        elif key == "$ref":
            self._check_reference(value, at)
            out[key] = value
        else:
            out[key] = self._other(value, at)

    def _map(self, key: str, value: Any, at: str) -> dict[str, Schema]:
        if not isinstance(value, dict):
            raise SchemaError(at, "is no object of schemas")
        patterns = key == "patternProperties"
        found = {
            to_rust(name, inside(at, name)) if patterns else name: self.node(each, inside(at, name))
            for name, each in value.items()
        }
        if len(found) < len(value):
            raise SchemaError(at, "has a pattern twice; give it once")
        return found

    def _fixed(self, key: str, value: Any, at: str) -> None:
        if key == "enum" and not (isinstance(value, list) and value):
            raise SchemaError(at, "is no list of values")
        check_fixed(value, at)
        self.fixed_texts += [(at, text) for text in _texts(value)]

    def _other(self, value: Any, at: str) -> Any:
        """A keyword that is not known may hold schemas to which others refer."""
        if at in self._targets:
            return self.node(value, at)
        if isinstance(value, dict):
            return {key: self._other(item, inside(at, key)) for key, item in value.items()}
        if isinstance(value, list):
            return [self._other(item, inside(at, i)) for i, item in enumerate(value)]
        return value

    def _check_reference(self, reference: Any, at: str) -> None:
        if not isinstance(reference, str):
            raise SchemaError(at, "is no text")
        if not reference.startswith("#"):
            raise SchemaError(at, f"names {reference[:80]}, and nothing is fetched; put it under $defs")
        if reference.startswith("#/"):
            try:
                target(self._root, reference)
            except (LookupError, TypeError):
                why = f"names {reference[:80]}, which the schema does not have"
                raise SchemaError(at, why) from None

    def _one_of(self, out: dict[str, Any], schema: dict[str, Any], at: str) -> None:
        """Where no value fits two of the schemas, one of them is any of them."""
        if not self._shapes.are_disjoint(schema["oneOf"]):
            why = "has schemas that may fit one value, and is enforced only if none may"
            self._refuse(SchemaError(at, f"{why}; use anyOf, or give each of them a const of its own"))
        options = {"anyOf": out.pop("oneOf")}
        if "anyOf" in out:
            out["allOf"] = [*out.get("allOf", []), options]
        else:
            out |= options

    def _multiples(self, schema: Any, seen: set[int]) -> list[int | float]:
        """What of `multipleOf` may hold for one value. `seen`: of which schemas it is known, by id()."""
        self._visits += 1
        if self._visits > MOST_VISITS:
            raise SchemaError("#", "has too many schemas with multipleOf that refer to others; use fewer")
        if not isinstance(schema, dict) or id(schema) in seen:
            return []
        seen.add(id(schema))
        parts = [each for key in ("allOf", "anyOf", "oneOf") for each in as_list(schema.get(key))]
        if isinstance(schema.get("$ref"), str):
            with suppress(LookupError, TypeError):
                parts.append(target(self._root, schema["$ref"]))
        found = [value for part in parts for value in self._multiples(part, seen)]
        given = schema.get("multipleOf")
        return [*found, given] if isinstance(given, int | float) and given > 0 else found


def _multiples_in(value: Any) -> Iterator[int | float]:
    """All that could be one."""
    if isinstance(value, dict):
        if isinstance(given := value.get("multipleOf"), int | float) and given > 0:
            yield given
        value = list(value.values())
    for item in as_list(value):
        yield from _multiples_in(item)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for item in value.values() if isinstance(value, dict) else as_list(value):
        yield from _texts(item)


def _check_neutral(schema: dict[str, Any], key: str, at: str) -> None:
    try:
        neutral = UNENFORCED[key](schema)
    except (AttributeError, TypeError):
        neutral = False
    if not neutral:
        raise SchemaError(at, "cannot be enforced; leave it out")


def _count(schema: dict[str, Any], key: str, value: Any, at: str) -> int | None:
    """None: it has no effect."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value != int(value):
        raise SchemaError(at, "is no whole number from 0 on")
    if key == "minProperties":
        if value <= len(set(map(str, as_list(schema.get("required"))))):
            return None
        if value > 1:  # 1.9.1 counts a key that comes twice as two (no report of it is known)
            raise SchemaError(at, "cannot be enforced beyond 1; name the keys in required")
    return int(value)


def _format(out: dict[str, Any], name: Any, at: str) -> None:
    """A format that is not known has no effect, as JSON Schema has it."""
    if not isinstance(name, str):
        raise SchemaError(at, "is no text")
    if name in OF_LIBRARY:
        out["format"] = name
    if name not in PATTERNS:
        return
    pattern = {"pattern": f"^(?:{PATTERNS[name]})$"}
    if "pattern" in out:
        out["allOf"] = [*out.get("allOf", []), pattern]
    else:
        out |= pattern


def _pattern(value: Any, at: str) -> str:
    if not isinstance(value, str):
        raise SchemaError(at, "is no text")
    return to_rust(value, at)


def _type(value: Any, at: str) -> Any:
    names = value if isinstance(value, list) and value else [value]
    for name in names:
        if name not in TYPES:
            raise SchemaError(at, f"is {str(name)[:40]!r}; types are {', '.join(TYPES)}")
    return value


def _required(value: Any, at: str) -> Any:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise SchemaError(at, "is no list of names")
    return value


def _dialect(value: Any, at: str) -> Any:
    if not isinstance(value, str) or not value.rstrip("#").endswith(DRAFTS):
        raise SchemaError(at, "names a dialect that is not known here; leave it out")
    return value


CHECKS: dict[str, Callable[[Any, str], Any]] = {
    "pattern": _pattern,
    "multipleOf": multiple,
    "type": _type,
    "required": _required,
    "$schema": _dialect,
}
