"""The base of request bodies in every family of routes: validation, limits, and the ids of sessions."""

import re
import unicodedata
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, ValidationError, WithJsonSchema
from pydantic_core import ErrorDetails

from routes.http.errors import TEXT_ONLY, Json, native_field

LAST_ID = 65535  # the largest token id that the model can draw
MAX_PROMPTS = 4096  # of one request, counted n times each
MAX_SESSION_ID = 256  # characters
INT_LIMIT = 2**31 - 1
REFUSED = "x-refused"  # in a JSON schema: the fields that cannot be honoured, and why
MEDIA = ("image", "document")  # types of parts of a message that are no text
RESPONSE = "response"  # the Responses API stores its states as "response:{id}"; no other route writes there

# By pydantic's types of errors: https://docs.pydantic.dev/latest/errors/validation_errors/
OBJECT, LIST, WHOLE, FLAG = (
    f"input should be {kind}" for kind in ("an object", "a list", "a whole number", "true or false")
)
REASONS = {
    "missing": "this field is required",
    "extra_forbidden": "there is no such field here; leave it out",
    **dict.fromkeys(("model_type", "model_attributes_type", "dict_type", "dataclass_type"), OBJECT),
    **dict.fromkeys(("list_type", "tuple_type", "set_type"), LIST),
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), WHOLE),
    **dict.fromkeys(("float_type", "float_parsing"), "input should be a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), FLAG),
    "int_parsing_size": "input is too large",
    "string_type": "input should be a string",
    "string_unicode": "input is not valid Unicode",
    "none_required": "input should be null",
    "recursion_loop": "input is nested too deeply",
}
AS_JSON = {"True": "true", "False": "false", "None": "null"}
PYTHON = re.compile(r"(?<!')\b(True|False|None)\b(?!')")

Prompts = list[str | list[int]]  # texts or token ids


def asks_for_nothing(value: object) -> bool:
    """Whether it is a value by which clients leave a field out. 0 is none of them, though it equals False."""
    return value is None or value is False or (isinstance(value, str | list | dict) and not value)


class RequestBody(BaseModel):
    """The base of all bodies. A family's own base sets the form of the errors for its fields."""

    field_error = staticmethod(native_field)

    @classmethod
    def from_json(cls, fields: Json) -> Self:
        """The checked body. Raises ApiError 400 that names the first field that is wrong."""
        try:
            return cls.model_validate(fields)
        except ValidationError as invalid:
            first = invalid.errors(include_url=False)[0]
        place, why = _place(fields, first["loc"]), _reason(first)
        match first["type"]:
            case "union_tag_not_found":
                place, why = f"{place}.{_name(first)}", "this field is required"
            case "union_tag_invalid":
                expected = first["ctx"]["expected_tags"].replace(", ", " or ")
                why = TEXT_ONLY if first["ctx"]["tag"] in MEDIA else f"input should be {expected}"
                place = f"{place}.{_name(first)}"
        raise cls.field_error(place, why[0].lower() + why[1:])


def _reason(error: ErrorDetails) -> str:
    """What is wrong with a field, in words of JSON: pydantic has those of Python and the names of classes."""
    kind, found = error["type"], error["msg"].removeprefix("Value error, ")
    if kind == "literal_error":
        return TEXT_ONLY if error["input"] in MEDIA else PYTHON.sub(lambda word: AS_JSON[word[0]], found)
    if kind in ("too_short", "too_long"):
        return found.replace(" after validation", "")
    return REASONS.get(kind, found)


def _name(error: ErrorDetails) -> str:
    """The field by which a member of a union is chosen."""
    return str(error["ctx"]["discriminator"]).strip("'")


def _place(fields: Json, parts: tuple[int | str, ...]) -> str:
    """Where in a body an error is, as a client would write it.

    pydantic also names the member of a union that it has chosen by `type` or `role`, which is no part of it.
    """
    value: object = fields
    place = ""
    for number, part in enumerate(parts, 1):
        own = value if isinstance(value, dict) else {}
        chosen = part in (own.get("type"), own.get("role"))
        if chosen and not isinstance(own.get(part), dict) and number < len(parts):
            continue
        place += f"[{part}]" if isinstance(part, int) else f".{part}"
        value = value[part] if isinstance(value, list) and isinstance(part, int) else own.get(part)
    return place.removeprefix(".")


def neutral(why: str, *values: float) -> BeforeValidator:
    """For a number that cannot be honoured. Each of `values` asks for nothing."""

    def check(given: object) -> object:
        if given is not None and (isinstance(given, bool) or given not in values):
            raise ValueError(why)
        return given

    return BeforeValidator(check, json_schema_input_type=_undescribed(why))


def refused(why: str) -> BeforeValidator:
    """For a field that cannot be honoured. What asks for nothing is taken for null."""

    def check(value: object) -> None:
        if not asks_for_nothing(value):
            raise ValueError(why)

    return BeforeValidator(check, json_schema_input_type=_undescribed(why))


def _undescribed(why: str) -> Any:
    """For a field that clients need not know: the document says only that it is refused, and why."""
    return Annotated[Any, WithJsonSchema({REFUSED: why})]


def not_bool(why: str) -> BeforeValidator:
    """Refuses true and false where a number belongs; pydantic would take them for 1 and 0."""

    def check(value: object) -> object:
        if isinstance(value, bool):
            raise ValueError(why)
        return value

    return BeforeValidator(check)


_number = not_bool("input should be a number, not a boolean")
Int = Annotated[int, _number]
Number = Annotated[float, _number, Field(allow_inf_nan=False)]


def _without_control_characters(text: str) -> str:
    """Ids of sessions go into replies and file names."""
    if any(unicodedata.category(c) == "Cc" for c in text):
        raise ValueError("must hold no control characters")
    return text


def _not_of_a_response(text: str) -> str:
    if text.startswith(f"{RESPONSE}:"):
        raise ValueError(f"must not begin with {RESPONSE}:, which is where /v1/responses keeps its states")
    return text


PLAIN = r"[^\u0000-\u001f\u007f-\u009f]*$"
# What annotates ids of any stored state, and those under which clients store.
PLAIN_ID = (AfterValidator(_without_control_characters), Field(json_schema_extra={"pattern": f"^{PLAIN}"}))
OWN_ID = (
    AfterValidator(_without_control_characters),
    AfterValidator(_not_of_a_response),
    Field(json_schema_extra={"pattern": f"^(?!{RESPONSE}:){PLAIN}"}),
)
