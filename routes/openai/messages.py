"""OpenAI chat messages, checked and reduced to the turns that the prompt template renders."""

from routes.chat.templates import Turn
from routes.chat.tools import canonical_json
from routes.openai.schemas import bad

ROLES = ("system", "developer", "user", "assistant", "tool")
TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
}  # part type -> its field


def turns(messages: list) -> list[Turn]:
    """One turn per message. Raises ApiError 400 that names the message and the field."""
    return [_turn(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _turn(message: object, at: str) -> Turn:
    if not isinstance(message, dict):
        raise bad(at, "input should be an object with role and content")
    role = message.get("role")
    if role not in ROLES:
        raise bad(f"{at}.role", f"input should be one of {', '.join(ROLES)}")
    if role != "assistant":
        if "content" not in message:
            raise bad(f"{at}.content", "this field is required")
        if not isinstance(message.get("tool_call_id", ""), str | None):
            raise bad(f"{at}.tool_call_id", "input should be a string")
        return Turn(role, _text(message["content"], f"{at}.content"))
    if message.get("function_call"):
        raise bad(f"{at}.function_call", "this is deprecated; use tool_calls")
    if message.get("audio"):
        raise bad(f"{at}.audio", "this server reads text only")
    text = _text(message.get("content"), f"{at}.content") or _text(message.get("refusal"), f"{at}.refusal")
    return Turn(role, text, _calls(message.get("tool_calls") or [], f"{at}.tool_calls"))


def _text(content: object, at: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(_part(part, f"{at}[{i}]") for i, part in enumerate(content))
    raise bad(at, "input should be a string, a list of text parts, or null")


def _part(part: object, at: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise bad(at, "input should be an object with a type")
    field = TEXT_PARTS.get(part["type"])
    if field is None:
        raise bad(
            f"{at}.type", f"this server reads text only; it cannot take a part of type {part['type'][:40]!r}"
        )
    if not isinstance(part.get(field), str):
        raise bad(f"{at}.{field}", "input should be a string")
    return part[field]


def _calls(calls: object, at: str) -> list[tuple[str, str]]:
    if not isinstance(calls, list):
        raise bad(at, "input should be a list")
    return [_call(call, f"{at}[{i}]") for i, call in enumerate(calls)]


def _call(call: object, at: str) -> tuple[str, str]:
    if not isinstance(call, dict) or call.get("type", "function") != "function":
        raise bad(at, "input should be a call of type function")
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise bad(f"{at}.function.name", "input should be a string that is not empty")
    arguments = function.get("arguments")
    try:
        return function["name"], canonical_json("{}" if arguments in (None, "") else arguments)
    except ValueError:
        raise bad(f"{at}.function.arguments", "input should be an object as JSON text") from None
