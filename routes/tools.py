"""Tool calls: the text that offers tools to the model, and the parser that finds a call in what it writes.

A call is `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`; at most the first one in an answer counts.
"""
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def tool_prompt(tools: Sequence[dict], choice: str | dict = "auto") -> str:
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
        example = {"name": function["name"], "arguments": _placeholder(parameters)}
        lines.append(f"Example: {OPEN}{json.dumps(example, ensure_ascii=False)}{CLOSE}")
    return "\n".join(lines)


def _arguments(schema: dict, depth: int) -> Iterator[str]:
    required = schema.get("required") or []
    for name, spec in (schema.get("properties") or {}).items():
        kind = spec.get("type", "any")
        if kind == "array" and isinstance(spec.get("items"), dict):
            kind = f"array of {spec['items'].get('type', 'any')}"
        line = f"{'  ' * depth}- {name} ({kind}, {'required' if name in required else 'optional'})"
        if spec.get("description"):
            line += f": {spec['description']}"
        if spec.get("enum"):
            line += f" One of: {', '.join(json.dumps(v, ensure_ascii=False) for v in spec['enum'])}."
        yield line
        nested = spec.get("items") if spec.get("type") == "array" else spec
        if isinstance(nested, dict) and nested.get("properties"):
            yield from _arguments(nested, depth + 1)


def _placeholder(schema: dict) -> object:
    if schema.get("enum"):
        return schema["enum"][0]
    kind = schema.get("type", "object" if "properties" in schema else "string")
    if kind == "object":
        return {name: _placeholder(spec) for name, spec in (schema.get("properties") or {}).items()}
    if kind == "array":
        items = schema.get("items")
        return [_placeholder(items)] if isinstance(items, dict) else []
    return {"integer": 0, "number": 0, "boolean": True, "null": None}.get(kind, "...")


@dataclass(frozen=True)
class ToolCall:
    """A call the model made: the function's name and its arguments as JSON text."""

    name: str
    arguments: str


class ToolCallParser:
    """Finds the first valid call in a stream of text.

    Text that could still be the beginning of a call is held back; whatever turns out not to be one comes out unchanged.
    """

    def __init__(self) -> None:
        self.call: ToolCall | None = None
        self._held = ""

    def feed(self, text: str) -> str:
        """Take the next piece of the answer; return what can be shown of it now. `call` is set once a call is complete."""
        if self.call:
            return text
        self._held += text
        shown = ""
        while True:
            start = self._held.find(OPEN)
            if start < 0:
                keep = _partial_suffix(self._held, OPEN)
                cut = len(self._held) - keep
                shown, self._held = shown + self._held[:cut], self._held[cut:]
                return shown
            shown, self._held = shown + self._held[:start], self._held[start:]
            end = self._held.find(CLOSE)
            if end < 0:
                return shown
            block, self._held = self._held[: end + len(CLOSE)], self._held[end + len(CLOSE):]
            self.call = _parse(block[len(OPEN): -len(CLOSE)])
            if self.call:
                rest, self._held = self._held, ""
                return shown + rest
            shown += block

    def finish(self) -> str:
        """The answer has ended: what was held back and is no call after all."""
        held, self._held = self._held, ""
        return held


def _partial_suffix(text: str, tag: str) -> int:
    """Length of the longest proper beginning of `tag` that `text` ends with."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)


def _parse(text: str) -> ToolCall | None:
    try:
        data = json.loads(text)
    except ValueError:
        return None
    if not isinstance(data, dict):
        return None
    name, arguments = data.get("name"), data.get("arguments", {})
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))
