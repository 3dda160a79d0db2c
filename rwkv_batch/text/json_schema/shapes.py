"""What can be said of schemas without a value: which ones no value can fit both of."""

from collections.abc import Hashable, Iterable, Iterator
from contextlib import suppress
from typing import Any
from urllib.parse import unquote

MOST_STEPS = 12  # into schemas, of which some refer to themselves
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
        self._root = root

    def are_disjoint(self, schemas: Iterable[Any]) -> bool:
        """Whether for sure no value fits two of them."""
        options = list(schemas)
        return all(self._disjoint(a, b, 0) for i, a in enumerate(options) for b in options[i + 1 :])

    def _disjoint(self, a: Any, b: Any, steps: int) -> bool:
        if a is False or b is False:
            return True
        if steps == MOST_STEPS or not (isinstance(a, dict) and isinstance(b, dict)):
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
        names = {*as_list(a.get("required")), *as_list(b.get("required"))}
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


def _property(schema: dict[str, Any], name: Any) -> Any:
    properties = schema.get("properties")
    if isinstance(properties, dict) and name in properties:
        return properties[name]
    return True if "patternProperties" in schema else schema.get("additionalProperties", True)
