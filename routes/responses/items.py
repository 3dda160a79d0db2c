"""The input of a response: its items, checked and in listed form, and the messages that they stand for."""

from uuid import uuid4

from routes.chat.calls import read_arguments
from routes.chat.messages import call_arguments, text_part
from routes.http.errors import Json, openai_field
from rwkv_batch.chat.templates import Message

ROLES = ("user", "assistant", "system", "developer")


def parse_items(given: object) -> list[Json]:
    """The items as they are listed, with ids. Raises ApiError 400 that names the item and the field."""
    if isinstance(given, str):
        return [_message("user", [given], {})] if given else []
    if not isinstance(given, list):
        raise openai_field("input", "input should be a string or a list of items")
    return [_item(item, f"input[{i}]") for i, item in enumerate(given)]


def to_messages(items: list[Json]) -> list[Message]:
    """What the model reads: a call joins the assistant's message before it; thoughts are left out."""
    found: list[Message] = []
    calls: list[tuple[str, str]] = []  # those of the last message
    for item in items:
        if item["type"] == "message":
            calls = []
            found.append(Message(item["role"], "".join(part["text"] for part in item["content"]), calls))
        elif item["type"] == "function_call_output":
            found.append(Message("tool", item["output"]))
        elif item["type"] == "function_call":
            if not (found and found[-1].role == "assistant"):
                calls = []
                found.append(Message("assistant", "", calls))
            calls.append((item["name"], read_arguments(item["arguments"])))
    return found


def _item(item: object, at: str) -> Json:
    if not isinstance(item, dict):
        raise openai_field(at, "input should be an object")
    match item.get("type") or "message":
        case "message":
            if item.get("role") not in ROLES:
                raise openai_field(f"{at}.role", f"input should be one of {', '.join(ROLES)}")
            return _message(item["role"], _texts(item.get("content"), f"{at}.content"), item)
        case "function_call":
            return {
                "id": _id(item, "fc_"),
                "type": "function_call",
                "call_id": _string(item, "call_id", at),
                "name": _string(item, "name", at),
                "arguments": _arguments(item.get("arguments"), f"{at}.arguments"),
                "status": "completed",
            }
        case "function_call_output":
            return {
                "id": _id(item, "fc_"),
                "type": "function_call_output",
                "call_id": _string(item, "call_id", at),
                "output": "".join(_texts(item.get("output"), f"{at}.output")),
                "status": "completed",
            }
        case "reasoning":
            return {"id": _id(item, "rs_"), "type": "reasoning", "summary": []}
        case other:
            raise openai_field(
                f"{at}.type",
                f"{str(other)[:40]!r} cannot be read here; input should be message, function_call, "
                "function_call_output or reasoning",
            )


def _message(role: str, texts: list[str], item: Json) -> Json:
    form: Json = {"type": "output_text", "annotations": []} if role == "assistant" else {"type": "input_text"}
    content = [{**form, "text": text} for text in texts]
    return {
        "id": _id(item, "msg_"),
        "type": "message",
        "role": role,
        "status": "completed",
        "content": content,
    }


def _id(item: Json, prefix: str) -> str:
    given = item.get("id")
    return given if isinstance(given, str) and given else prefix + uuid4().hex


def _string(item: Json, field: str, at: str) -> str:
    value = item.get(field)
    if not isinstance(value, str) or not value:
        raise openai_field(f"{at}.{field}", "input should be a string that is not empty")
    return value


def _arguments(given: object, at: str) -> str:
    """As JSON text, which is listed as it came where it holds no object."""
    line = call_arguments(given, at)
    return given if isinstance(given, str) and not line.startswith("{") else line


def _texts(content: object, at: str) -> list[str]:
    if isinstance(content, str):
        return [content]
    if isinstance(content, list):
        return [text_part(part, f"{at}[{i}]") for i, part in enumerate(content)]
    raise openai_field(at, "input should be a string or a list of text parts")
