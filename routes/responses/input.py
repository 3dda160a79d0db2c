"""The input of a response: its items, checked and as they are listed later, and the turns that the prompt
template renders.
"""

from uuid import uuid4

from routes.chat.templates import Turn
from routes.chat.tools import canonical_json
from routes.openai.schemas import bad

ROLES = ("user", "assistant", "system", "developer")
TEXT_PARTS = {
    "input_text": "text",
    "output_text": "text",
    "text": "text",
    "refusal": "refusal",
}  # part type -> its field
ITEMS = "message, function_call, function_call_output or reasoning"


def read(given: object) -> list[dict]:
    """The items in the form in which they are listed, each with an id. Raises ApiError 400 that names the
    item and the field.
    """
    if isinstance(given, str):
        return [_message("user", [given], {})] if given else []
    if not isinstance(given, list):
        raise bad("input", "input should be a string or a list of items")
    return [_item(item, f"input[{i}]") for i, item in enumerate(given)]


def turns(items: list[dict]) -> list[Turn]:
    """What the model reads of them: a call belongs to the words in front of it; thoughts of the past are not
    read.
    """
    found: list[Turn] = []
    for item in items:
        if item["type"] == "message":
            found.append(Turn(item["role"], "".join(part["text"] for part in item["content"])))
        elif item["type"] == "function_call_output":
            found.append(Turn("tool", item["output"]))
        elif item["type"] == "function_call":
            spoken = found.pop() if found and found[-1].role == "assistant" else Turn("assistant", "")
            found.append(
                Turn("assistant", spoken.text, [*spoken.tool_calls, (item["name"], item["arguments"])])
            )
    return found


def _item(item: object, at: str) -> dict:
    if not isinstance(item, dict):
        raise bad(at, "input should be an object")
    match item.get("type") or "message":
        case "message":
            if item.get("role") not in ROLES:
                raise bad(f"{at}.role", f"input should be one of {', '.join(ROLES)}")
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
            raise bad(f"{at}.type", f"{str(other)[:40]!r} cannot be read here; input should be {ITEMS}")


def _message(role: str, texts: list[str], item: dict) -> dict:
    form: dict = {"type": "output_text", "annotations": []} if role == "assistant" else {"type": "input_text"}
    content = [{**form, "text": text} for text in texts]
    return {
        "id": _id(item, "msg_"),
        "type": "message",
        "role": role,
        "status": "completed",
        "content": content,
    }


def _id(item: dict, prefix: str) -> str:
    given = item.get("id")
    return given if isinstance(given, str) and given else prefix + uuid4().hex


def _string(item: dict, field: str, at: str) -> str:
    value = item.get(field)
    if not isinstance(value, str) or not value:
        raise bad(f"{at}.{field}", "input should be a string that is not empty")
    return value


def _texts(content: object, at: str) -> list[str]:
    if isinstance(content, str):
        return [content]
    if isinstance(content, list):
        return [_part(part, f"{at}[{i}]") for i, part in enumerate(content)]
    raise bad(at, "input should be a string or a list of text parts")


def _part(part: object, at: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        raise bad(at, "input should be an object with a type")
    field = TEXT_PARTS.get(kind)
    if field is None:
        raise bad(f"{at}.type", f"this server reads text only; it cannot take a part of type {kind[:40]!r}")
    if not isinstance(part.get(field), str):
        raise bad(f"{at}.{field}", "input should be a string")
    return part[field]


def _arguments(arguments: object, at: str) -> str:
    try:
        return canonical_json("{}" if arguments in (None, "") else arguments)
    except ValueError:
        raise bad(at, "input should be an object as JSON text") from None
