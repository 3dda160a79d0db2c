"""The OpenAPI document: made of the table of routes and of the schemas that parse their bodies.

What it allows is parsed. The server may take more than it allows, such as numbers as text on native routes.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from routes.http.errors import ErrorShape, Json, anthropic_shape, openai_shape
from routes.http.route import Route
from routes.openapi.operations import BYTES, EVENTS, FORM, JSON, LINES, OPERATIONS, Operation, operation
from rwkv_batch import __version__

REF = "#/components/schemas/{model}"
# pydantic's names of bounds that stand behind a check of ours -> JSON Schema's
BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum"}
TEXT: Json = {"type": "string"}
FAMILIES: dict[ErrorShape, str] = {openai_shape: "OpenAIError", anthropic_shape: "AnthropicError"}
ERRORS: Json = {
    "Error": {"type": "object", "properties": {"error": TEXT}},
    "OpenAIError": {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type", "param", "code"],
                "properties": {
                    "message": TEXT,
                    "type": TEXT,
                    "param": {"type": ["string", "null"]},
                    "code": {"type": ["string", "null"]},
                },
            }
        },
    },
    "AnthropicError": {
        "type": "object",
        "required": ["type", "error"],
        "properties": {
            "type": {"const": "error"},
            "error": {
                "type": "object",
                "required": ["type", "message"],
                "properties": {"type": TEXT, "message": TEXT},
            },
        },
    },
}
SECURITY: Json = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    "url": {"type": "apiKey", "in": "query", "name": "password"},
}


def document(routes: Iterable[Route], guarded: bool, closed: Collection[str] = ()) -> Json:
    """`guarded`: whether there is a password; `closed`: paths that need it although they could be open."""
    paths: Json = {}
    for route in routes:
        path = re.sub(r":(\w+)", r"{\1}", route.path)
        error = FAMILIES.get(route.shape, "Error")
        for method in route.methods.split():
            each = operation(method, route.path)
            described = _described(path, method, each, error)
            if guarded:
                is_open = each.open and path not in closed
                described["security"] = [{}] if is_open else [{name: []} for name in SECURITY]
            paths.setdefault(path, {})[method.lower()] = described
    return {
        "openapi": "3.1.0",
        "info": {"title": "RWKV-7 inference server", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": _schemas() | ERRORS,
            **({"securitySchemes": SECURITY} if guarded else {}),
        },
    }


def _described(path: str, method: str, each: Operation, error: str) -> Json:
    """The operation object of a method."""
    in_path: list[Json] = [
        {"name": name, "in": "path", "required": True, "schema": TEXT | {"minLength": 1}}
        for name in re.findall(r"{(\w+)}", path)
    ]
    described: Json = {
        "operationId": re.sub(r"\W+", "_", f"{method.lower()}{path}").strip("_"),
        "summary": each.summary,
        "parameters": in_path + list(_query(each.query, also_in_body=method == "POST" and bool(each.body))),
        "responses": {
            "200": {"description": "A reply", "content": {media: _reply(media) for media in each.gives}},
            "default": {
                "description": "One sentence that names what is wrong",
                "content": {JSON: {"schema": _any_of(each.errors or (error,))}},
            },
        },
    }
    if body := _body(each, method):
        described["requestBody"] = body
    return described


def _query(models: Sequence[type[BaseModel]], also_in_body: bool) -> Iterator[Json]:
    """The URL parameters that are fields of these, none of which is required if the body may have them."""
    for model in models:
        schema = _standard(model.model_json_schema(ref_template=REF))
        for name, field in schema.get("properties", {}).items():
            required = name in schema.get("required", []) and not also_in_body
            yield {"name": name, "in": "query", "required": required, "schema": field}


def _reply(media: str) -> Json:
    if media == JSON:
        return {"schema": {"type": ["object", "array"]}}
    if media in (EVENTS, LINES):
        return {}  # a schema would be that of one event
    return {"schema": TEXT | ({"format": "binary"} if media == BYTES else {})}


def _body(each: Operation, method: str) -> Json | None:
    if method == "GET" or (method == "DELETE" and each.query):
        return None
    if each.takes == BYTES:
        return {"required": True, "content": {BYTES: {"schema": TEXT | {"format": "binary"}}}}
    models = each.bodies
    if not models:
        return None
    schema = _any_of([model.__name__ for model in models])
    if each.chosen:
        schema = {"allOf": [schema, {"$ref": REF.format(model=each.chosen.__name__)}]}
    if each.takes == FORM:
        file = {"type": "object", "properties": {"file": TEXT | {"format": "binary"}}, "required": ["file"]}
        schema = {"allOf": [schema, file]}
    return {"required": not each.query, "content": {each.takes: {"schema": schema}}}


def _any_of(names: Sequence[str]) -> Json:
    refs: list[Json] = [{"$ref": REF.format(model=name)} for name in names]
    return refs[0] if len(refs) == 1 else {"anyOf": refs}


def _schemas() -> Json:
    """Those of all bodies, by their names."""
    everything = {
        model: None
        for each in OPERATIONS.values()
        for model in [*each.bodies, *([each.chosen] if each.chosen else [])]
    }
    _, found = models_json_schema([(model, "validation") for model in everything], ref_template=REF)
    schemas: Json = _standard(found)["$defs"]
    return dict(sorted(schemas.items()))


def _standard(schema: Any) -> Any:
    """The schema with the names of bounds that JSON Schema has, and without titles."""
    if isinstance(schema, list):
        return [_standard(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {name: each for name, each in schema.items() if name != "title" or not isinstance(each, str)}
    return {
        BOUNDS.get(name, name): each if name in ("default", "enum", "const") else _standard(each)
        for name, each in kept.items()
    }
