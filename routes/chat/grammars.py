"""The fields by which requests bind the answer to a grammar, and what comes in front of an answer."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec.structs import replace
from pydantic import BeforeValidator, Field, WithJsonSchema

from routes.http.body import parse
from routes.http.errors import ApiError, Json, openai_field
from routes.http.schemas import RequestBody, asks_for_nothing
from rwkv_batch.chat.templates import END_OF_THOUGHT, Style
from rwkv_batch.wire.protocol import AnswerHead, Grammar

ANY_OBJECT: Json = {"type": "object"}
MAX_CHOICES = 1024
FORMATS = ("text", "json_object", "json_schema")
# fields of vLLM's `structured_outputs` -> what each is called by itself
GUIDED = "guided_"
STRUCTURED = {name: GUIDED + name for name in ("json", "regex", "choice", "grammar", "json_object")}


def _structured(value: object) -> object:
    if not isinstance(value, dict):
        raise ValueError(f"input should be an object with one of {', '.join(STRUCTURED)}")
    for name, given in value.items():
        if name not in STRUCTURED and not asks_for_nothing(given):
            known = ", ".join(STRUCTURED)
            raise ValueError(f"{str(name)[:40]!r} is not available here; input may hold {known}")
    return {STRUCTURED[name]: given for name, given in value.items() if name in STRUCTURED}


def _schema(value: object) -> object:
    """An object, or its JSON text."""
    if isinstance(value, str) and value.lstrip()[:1] == "{":
        value, error = parse(value, len(value.encode(errors="replace")))
        if error:
            raise ValueError(f"input should be a JSON schema: {error.message.rstrip('.')}")
    try:
        schema = json.loads(value) if isinstance(value, str) else value
        json.dumps(schema, ensure_ascii=False, allow_nan=False).encode()  # as it is sent to the engine
    except (ValueError, RecursionError):
        schema = None
    if not isinstance(schema, dict | bool):
        raise ValueError("input should be a JSON schema: an object, or its JSON text")
    return schema


def _format(value: object) -> object:
    """Its type and schema, which stands in `json_schema` or beside it; None: there is none."""
    if not isinstance(value, dict) or value.get("type") not in FORMATS:
        raise ValueError(f"input should be an object whose type is one of {', '.join(FORMATS)}")
    form = value.get("json_schema")
    if not isinstance(form, dict | None):
        raise ValueError("json_schema should be an object whose field schema is a JSON schema")
    schemas = [each["schema"] for each in (value, form or {}) if each.get("schema") is not None]
    if not all(isinstance(schema, dict) for schema in schemas) or (
        value["type"] == "json_schema" and not schemas
    ):
        raise ValueError("json_schema should be an object whose field schema is a JSON schema")
    if schemas and value["type"] == "text":
        raise ValueError("a schema is given, so type should be json_schema")
    if schemas[1:] and schemas[0] != schemas[1]:
        raise ValueError("json_schema.schema differs from schema; send one of them")
    return {"type": value["type"], "schema": schemas[0] if schemas else None}


JsonSchema = Annotated[Any, BeforeValidator(_schema, json_schema_input_type=Json | bool)]
Choices = Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES)]


TEXT_SHAPE: Json = {"type": "string"}
# How the two fields that are read by hand are documented.
FORMAT_SHAPE: Json = {
    "anyOf": [
        {
            "type": "object",
            "properties": {"type": {"enum": ["text", "json_object"]}, "schema": {"type": ["object", "null"]}},
            "required": ["type"],
        },
        {
            "type": "object",
            "properties": {
                "type": {"const": "json_schema"},
                "json_schema": {
                    "type": "object",
                    "properties": {"schema": {"type": "object"}},
                    "required": ["schema"],
                },
            },
            "required": ["type", "json_schema"],
        },
    ]
}
STRUCTURED_SHAPE: Json = {
    "type": "object",
    "properties": {
        "json": {"type": ["object", "boolean"]},
        "regex": TEXT_SHAPE,
        "choice": {"type": "array", "items": TEXT_SHAPE, "minItems": 1, "maxItems": MAX_CHOICES},
        "grammar": TEXT_SHAPE,
        "json_object": {"type": "boolean"},
    },
    "additionalProperties": {"enum": [None, False]},
}


def _structured_field(place: str, why: str) -> ApiError:
    """The error of a field, under the name by which the client has sent it."""
    return openai_field(f"structured_outputs.{place.removeprefix(GUIDED)}", why)


class GuidedFields(RequestBody):
    """The fields of vLLM: each alone says what the answer must be."""

    field_error = staticmethod(_structured_field)  # of those by themselves, the route has its own

    guided_json: JsonSchema | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None

    def given(self) -> dict[str, Grammar]:
        """By field."""
        found: dict[str, Grammar] = {}
        if self.guided_json is not None:
            found["guided_json"] = of_schema(self.guided_json)
        if self.guided_regex is not None:
            found["guided_regex"] = Grammar("regex", self.guided_regex)
        if self.guided_choice is not None:
            found["guided_choice"] = Grammar("choice", json.dumps(self.guided_choice))
        if self.guided_grammar is not None:
            found["guided_grammar"] = Grammar("grammar", self.guided_grammar)
        if self.guided_json_object:
            found["guided_json_object"] = of_schema(ANY_OBJECT)
        return found


class GrammarFields(GuidedFields):
    """All of them; `response_format` is OpenAI's, `structured_outputs` holds vLLM's by their newer names."""

    response_format: Annotated[Json, BeforeValidator(_format), WithJsonSchema(FORMAT_SHAPE)] | None = None
    structured_outputs: (
        Annotated[Json, BeforeValidator(_structured), WithJsonSchema(STRUCTURED_SHAPE)] | None
    ) = None

    def given(self) -> dict[str, Grammar]:
        """By field. A route with a field of its own adds it."""
        found = super().given()
        if self.structured_outputs:
            inside = GuidedFields.from_json(self.structured_outputs).given()
            found |= {f"structured_outputs.{f.removeprefix(GUIDED)}": each for f, each in inside.items()}
        form = self.response_format or {"type": "text", "schema": None}
        if grammar := of_format(form["type"], form["schema"]):
            found["response_format"] = grammar
        return found

    def grammar(self) -> Grammar | None:
        """What the request says of its answer. Raises ApiError 400 if two fields say different things.

        Where one says that it is an object and another which one, the latter holds.
        """
        found = [replace(grammar, field=field) for field, grammar in self.given().items()]
        if len(found) > 1 and any(map(_is_of_objects, found)):
            found = [each for each in found if each.source != json.dumps(ANY_OBJECT)]
        for other in found[1:]:
            if not _are_same(found[0], other):
                why = f"{found[0].field} says what the answer is too, and differs; send one of them"
                raise self.field_error(other.field, why)
        return found[0] if found else None


def _is_of_objects(grammar: Grammar) -> bool:
    """Whether it says that the answer is an object, and more of that."""
    schema = json.loads(grammar.source) if grammar.kind == "json_schema" else None
    return isinstance(schema, dict) and schema.get("type") == "object" and schema != ANY_OBJECT


def _are_same(one: Grammar, other: Grammar) -> bool:
    """Some clients send a grammar in two fields, by the names of two servers."""
    if one.kind == other.kind == "json_schema":
        first, second = (json.dumps(json.loads(each.source), sort_keys=True) for each in (one, other))
        return first == second
    return (one.kind, one.source) == (other.kind, other.source)


def of_format(kind: str, schema: Json | None) -> Grammar | None:
    """Of a format in OpenAI's form. A JSON object may have a schema too, as clients of llama.cpp send it."""
    if kind == "text":
        return None
    return of_schema(ANY_OBJECT if schema is None else schema)


