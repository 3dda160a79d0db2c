"""OpenAI chat messages, checked and reduced to the messages that the prompt template renders."""

from routes.chat.calls import read_arguments
from routes.http.errors import TEXT_ONLY, openai_field
from routes.http.open_lists import named, unknown_type
from rwkv_batch.chat.templates import Message

ROLES = ("system", "developer", "user", "assistant", "tool")
# type of a content part -> its field
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


def parse_messages(messages: list[object]) -> list[Message]:
    """Raises ApiError 400 that names the message and the field."""
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def ignored_calls(messages: list[object]) -> list[str]:
    """The places and types of calls that are left out, as no tools of their types are here."""
    return [
        named(f"messages[{i}].tool_calls[{k}]", kind)
        for i, message in enumerate(messages)
        for k, call in enumerate(_given_calls(message))
        if (kind := unknown_type(call, "function"))
    ]


def _given_calls(message: object) -> list[object]:
    calls = message.get("tool_calls") if isinstance(message, dict) else None
    return calls if isinstance(calls, list) else []


def text_part(part: object, at: str) -> str:
    """The text of the content part `at`. Raises ApiError 400 that names the field."""
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        raise openai_field(at, "input should be an object with a type")
    field = TEXT_PARTS.get(kind)
    if field is None:
        raise openai_field(f"{at}.type", f"{TEXT_ONLY}; it cannot take a part of type {kind[:40]!r}")
    text = part.get(field)
    if not isinstance(text, str):
        raise openai_field(f"{at}.{field}", "input should be a string")
    return text


def call_arguments(arguments: object, at: str) -> str:
    """The arguments of a call as one line of JSON. Raises ApiError 400 that names the field `at`."""
    try:
        if isinstance(arguments, str | dict | None):
            return read_arguments(arguments or "")
    except ValueError:
        pass
    raise openai_field(at, "input should be an object, as JSON text")


def _message(message: object, at: str) -> Message:
    if not isinstance(message, dict):
        raise openai_field(at, "input should be an object with role and content")
    role = message.get("role")
    if role not in ROLES:
        raise openai_field(f"{at}.role", f"input should be one of {', '.join(ROLES)}")
    if role != "assistant":
        if "content" not in message:
            raise openai_field(f"{at}.content", "this field is required")
        if not isinstance(message.get("tool_call_id", ""), str | None):
            raise openai_field(f"{at}.tool_call_id", "input should be a string")
        return Message(role, _text(message["content"], f"{at}.content"))
    if message.get("function_call"):
        raise openai_field(f"{at}.function_call", "this is deprecated; use tool_calls")
    if message.get("audio"):
        raise openai_field(f"{at}.audio", TEXT_ONLY)
    text = _text(message.get("content"), f"{at}.content") or _text(message.get("refusal"), f"{at}.refusal")
    return Message(role, text, _calls(message.get("tool_calls") or [], f"{at}.tool_calls"))


def _text(content: object, at: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = enumerate(content)
        return "".join(p if isinstance(p, str) else text_part(p, f"{at}[{i}]") for i, p in parts)
    raise openai_field(at, "input should be a string, a list of text parts, or null")


def _calls(calls: object, at: str) -> list[tuple[str, str]]:
    if not isinstance(calls, list):
        raise openai_field(at, "input should be a list")
    known = ((i, call) for i, call in enumerate(calls) if not unknown_type(call, "function"))
    return [_call(call, f"{at}[{i}]") for i, call in known]


def _call(call: object, at: str) -> tuple[str, str]:
    if not isinstance(call, dict) or call.get("type", "function") != "function":
        raise openai_field(at, "input should be a call of type function")
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise openai_field(f"{at}.function.name", "input should be a string that is not empty")
    return function["name"], call_arguments(function.get("arguments"), f"{at}.function.arguments")
