"""Tool calls: the text that offers tools to the model, and the parser of the calls that it writes.

A call is `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`; only the first one in an answer counts.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"
Schema = dict[str, Any]  # a JSON schema, or an OpenAI object that holds one


def tool_prompt(tools: Sequence[Schema], choice: str | Schema = "auto") -> str:
    """The block that goes into the system turn. `tools` are OpenAI function tools, already checked.

    `choice` is "auto", "required", or a dict that names one function.
    """
    lines = [
        "You can call one tool. To call it, answer with nothing but one line:",
        f'{OPEN}{{"name": "the tool", "arguments": {{...}}}}{CLOSE}',
        "Inside the tags stands only JSON. If no tool helps, answer normally.",
    ]
    if choice == "required":
        lines.append("You must call a tool.")
    elif isinstance(choice, dict):
        lines.append(f"You must call the tool {choice['function']['name']}.")
    lines.append("Available tools:")
    for tool in tools:
        function = tool["function"]
        lines.append(f"Tool: {function['name']}")
        if function.get("description"):
            lines.append(f"Purpose: {function['description']}")
        parameters = function.get("parameters") or {}
        if parameters.get("properties"):
            lines.append("Arguments:")
            lines += _arguments(parameters, 0)
        example = {"name": function["name"], "arguments": _placeholder({**parameters, "type": "object"})}
        lines.append(f"Example: {OPEN}{json.dumps(example, ensure_ascii=False)}{CLOSE}")
    return "\n".join(lines)


def _arguments(schema: Schema, depth: int) -> Iterator[str]:
    required = schema.get("required") or []
    for name, spec in _properties(schema):
        kind = _kind(spec, "any")
        items = spec.get("items")
        if kind == "array" and isinstance(items, dict):
            kind = f"array of {_kind(items, 'any')}"
        line = f"{'  ' * depth}- {name} ({kind}, {'required' if name in required else 'optional'})"
        if spec.get("description"):
            line += f": {spec['description']}"
        if _choices(spec):
            line += f" One of: {', '.join(json.dumps(v, ensure_ascii=False) for v in _choices(spec))}."
        yield line
        nested = items if spec.get("type") == "array" else spec
        if isinstance(nested, dict):
            yield from _arguments(nested, depth + 1)


def _placeholder(schema: Schema) -> object:
    if _choices(schema):
        return _choices(schema)[0]
    kind = _kind(schema, "object" if "properties" in schema else "string").split(" or ")[0]
    if kind == "object":
        return {name: _placeholder(spec) for name, spec in _properties(schema)}
    if kind == "array":
        items = schema.get("items")
        return [_placeholder(items)] if isinstance(items, dict) else []
    return {"integer": 0, "number": 0, "boolean": True, "null": None}.get(kind, "...")


def _properties(schema: Schema) -> list[tuple[str, Schema]]:
    """The properties of an object. A schema that is no object (JSON Schema has `true`) allows anything."""
    properties = schema.get("properties")
    return (
        [(n, s if isinstance(s, dict) else {}) for n, s in properties.items()]
        if isinstance(properties, dict)
        else []
    )


def _kind(schema: Schema, default: str) -> str:
    kind = schema.get("type", default)
    return " or ".join(map(str, kind)) if isinstance(kind, list) else str(kind)


def _choices(schema: Schema) -> list[Any]:
    enum = schema.get("enum")
    return enum if isinstance(enum, list) else []


@dataclass(frozen=True)
class ToolCall:
    """A call the model made: the function's name and its arguments as JSON text."""

    name: str
    arguments: str


class ToolCallParser:
    """Finds the first valid call in a stream of text.

    Text that could still be the beginning of a call is held back. If it is none, it comes out unchanged.
    """

    def __init__(self) -> None:
        self.call: ToolCall | None = None
        self._held = ""
        self._searched = 0  # how far the held call has been searched for its end

    def feed(self, text: str) -> str:
        """The part of the answer that can be shown after `text`. `call` is set once a call is complete."""
        if self.call:
            return text
        self._held += text
        shown = ""
        while True:
            start = self._held.find(OPEN)
            if start < 0:
                return shown + self._show(len(self._held) - partial_suffix(self._held, OPEN))
            shown += self._show(start)
            end = self._held.find(CLOSE, max(self._searched, len(OPEN)))
            if end < 0:
                self._searched = max(self._searched, len(self._held) - len(CLOSE))
                return shown
            try:
                self.call = _parse(self._held[len(OPEN) : end])
            except _InsideString:
                self._searched = end + len(CLOSE)
            except ValueError:
                shown += self._show(len(OPEN))  # no call, but one may begin inside of it
            else:
                self._show(end + len(CLOSE))
                return shown + self.finish()

    def finish(self) -> str:
        """What was held back, at the end of the answer, and is no call."""
        shown = ""
        while self.call is None and self._held.startswith(OPEN):
            shown += self._show(len(OPEN)) + self.feed("")  # a call that never ended may hold a whole one
        return shown + self._show(len(self._held))

    def _show(self, length: int) -> str:
        """Take `length` characters out of what is held."""
        shown, self._held = self._held[:length], self._held[length:]
        if shown:
            self._searched = 0
        return shown


def partial_suffix(text: str, tag: str) -> int:
    """Length of the longest proper beginning of `tag` that `text` ends with."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)


def canonical_json(arguments: object) -> str:
    """The arguments of a call, an object or its JSON text, as one line of JSON.

    Raises ValueError for anything else: other types, NaN, numbers and nesting without bounds, text that is
    not Unicode.
    """
    try:
        data = json.loads(arguments, strict=False) if isinstance(arguments, str) else arguments
        if not isinstance(data, dict):
            raise ValueError("the arguments of a call are an object")
        text = json.dumps(data, ensure_ascii=False, allow_nan=False)
    except RecursionError:
        raise ValueError("the arguments are nested too deeply") from None
    text.encode()
    return text


class _InsideString(ValueError):
    """The end tag stands inside a string of the call; the call goes on."""


def _parse(text: str) -> ToolCall:
    """Raises ValueError when `text` is no call."""
    try:
        data = json.loads(text, strict=False)
    except json.JSONDecodeError as error:
        if error.msg.startswith("Unterminated string"):
            raise _InsideString from None
        raise
    except RecursionError:
        raise ValueError("nested too deeply") from None
    name, arguments = (
        (data.get("name"), data.get("arguments", {})) if isinstance(data, dict) else (None, None)
    )
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise ValueError("a call has a name and an object of arguments")
    name.encode()
    return ToolCall(name, canonical_json(arguments))
