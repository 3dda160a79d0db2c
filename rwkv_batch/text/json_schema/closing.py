"""Objects that take no other keys than those that their schema names.

JSON Schema lets an object have any keys beside its `properties`. Whoever writes a schema for an answer means
those, and a model that is unsure invents more for ever. So a schema with `properties` that says nothing of
others is closed, as llama.cpp, Ollama and vLLM have it. Where several schemas hold for one object (`allOf`,
`anyOf` or `$ref` beside other keywords), it takes the keys of all of them.
"""

from dataclasses import dataclass, field
from typing import Any

from rwkv_batch.text.json_schema.errors import SchemaError, inside
from rwkv_batch.text.json_schema.shapes import as_list, references, target

CHOICES = ("allOf", "anyOf", "oneOf")
MAPS = ("properties", "patternProperties", "$defs", "definitions")
LISTS = ("prefixItems", "items")
SINGLE = ("items", "additionalItems", "additionalProperties")
VALUES = ("const", "enum", "default", "examples")
OTHERS = ("additionalProperties", "unevaluatedProperties")  # keywords that say which other keys there may be
MOST_VISITS = 50_000
OF_OBJECTS = ("properties", "patternProperties", "required", *OTHERS)


@dataclass
class _Keys:
    """What all schemas that hold for one object say of its keys."""

    names: dict[str, None] = field(default_factory=dict)
    patterns: dict[str, None] = field(default_factory=dict)
    named: bool = False  # whether one has `properties`
    said: bool = False  # whether one says which others there may be, or cannot be read


def closed(schema: Any) -> Any:
    """The schema with the keys of its objects said. What is not a schema stays as it is."""
    return _Closing(schema).whole()


class _Closing:
    def __init__(self, root: Any) -> None:
        self._root = root
        self._targets = set(references(root))
        self._visits = 0  # of schemas, for the keys that they have together
        self._open: dict[str, str] = {}  # by reference: the name of the same schema, not closed
        self._definitions: dict[str, Any] = {}  # by that name

    def whole(self) -> Any:
        made = self._closed(self._root, "#")
        if self._definitions:
            made["$defs"] = {**made.get("$defs", {}), **self._definitions}
        return made

    def _closed(self, schema: Any, at: str) -> Any:
        """A schema that is all that holds for a value."""
        if not isinstance(schema, dict):
            return schema
        used = [key for key in (*CHOICES, "$ref") if key in schema]
        alone = len(used) == 1 and not any(key in schema for key in OF_OBJECTS)
        if alone and not (used == ["allOf"] and len(as_list(schema["allOf"])) > 1):
            return self._parts(schema, at, self._closed)
        made = self._parts(schema, at, self._open_part)
        keys = _Keys()
        self._collect(schema, keys, set())
        if keys.named and not keys.said:
            for key, found in (("properties", keys.names), ("patternProperties", keys.patterns)):
                if found:
                    made[key] = {**dict.fromkeys(found, True), **made.get(key, {})}
            made["additionalProperties"] = False
        return made

    def _open_part(self, schema: Any, at: str) -> Any:
        """A schema beside which others hold for the same value."""
        return self._parts(schema, at, self._open_part) if isinstance(schema, dict) else schema

    def _parts(self, schema: dict[str, Any], at: str, in_place: Any) -> dict[str, Any]:
        """Those within a schema; `in_place`: what is made of those that hold for the same value."""
        made: dict[str, Any] = {}
        for key, value in schema.items():
            place = inside(at, key)
            if key in CHOICES and isinstance(value, list):
                made[key] = [in_place(each, inside(place, i)) for i, each in enumerate(value)]
            elif key == "$ref" and isinstance(value, str) and in_place == self._open_part:
                made[key] = self._open_reference(value)
            elif key in MAPS and isinstance(value, dict):
                made[key] = {name: self._closed(each, inside(place, name)) for name, each in value.items()}
            elif key in LISTS and isinstance(value, list):
                made[key] = [self._closed(each, inside(place, i)) for i, each in enumerate(value)]
            elif key in SINGLE:
                made[key] = self._closed(value, place)
            else:
                made[key] = value if key in VALUES else self._other(value, place)
        return made

    def _other(self, value: Any, at: str) -> Any:
        """A keyword that is not known may hold schemas to which others refer."""
        if at in self._targets:
            return self._closed(value, at)
        if isinstance(value, dict):
            return {key: self._other(item, inside(at, key)) for key, item in value.items()}
        return (
            [self._other(v, inside(at, i)) for i, v in enumerate(value)] if isinstance(value, list) else value
        )

    def _open_reference(self, reference: str) -> str:
        """A reference to the same schema that is not closed itself."""
        if reference not in self._open:
            try:
                found = target(self._root, reference)
            except (LookupError, TypeError):
                return reference
            number, taken = len(self._open), self._root.get("$defs", {})
            while (name := f"open-{number}") in taken:
                number += len(taken)
            self._open[reference] = name
            self._definitions[name] = self._open_part(found, reference)
        return f"#/$defs/{self._open[reference]}"

    def _collect(self, schema: Any, keys: _Keys, seen: set[int]) -> None:
        """seen: the schemas whose keys are in `keys`, by id()."""
        self._visits += 1
        if self._visits > MOST_VISITS:
            raise SchemaError("#", "has too many schemas that refer to others; use fewer")
        if not isinstance(schema, dict) or id(schema) in seen:
            return
        seen.add(id(schema))
        for key, found in (("properties", keys.names), ("patternProperties", keys.patterns)):
            if isinstance(schema.get(key), dict):
                found |= dict.fromkeys(schema[key])
        keys.names |= dict.fromkeys(name for name in as_list(schema.get("required")) if isinstance(name, str))
        keys.named |= "properties" in schema
        keys.said |= any(key in schema for key in OTHERS)
        parts = [each for key in CHOICES for each in as_list(schema.get(key))]
        if "$ref" in schema:
            try:
                parts.append(target(self._root, schema["$ref"]))
            except (LookupError, TypeError):
                keys.said = True
        for part in parts:
            self._collect(part, keys, seen)