def of_schema(schema: Json | bool) -> Grammar:
    """A text that is JSON by this schema."""
    return Grammar("json_schema", json.dumps(schema, ensure_ascii=False))


def of_calls(
    first: Sequence[Sequence[str | Json]],
    more: Sequence[Sequence[str | Json]] = (),
    until: str = "",
    answer: Grammar | None = None,
) -> Grammar:
    """Calls of tools. Each is a list of texts, and of what `arguments_by` makes between them.

    One of `first` comes, then any number of `more`, each on a new line. With `until` any text comes, in which
    one of `first` follows each time that this has been written. `answer`: what may come in place of calls.
    """
    kind: Literal["calls", "tagged_calls"] = "tagged_calls" if until else "calls"
    parts: Json = {"first": first, "more": more, "until": until}
    if answer:
        parts["answer"] = {"kind": answer.kind, "source": answer.source, "field": answer.field}
    source = json.dumps(parts, ensure_ascii=False)
    return Grammar(kind, source, field=answer.field if answer else "tools")


def arguments_by(schema: Json, field: str, strict: bool) -> Json:
    """JSON by a schema, as a part of a call. `field`: of the request, where the schema stands.

    strict: a schema that cannot be enforced is refused; otherwise the nearest one that can binds.
    """
    return {"field": field, "schema": schema, "leniency": int(not strict)}


def leaves_text_free(grammar: Grammar) -> bool:
    """Whether any text may stand around what the grammar binds; then it does not say where that ends."""
    return grammar.kind == "tagged_calls"


def answer_head(style: Style | None) -> AnswerHead:
    """What an answer begins with before the part that a grammar binds; `style`: of a chat."""
    if style is None or style.thought is None:
        return AnswerHead()
    return AnswerHead(
        rest=">" if style.left_open else "",
        closes=END_OF_THOUGHT if style.thinks else "",
        space=style.thought == "",
    )
