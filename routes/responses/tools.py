"""The tools of a response: functions, alone or in namespaces.

The model knows a function of a namespace by both names with a dot between. Clients have the two apart, in the
calls that they get and send.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, Field

from routes.http.errors import Json, openai_field
from routes.http.open_lists import Ignored, ignored, open_to, taken_with_places
from routes.openai.tools import MAX_TOOLS, ToolUse, not_here, offered_tool, only_allowed
from rwkv_batch.chat.tools import Schema

ToolName = Annotated[str, Field(min_length=1, pattern=r"\S")]


class FunctionTool(BaseModel):
    """`strict`: whether the schema binds the arguments; only if it is true."""

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None


class NamespaceTool(BaseModel):
    """Functions that belong together. The model reads the description in front of that of the first."""

    type: Literal["namespace"]
    name: ToolName
    description: str | None = None
    tools: list[Annotated[FunctionTool, open_to("function")]]


ResponseTool = Annotated[
    Annotated[FunctionTool | NamespaceTool, Field(discriminator="type")], open_to("function", "namespace")
]
Given = Sequence[FunctionTool | NamespaceTool | Ignored]


@dataclass(frozen=True)
class ResponseFunction:
    """A function as the model knows it."""

    name: str  # with its namespace
    tool: FunctionTool
    place: str  # in the request
    description: str | None
    namespace: str = ""


def full_name(name: str, namespace: str) -> str:
    """What the model knows a function by. `namespace`: "" for none."""
    return f"{namespace}.{name}" if namespace else name


def functions_of(tools: Given) -> list[ResponseFunction]:
    """All functions. Raises ApiError 400 for too many, and for one that the model could take for another."""
    found: list[ResponseFunction] = []
    for i, tool in taken_with_places(tools):
        place = f"tools[{i}]"
        if isinstance(tool, FunctionTool):
            found.append(ResponseFunction(tool.name, tool, place, tool.description))
        elif isinstance(tool, NamespaceTool):
            found += _inside(tool, place)
    if len(found) > MAX_TOOLS:
        raise openai_field("tools", f"input should hold at most {MAX_TOOLS} functions")
    for function in found:
        if function.namespace and sum(other.name == function.name for other in found) > 1:
            raise openai_field(f"{function.place}.name", "another function has this name")
    return found


def _inside(space: NamespaceTool, place: str) -> list[ResponseFunction]:
    found: list[ResponseFunction] = []
    for i, tool in taken_with_places(space.tools):
        parts = [tool.description] if found else [space.description, tool.description]
        found.append(
            ResponseFunction(
                full_name(tool.name, space.name),
                tool,
                f"{place}.tools[{i}]",
                " ".join(part for part in parts if part) or None,
                space.name,
            )
        )
    return found


def ignored_tools(tools: Given) -> list[str]:
    """The places of those that are left out, with their types."""
    names = ignored("tools", tools)
    for i, tool in taken_with_places(tools):
        if isinstance(tool, NamespaceTool):
            names += ignored(f"tools[{i}].tools", tool.tools)
    return names


def as_listed(tools: Given) -> list[Json]:
    """Those that are taken, as they stand in the response."""
    return [_listed(tool) for _, tool in taken_with_places(tools) if not isinstance(tool, Ignored)]


def _listed(tool: FunctionTool | NamespaceTool) -> Json:
    if isinstance(tool, FunctionTool):
        return tool.model_dump() | {"strict": bool(tool.strict)}
    inside = [_listed(each) for _, each in taken_with_places(tool.tools)]
    return {
        "type": tool.type,
        "name": tool.name,
        "description": tool.description or "",
        "tools": inside,
    }


def tool_use(functions: Sequence[ResponseFunction], given: object, parallel: bool) -> ToolUse:
    """How the response uses them; `given`: its tool_choice. Raises ApiError 400 that names what is wrong."""
    made = [offered_tool(each.name, each.description, each.tool.parameters) for each in functions]
    offered, wanted = only_allowed(given, made, given, "tool_choice", lambda entry: _named(entry, functions))
    taken = [f for f, tool in zip(functions, made, strict=True) if any(tool is each for each in offered)]
    choice = _choice(wanted, taken)
    return ToolUse(
        offered,
        choice,
        bool(offered) and choice != "none",
        parallel,
        frozenset(each.name for each in functions if each.tool.strict),
        "parameters",
        [each.place for each in taken],
    )


def _named(entry: Schema, functions: Sequence[ResponseFunction]) -> str | None:
    """The function that an entry of tool_choice names: by all of its name, or by what no other has."""
    name, space = entry.get("name"), entry.get("namespace")
    exact = [each.name for each in functions if each.name == name and space is None]
    alike = [each.name for each in functions if each.tool.name == name and space in (None, each.namespace)]
    return exact[0] if exact else alike[0] if len(alike) == 1 else None


def _choice(choice: object, functions: Sequence[ResponseFunction]) -> str | Schema:
    """In the form of a chat request."""
    entry: Schema = choice if isinstance(choice, dict) else {}
    match choice:
        case "required" if not functions:
            raise openai_field("tool_choice", "required is only allowed when tools are given")
        case "none" | "auto" | "required":
            return str(choice)
        case {"type": "function", "name": str()}:
            if name := _named(entry, functions):
                return {"type": "function", "function": {"name": name}}
            raise openai_field("tool_choice.name", "input should be the name of one of the tools")
        case {"type": str(kind)} if kind != "function":
            raise not_here(kind)
    raise openai_field(
        "tool_choice", "input should be none, auto, required, or {'type': 'function', 'name': ...}"
    )
