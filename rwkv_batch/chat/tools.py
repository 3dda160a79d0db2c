"""Tools in prompts: how they are offered, and how calls and results stand there.

routes/chat/calls.py reads the calls that models write.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FENCE, FENCE_END = "```json", "```"
TOOL_CALL = "**Tool Call:**"  # in front of a fence, in the form of G1's function calls
CALL_BEGIN = '{"name": '  # what the JSON of a call begins with
Schema = dict[str, Any]  # a JSON schema, or an OpenAI object that holds one


Choice = str | Schema  # "auto", "required", or a dict that names one function


@dataclass(frozen=True)
class ToolForm:
    """How a model was taught to use tools."""

    # The text of the system's turn that offers tools: OpenAI function tools, already checked.
    prompt: Callable[[Sequence[Schema], Choice], str]
    before: str  # what stands in front of the JSON of a call
    after: str
    indent: int | None  # of that JSON; None: it is one line
    result: Callable[[str], str]  # a tool's result as the text of a turn,
    result_role: Literal["tool", "user"]  # and whose turn that is

    def call(self, name: str, arguments: str) -> str:
        """A call as the model would have written it. `arguments`: an object as JSON text."""
        if self.indent is None:  # the arguments stand as they came
            text = f'{json.dumps({"name": name}, ensure_ascii=False)[:-1]}, "arguments": {arguments}}}'
        else:
            call = {"name": name, "arguments": json.loads(arguments)}
            text = json.dumps(call, ensure_ascii=False, indent=self.indent)
        return self.before + text + self.after

    def opening(self, choice: Choice) -> str:
        """The beginning of the call that must be made; empty if none must.

        It ends between two tokens of the call as models learn it.
        """
        match choice:
            case "required":
                return f'{self.before}{CALL_BEGIN}"'
            case {"function": {"name": name}}:
                return f'{self.before}{CALL_BEGIN}{json.dumps(name, ensure_ascii=False)}, "arguments":'
        return ""


def tag_prompt(tools: Sequence[Schema], choice: Choice = "auto") -> str:
    """For models that write a call between tags."""
    lines = [
        "You can call one tool. To call it, answer with nothing but one line:",
        f'{OPEN}{{"name": "the tool", "arguments": {{...}}}}{CLOSE}',
        "Inside the tags stands only JSON. If no tool helps, answer normally.",
    ]
    lines += _demands(choice)
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


def json_prompt(tools: Sequence[Schema], choice: Choice = "auto") -> str:
    """For models that write a call as a fenced block of JSON."""
    offered = [{k: v for k, v in tool["function"].items() if v is not None} for tool in tools]
    demand = "" if choice != "auto" else " Answer in plain words if no tool helps."
    lines = [
        f"Tools: {json.dumps(offered, ensure_ascii=False, separators=(',', ':'))}",
        f"Return only a JSON function call.{demand}",
        *_demands(choice),
    ]
    return "\n".join(lines)


def markdown_prompt(tools: Sequence[Schema], choice: Choice = "auto") -> str:
    """For the function form of the G1 series: each tool has a heading and its JSON schema."""
    lines = []
    for tool in tools:
        function = tool["function"]
        lines.append(f"### `{function['name']}`")
        if function.get("description"):
            lines.append(f"**Description:** {function['description']}")
        schema = json.dumps(function.get("parameters") or {}, ensure_ascii=False, indent=2)
        lines += ["**Parameters:**", FENCE, schema, FENCE_END]
    lines += [
        "Call a tool in this form:",
        TOOL_CALL,
        FENCE,
        '{"name": "the tool", "arguments": {...}}',
        FENCE_END,
        "Then wait for its output. If no tool helps, answer normally.",
        *_demands(choice),
    ]
    return "\n".join(lines)


def _demands(choice: Choice) -> list[str]:
    if choice == "required":
        return ["You must call a tool."]
    return [f"You must call the tool {choice['function']['name']}."] if isinstance(choice, dict) else []


def _fenced_result(text: str) -> str:
    """JSON in a fence, indented; other text as it is, and JSON that is no Unicode when it is read."""
    try:
        indented = json.dumps(json.loads(text), ensure_ascii=False, indent=2)
        indented.encode()
    except (ValueError, RecursionError):
        return text
    return f"{FENCE}\n{indented}\n{FENCE_END}"


TAGS = ToolForm(tag_prompt, OPEN, CLOSE, None, str, "tool")
JSON_FENCE = ToolForm(
    json_prompt, f"{FENCE}\n", f"\n{FENCE_END}", None, lambda text: f"Function output:\n{text}", "user"
)
MARKDOWN = ToolForm(markdown_prompt, f"{TOOL_CALL}\n{FENCE}\n", f"\n{FENCE_END}", 2, _fenced_result, "tool")


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
