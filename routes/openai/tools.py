"""The tool fields of a chat request: what is offered to the model, what it must do, and whether calls are
looked for.

A required or named call is not left to the model's good will: the answer is opened with the beginning of the
call. Only when thoughts come first, or an assistant message is continued, the prompt alone demands it.
"""

import json
from dataclasses import dataclass

from routes.chat.tools import OPEN
from routes.openai.schemas import ChatBody, bad

MAX_TOOLS = 128


@dataclass(frozen=True)
class ToolUse:
    """How a request uses tools."""

    offered: list[dict]  # rendered into the prompt
    choice: str | dict  # "none", "auto", "required" or a dict that names a function
    look_for_calls: bool

    def opening(self) -> str:
        """The beginning of the answer when a call must be made. It ends between two tokens of the call as
        models learn it.
        """
        if self.choice == "required":
            return f'{OPEN}{{"name": "'
        if isinstance(self.choice, dict):
            name = json.dumps(self.choice["function"]["name"], ensure_ascii=False)
            return f'{OPEN}{{"name": {name}, "arguments":'
        return ""


def tool_use(body: ChatBody) -> ToolUse:
    """Raises ApiError 400 that names what is wrong with `tools` or `tool_choice`.

    `rwkv_tool_compat_mode: false` drops the tools; `enable_tool_calls: true` looks for calls although no
    tools are offered.
    """
    tools = _checked(body.tools) if body.rwkv_tool_compat_mode else []
    choice = _choice(body.tool_choice, tools) if body.rwkv_tool_compat_mode else "auto"
    look = body.enable_tool_calls or bool(tools)
    return ToolUse(tools, choice, look and choice != "none")


def _checked(tools: object) -> list[dict]:
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise bad("tools", "tools must be a list")
    if len(tools) > MAX_TOOLS:
        raise bad("tools", f"input should hold at most {MAX_TOOLS} tools")
    for i, tool in enumerate(tools):
        at = f"tools[{i}]"
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise bad(f"{at}.type", "input should be 'function', the only type of tool here")
        function = tool.get("function")
        if not isinstance(function, dict):
            raise bad(f"{at}.function", "input should be an object")
        if not isinstance(function.get("name"), str) or not function["name"].strip():
            raise bad(f"{at}.function.name", "input should be a string that is not empty")
        if not isinstance(function.get("description"), str | None):
            raise bad(f"{at}.function.description", "input should be a string")
        if not isinstance(function.get("parameters"), dict | None):
            raise bad(f"{at}.function.parameters", "input should be a JSON schema object")
    return tools


def _choice(choice: object, tools: list[dict]) -> str | dict:
    if choice is None:
        return "auto"
    if isinstance(choice, dict):
        function = choice.get("function")
        if (
            choice.get("type") != "function"
            or not isinstance(function, dict)
            or not isinstance(function.get("name"), str)
        ):
            raise bad(
                "tool_choice", "an object here should be {'type': 'function', 'function': {'name': ...}}"
            )
        if function["name"] not in [tool["function"]["name"] for tool in tools]:
            raise bad("tool_choice.function.name", "input should be the name of one of the tools")
        return choice
    if choice not in ("none", "auto", "required"):
        raise bad("tool_choice", "input should be none, auto, required, or an object that names a function")
    if choice == "required" and not tools:
        raise bad("tool_choice", "required is only allowed when tools are given")
    return str(choice)
