"""What can be said of schemas without a value: which ones no value can fit both of."""

from collections.abc import Hashable, Iterable, Iterator
from contextlib import suppress
from typing import Any
from urllib.parse import unquote

MOST_STEPS = 12  # into schemas, of which some refer to themselves
MOST_COMPARISONS = 20_000  # of a document, each of which takes some microseconds
TYPES = ("null", "boolean", "number", "integer", "string", "array", "object")


def target(root: Any, reference: str) -> Any:
    """What a `$ref` such as `#/$defs/a` names. Raises LookupError or TypeError."""
    if reference != "#" and not reference.startswith("#/"):
        raise LookupError(reference)
    found = root
    for part in unquote(reference).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        found = found[int(key)] if isinstance(found, list) and key.isdigit() else found[key]
    return found


def references(value: Any) -> Iterator[str]:
    """The places in a document to which it refers."""
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield unquote(value["$ref"])
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from references(item)


def as_list(value: Any) -> list[Any]:
    """A list in a schema; empty where something else stands."""
    return value if isinstance(value, list) else []


class Shapes:
    """Of one document."""

    def __init__(self, root: Any) -> None:
        self._root, self._comparisons = root, 0

    def are_disjoint(self, schemas: Iterable[Any]) -> bool:
        """Whether for sure no value fits two of them; no, where it would take long to say."""
        options = list(schemas)
        if self._are_told_apart(options):
            return True
        return all(self._disjoint(a, b, 0) for i, a in enumerate(options) for b in options[i + 1 :])

    def _are_told_apart(self, options: list[Any]) -> bool:
        """Whether each fixes a value, its own or that of a property, that no other one has."""
        found = [self._resolved(option) for option in options]
        if _are_apart(found):
            return True
        if not all(_types(each) == {"object"} for each in found):
            return False
        names = set.intersection(*(_required(each) for each in found))
        return any(_are_apart([self._resolved(_property(each, name)) for each in found]) for name in names)

    def _resolved(self, schema: Any) -> dict[str, Any]:
        """A schema, or that to which it refers."""
        found = schema if isinstance(schema, dict) else {}
        for _ in range(MOST_STEPS):
            if not isinstance(found.get("$ref"), str) or "const" in found or "enum" in found:
                break
            try:
                named = target(self._root, found["$ref"])
            except (LookupError, TypeError):
                return {}
            found = named if isinstance(named, dict) else {}
        return found

    def _disjoint(self, a: Any, b: Any, steps: int) -> bool:
        self._comparisons += 1
        if a is False or b is False:
            return True
        if (
            self._comparisons > MOST_COMPARISONS
            or steps == MOST_STEPS
            or not (isinstance(a, dict) and isinstance(b, dict))
        ):
            return False
        if any(self._excludes(x, y, steps + 1) for x, y in ((a, b), (b, a))):
            return True
        if not _types(a) & _types(b):
            return True
        first, second = _fixed(a), _fixed(b)
        if first is not None and second is not None and not first & second:
            return True
        if {"object"} not in (_types(a), _types(b)):
            return False
        names = _required(a) | _required(b)
        return any(self._disjoint(_property(a, name), _property(b, name), steps + 1) for name in names)

    def _excludes(self, a: dict[str, Any], b: Any, steps: int) -> bool:
        """Whether a part of `a` that holds for all of its values leaves none of `b`."""
        parts = list(as_list(a.get("allOf")))
        if isinstance(a.get("$ref"), str):
            with suppress(LookupError, TypeError):
                parts.append(target(self._root, a["$ref"]))
        if any(self._disjoint(part, b, steps) for part in parts):
            return True
        choices = [options for key in ("anyOf", "oneOf") if (options := as_list(a.get(key)))]
        return any(all(self._disjoint(each, b, steps) for each in options) for options in choices)


def _are_apart(schemas: list[dict[str, Any]]) -> bool:
    """Whether each fixes its values, and no value stands in two."""
    fixed = [_fixed(schema) for schema in schemas]
    values = [value for each in fixed for value in each or ()]
    return None not in fixed and len(set(values)) == len(values)


def _types(schema: dict[str, Any]) -> set[str]:
    given = schema.get("type", TYPES)
    names = {given} if isinstance(given, str) else set(map(str, given))
    return names | {"number"} - {"integer"} if "integer" in names else names


def _fixed(schema: dict[str, Any]) -> set[Hashable] | None:
    """The values that `const` and `enum` leave; None: any."""
    if "const" in schema:
        return {_key(schema["const"])}
    return {_key(value) for value in schema["enum"]} if isinstance(schema.get("enum"), list) else None


def _key(value: Any) -> Hashable:
    """Equal for values that are equal in JSON, where true is no 1."""
    if isinstance(value, list):
        return ("list", *map(_key, value))
    if isinstance(value, dict):
        return ("dict", *sorted((key, repr(_key(item))) for key, item in value.items()))
    return (isinstance(value, bool), value)


def _required(schema: dict[str, Any]) -> set[str]:
    return {name for name in as_list(schema.get("required")) if isinstance(name, str)}


def _property(schema: dict[str, Any], name: Any) -> Any:
    properties = schema.get("properties")
    if isinstance(properties, dict) and name in properties:
        return properties[name]
    return True if "patternProperties" in schema else schema.get("additionalProperties", True)
