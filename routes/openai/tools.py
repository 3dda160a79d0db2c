"""The tool fields of a chat request: which tools are offered, which call is required.

The answer to a request with a required or named call is opened with the beginning of that call, and a grammar
binds the rest; when thoughts come first, it binds all of the call. When an assistant message is continued,
only the prompt demands it.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from routes.chat.answer import AnswerReader
from routes.chat.grammars import arguments_by, of_calls
from routes.http.errors import ApiError, openai_field
from routes.http.open_lists import named, unknown_type
from routes.openai.schemas import ChatBody
from rwkv_batch.chat.templates import Style
from rwkv_batch.chat.tools import CALL_BEGIN, Schema, ToolForm
from rwkv_batch.wire.protocol import Grammar

MAX_TOOLS = 128


@dataclass(frozen=True)
class ToolUse:
    """How a request uses tools."""

    offered: list[Schema]  # rendered into the prompt
    choice: str | Schema  # "none", "auto", "required" or a dict that names a function
    look_for_calls: bool
    parallel: bool  # whether more than one call of an answer counts
    strict: frozenset[str] = frozenset()  # names of the tools whose schemas bind the arguments
    schema_field: str = "function.parameters"  # of a tool in the request
    places: Sequence[str] = ()  # of the tools in the request; (): as they are offered

    def opening(self, style: Style) -> str:
        """The beginning of the call that must be made; empty if the answer opens with something else."""
        return "" if style.thinks or style.thought is None else style.tools.opening(self.choice)

    def reader(self, style: Style) -> AnswerReader:
        """What reads an answer to this request. Without tools on offer, a call of any tool is one."""
        names = {tool["function"]["name"] for tool in self.offered} or None
        most = None if self.parallel else 1
        return AnswerReader(style.thought, self.look_for_calls, names, most, self.opening(style))

    def grammar(self, style: Style, answer: Grammar | None) -> Grammar | None:
        """What the text behind the opening must be; `answer`: what the request says of its answer.

        A call that is required comes in place of the answer, and its schema binds. A call that may come binds
        in the same way where the answer is bound too. Beside a free answer the schema of a strict tool binds
        once a call has begun. A text that is continued has no calls.
        """
        demanded = isinstance(self.choice, dict) or self.choice == "required"
        if not self.offered or self.choice == "none" or style.thought is None:
            return answer
        form, opening = style.tools, self.opening(style)
        if demanded or answer:
            calls = [self._call(form, tool, opening) for tool in self._callable()]
            several = self.parallel and not isinstance(self.choice, dict)
            more = [self._call(form, tool, "") for tool in self.offered] if several else []
            return of_calls(calls, more, answer=None if demanded else answer)
        if not self.strict:
            return None
        trigger = form.before + CALL_BEGIN
        return of_calls([self._call(form, tool, trigger, False) for tool in self.offered], until=trigger)

    def _callable(self) -> list[Schema]:
        """The tools of which one must be called."""
        name = self.choice["function"]["name"] if isinstance(self.choice, dict) else None
        return [tool for tool in self.offered if name in (None, tool["function"]["name"])]

    def _call(self, form: ToolForm, tool: Schema, opening: str, binds: bool = True) -> list[str | Schema]:
        """A call behind `opening`, its own beginning: texts, and the schema of the arguments.

        binds: whether that of a tool which is not strict binds, too.
        """
        function = tool["function"]
        name = json.dumps(function["name"], ensure_ascii=False)
        begin = f'{form.before}{CALL_BEGIN}{name}, "arguments":'.removeprefix(opening)
        strict = function["name"] in self.strict
        parameters = function.get("parameters")
        if parameters is None:  # then the function takes no arguments
            parameters = {"properties": {}}
        schema = {"type": "object"} | (parameters if binds or strict else {})
        i = self.offered.index(tool)
        field = f"{self.places[i] if self.places else f'tools[{i}]'}.{self.schema_field}"
        arguments = arguments_by(schema, field, strict)
        return [*([begin] if begin else []), arguments, "}" + form.after]


def offered_tool(name: str, description: str | None, parameters: Schema | None) -> Schema:
    """A tool in the form in which chats offer it."""
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def places_of(offered: Sequence[Schema], given: Sequence[object]) -> list[str]:
    """Where the tools stand among all that the request has."""
    return [f"tools[{i}]" for i, tool in enumerate(given) if any(tool is each for each in offered)]


def only_allowed(
    choice: object, tools: list[Schema], allowed: object, field: str, name_of: Callable[[Schema], object]
) -> tuple[list[Schema], object]:
    """The tools among which `allowed`, a `tool_choice` of type allowed_tools, lets choose, and the mode.

    Of another choice: all tools, and the choice. `name_of`: the name of a function in an entry of
    `allowed.tools`. Raises ApiError 400 that names the part of `field`, where `allowed` stands.
    """
    if not (isinstance(choice, dict) and choice.get("type") == "allowed_tools"):
        return tools, choice
    if not isinstance(allowed, dict):
        raise openai_field(field, "input should be an object with mode and tools")
    if allowed.get("mode") not in ("auto", "required"):
        raise openai_field(f"{field}.mode", "input should be auto or required")
    entries = allowed.get("tools")
    if not isinstance(entries, list) or not entries:
        raise openai_field(f"{field}.tools", "input should be a list that is not empty")
    known = [tool["function"]["name"] for tool in tools]
    names = set()
    for i, entry in enumerate(entries):
        name = name_of(entry) if isinstance(entry, dict) and entry.get("type") == "function" else None
        if not isinstance(name, str) or name not in known:
            raise openai_field(f"{field}.tools[{i}]", "input should name a function among the tools")
        names.add(name)
    return [tool for tool, name in zip(tools, known, strict=True) if name in names], allowed["mode"]


def not_here(kind: str) -> ApiError:
    """The error for a `tool_choice` that names a tool which the server has left out of `tools`."""
    return openai_field("tool_choice", f"there are no tools of type {kind[:40]!r} here, only functions")


def _name_of(entry: Schema) -> object:
    function = entry.get("function")
    return function.get("name") if isinstance(function, dict) else None


def chat_tools(body: ChatBody) -> ToolUse:
    """Raises ApiError 400 that names what is wrong with `tools` or `tool_choice`.

    `rwkv_tool_compat_mode: false` drops the tools; `enable_tool_calls: true` looks for calls although no
    tools are offered.
    """
    tools: list[Schema] = []
    wanted: object = "auto"
    if body.rwkv_tool_compat_mode:
        given = body.tool_choice
        inside = given.get("allowed_tools") if isinstance(given, dict) else None
        tools, wanted = only_allowed(
            given, _checked(body.tools), inside, "tool_choice.allowed_tools", _name_of
        )
    choice = _choice(wanted, tools)
    look = choice != "none" and (body.enable_tool_calls or bool(tools))
    strict = frozenset(tool["function"]["name"] for tool in tools if tool["function"].get("strict"))
    places = places_of(tools, body.tools) if tools else []
    return ToolUse(tools, choice, look, body.parallel_tool_calls, strict, places=places)


def _checked(tools: object) -> list[Schema]:
    if not isinstance(tools, list):
        raise openai_field("tools", "tools must be a list")
    if len(tools) > MAX_TOOLS:
        raise openai_field("tools", f"input should hold at most {MAX_TOOLS} tools")
    functions = []
    for i, tool in enumerate(tools):
        at = f"tools[{i}]"
        if unknown_type(tool, "function"):
            continue
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise openai_field(f"{at}.type", "input should be 'function', the only type of tool here")
        function = tool.get("function")
        if not isinstance(function, dict):
            raise openai_field(f"{at}.function", "input should be an object")
        if not isinstance(function.get("name"), str) or not function["name"].strip():
            raise openai_field(f"{at}.function.name", "input should be a string that is not empty")
        if not isinstance(function.get("description"), str | None):
            raise openai_field(f"{at}.function.description", "input should be a string")
        if not isinstance(function.get("strict"), bool | None):
            raise openai_field(f"{at}.function.strict", "input should be true or false")
        if not isinstance(function.get("parameters"), dict | None):
            raise openai_field(f"{at}.function.parameters", "input should be a JSON schema object")
        functions.append(tool)
    return functions


def ignored_tools(body: ChatBody) -> list[str]:
    """The places and types of those that are no functions; they are left out."""
    tools = body.tools if isinstance(body.tools, list) else []
    kinds = ((i, unknown_type(tool, "function")) for i, tool in enumerate(tools))
    return [named(f"tools[{i}]", kind) for i, kind in kinds if kind]


def _choice(choice: object, tools: list[Schema]) -> str | Schema:
    match choice:
        case "required" | "any" if not tools:
            raise openai_field("tool_choice", f"{choice} is only allowed when tools are given")
        case "any":  # Mistral's name of it
            return "required"
        case "none" | "auto" | "required":
            return str(choice)
        case {"type": "function", "function": {"name": str(name)}}:
            if name not in [tool["function"]["name"] for tool in tools]:
                raise openai_field(
                    "tool_choice.function.name", "input should be the name of one of the tools"
                )
            return {"type": "function", "function": {"name": name}}
        case {"type": str(kind)} if kind != "function":
            raise not_here(kind)
        case {}:
            raise openai_field(
                "tool_choice", "an object here should be {'type': 'function', 'function': {'name': ...}}"
            )
    raise openai_field(
        "tool_choice", "input should be none, auto, required, any, or an object that names a function"
    )
