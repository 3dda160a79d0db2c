"""The input of a response: its items, checked and in listed form, and the messages that they stand for."""

import re

from routes.chat.calls import read_arguments
from routes.chat.messages import call_arguments, text_part
from routes.http.errors import Json, openai_field
from routes.http.open_lists import named, unknown_type
from routes.responses.tools import full_name
from rwkv_batch.chat.templates import Message

RESPONSE_PREFIX = "resp_"
MADE = re.compile(r"(?:msg|rs|fc)_([0-9a-f]{32})i?[0-9]+")  # what item_id makes
ROLES = ("user", "assistant", "system", "developer")
TYPES = ("message", "function_call", "function_call_output", "reasoning", "item_reference")


def parse_items(given: object, response_id: str) -> list[Json]:
    """The items of a response as they are listed, with ids; those of unknown types are left out.

    Raises ApiError 400 that names the item and the field.
    """
    if isinstance(given, str):
        given = [{"role": "user", "content": given}] if given else []
    if not isinstance(given, list):
        raise openai_field("input", "input should be a string or a list of items")
    read = [(i, item) for i, item in enumerate(given) if not unknown_type(item, *TYPES)]
    return [_item(item, f"input[{i}]", item_id("", response_id, f"i{i}")) for i, item in read]


def ignored_items(given: object) -> list[str]:
    """The places and types of those that are left out."""
    kinds = enumerate(unknown_type(item, *TYPES) for item in (given if isinstance(given, list) else []))
    return [named(f"input[{i}]", kind) for i, kind in kinds if kind]


def item_id(prefix: str, response_id: str, number: str) -> str:
    """The id of an item, by which the response is found that it belongs to."""
    return prefix + response_id.removeprefix(RESPONSE_PREFIX) + number


def response_of(identity: str) -> str:
    """The id of the response that an item belongs to; empty if the server has not made that id."""
    found = MADE.fullmatch(identity)
    return RESPONSE_PREFIX + found[1] if found else ""


def is_reference(item: object) -> bool:
    """Whether an item stands for another by its `id`. It may have no type."""
    if not isinstance(item, dict):
        return False
    kind = item.get("type")
    return kind == "item_reference" or (not kind and "id" in item and not item.keys() & {"role", "content"})


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
            name = full_name(item["name"], item.get("namespace", ""))
            calls.append((name, read_arguments(item["arguments"])))
    return found


def _item(item: object, at: str, own: str) -> Json:
    """`own`: the end of its id, unless it has one."""
    if not isinstance(item, dict):
        raise openai_field(at, "input should be an object")
    match item.get("type") or "message":
        case "message":
            if item.get("role") not in ROLES:
                raise openai_field(f"{at}.role", f"input should be one of {', '.join(ROLES)}")
            return _message(
                item["role"], _texts(item.get("content"), f"{at}.content"), _id(item, "msg_", own)
            )
        case "function_call":
            space = {"namespace": _string(item, "namespace", at)} if item.get("namespace") else {}
            return {
                "id": _id(item, "fc_", own),
                "type": "function_call",
                "call_id": _string(item, "call_id", at),
                "name": _string(item, "name", at),
                "arguments": _arguments(item.get("arguments"), f"{at}.arguments"),
                "status": "completed",
                **space,
            }
        case "function_call_output":
            return {
                "id": _id(item, "fc_", own),
                "type": "function_call_output",
                "call_id": _string(item, "call_id", at),
                "output": "".join(_texts(item.get("output"), f"{at}.output")),
                "status": "completed",
            }
        case "reasoning":
            return {"id": _id(item, "rs_", own), "type": "reasoning", "summary": []}
    raise openai_field(f"{at}.type", f"input should be one of {', '.join(TYPES)}")


def _message(role: str, texts: list[str], identity: str) -> Json:
    form: Json = {"type": "output_text", "annotations": []} if role == "assistant" else {"type": "input_text"}
    content = [{**form, "text": text} for text in texts]
    return {
        "id": identity,
        "type": "message",
        "role": role,
        "status": "completed",
        "content": content,
    }


def _id(item: Json, prefix: str, own: str) -> str:
    given = item.get("id")
    return given if isinstance(given, str) and given else prefix + own


def _string(item: Json, field: str, at: str) -> str:
    value = item.get(field)
    if not isinstance(value, str) or not value:
        raise openai_field(f"{at}.{field}", "input should be a string that is not empty")
    return value


def _arguments(given: object, at: str) -> str:
    """Arguments as JSON text, which stays as it came where it holds no object."""
    line = call_arguments(given, at)
    return given if isinstance(given, str) and not line.startswith("{") else line


def _texts(content: object, at: str) -> list[str]:
    if isinstance(content, str):
        return [content]
    if isinstance(content, list):
        return [text_part(part, f"{at}[{i}]") for i, part in enumerate(content)]
    raise openai_field(at, "input should be a string or a list of text parts")
