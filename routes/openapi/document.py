"""The OpenAPI document: made of the table of routes and of the schemas that parse their bodies.

What it allows is parsed. The server may take more than it allows, such as numbers as text on native routes.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from pydantic import BaseModel, TypeAdapter

from routes.http.errors import ErrorShape, Json, anthropic_shape, openai_shape
from routes.http.route import Route
from routes.http.schemas import REFUSED
from routes.openapi.operations import BYTES, EVENTS, FORM, JSON, LINES, OPERATIONS, Operation, operation
from routes.openapi.tags import TAGS, tag_of
from routes.translate.errors import deepl_shape, google_shape
from rwkv_batch import __version__

REF = "#/components/schemas/{model}"
DEFAULT = "x-default"  # in a JSON schema: what counts where a field lacks
# pydantic's names of bounds that stand behind a check of ours -> JSON Schema's
BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum"}
TEXT: Json = {"type": "string"}
KINDS = {str: "string", bool: "boolean", int: "integer", float: "number"}
FAMILIES: dict[ErrorShape, str] = {
    openai_shape: "OpenAIError",
    anthropic_shape: "AnthropicError",
    deepl_shape: "DeepLError",
    google_shape: "GoogleError",
}
ERRORS: Json = {
    "Error": {"type": "object", "properties": {"error": TEXT}},
    "DeepLError": {"type": "object", "required": ["message"], "properties": {"message": TEXT}},
    "GoogleError": {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["code", "message", "errors", "status"],
                "properties": {
                    "code": {"type": "integer"},
                    "message": TEXT,
                    "errors": {"type": "array", "items": {"type": "object"}},
                    "status": TEXT,
                },
            }
        },
    },
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
            "type": TEXT | {"const": "error"},
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
    "azure": {"type": "apiKey", "in": "header", "name": "api-key"},
    "url": {"type": "apiKey", "in": "query", "name": "password"},
}


def document(routes: Iterable[Route], guarded: bool, closed: Collection[str] = ()) -> Json:
    """`guarded`: whether there is a password; `closed`: paths that need it although they could be open."""
    paths: Json = {}
    schemas, replies = _schemas()
    for route in routes:
        path = re.sub(r":(\w+)", r"{\1}", route.path)
        error = FAMILIES.get(route.shape, "Error")
        for method in route.methods.split():
            each = operation(method, route.path)
            described = _described(path, method, each, error, replies)
            if guarded:
                is_open = each.open and path not in closed
                described["security"] = [{}] if is_open else [{name: []} for name in SECURITY]
            paths.setdefault(path, {})[method.lower()] = described
    return {
        "openapi": "3.1.0",
        "info": {"title": "RWKV-7 inference server", "version": __version__},
        "tags": [{"name": tag.name, "description": tag.description} for tag in TAGS],
        "paths": paths,
        "components": {
            "schemas": schemas | ERRORS,
            **({"securitySchemes": SECURITY} if guarded else {}),
        },
    }


def _described(path: str, method: str, each: Operation, error: str, replies: Json) -> Json:
    """The operation object of a method."""
    in_path: list[Json] = [
        {"name": name, "in": "path", "required": True, "schema": TEXT | {"minLength": 1}}
        for name in re.findall(r"{(\w+)}", path)
    ]
    content = {media: _reply(media, each, replies) for media in each.gives}
    described: Json = {
        "operationId": re.sub(r"\W+", "_", f"{method.lower()}{path}").strip("_"),
        "summary": each.summary,
        "tags": [tag_of(path)],
        "parameters": in_path + list(_query(each.query, also_in_body=method == "POST" and bool(each.body))),
        "responses": {
            str(each.status): {"description": "A reply"} | ({"content": content} if content else {}),
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


def _reply(media: str, each: Operation, replies: Json) -> Json:
    if media == JSON:
        return {"schema": replies[each.reply]}
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
    return {"required": not each.query, "content": {each.takes: {"schema": schema}}}


def _any_of(names: Sequence[str]) -> Json:
    refs: list[Json] = [{"$ref": REF.format(model=name)} for name in names]
    return refs[0] if len(refs) == 1 else {"anyOf": refs}


def _schemas() -> tuple[Json, dict[Any, Json]]:
    """Those of all bodies and replies, by their names, and what stands for each type of a reply."""
    everything = OPERATIONS.values()
    types = {kind: TypeAdapter(kind) for each in everything for kind in (*each.bodies, each.reply) if kind}
    types |= {each.chosen: TypeAdapter(each.chosen) for each in everything if each.chosen}
    places, found = TypeAdapter.json_schemas(
        [(kind, "validation", adapter) for kind, adapter in types.items()], ref_template=REF
    )
    schemas: Json = _standard(found)["$defs"]
    for each in everything:
        for body in each.bodies:
            own = schemas[body.__name__]
            if each.chosen:
                own["properties"] = schemas[each.chosen.__name__]["properties"] | own.get("properties", {})
            if each.takes == FORM:
                own["properties"]["file"] = TEXT | {"format": "binary"}
                own["required"] = [
                    *dict.fromkeys([*own.get("required", []), "file"])
                ]  # several routes may share it
    bodies = [body for each in everything for body in each.bodies]
    for each in everything:
        if each.chosen and each.chosen not in bodies:  # it is part of bodies only
            schemas.pop(each.chosen.__name__, None)
    return dict(sorted(schemas.items())), {place[0]: _standard(each) for place, each in places.items()}


def _standard(schema: Any) -> Any:
    """The schema as generators of clients read it.

    Bounds have the names of JSON Schema, values have a type, and there are no titles. What is refused stands
    beside the fields, as nobody needs to send it. So do defaults: generated clients would demand such fields,
    or send them, and some defaults are the server's choice.
    """
    if isinstance(schema, list):
        return [_standard(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    given: Json = schema
    kept: Json = {}
    for name, each in given.items():
        if name == "properties":
            kept[name] = {field: _standard(own) for field, own in each.items() if REFUSED not in own}
            refused = {field: own[REFUSED] for field, own in each.items() if REFUSED in own}
            if refused:
                kept[REFUSED] = dict(sorted(refused.items()))
                kept["propertyNames"] = {"not": {"type": "string", "enum": sorted(refused)}}
        elif name in ("patternProperties", "$defs"):
            kept[name] = {key: _standard(own) for key, own in each.items()}
        elif name == "default":
            if each not in (None, "") and not isinstance(each, dict):  # an object has those of its fields
                kept[DEFAULT] = each
        elif name != "title":
            kept[BOUNDS.get(name, name)] = each if name in ("enum", "const") else _standard(each)
    if "enum" in kept or "const" in kept:
        return _typed(kept)
    return kept


def _typed(schema: Json) -> Json:
    """The schema of certain values with their type: a member of a union for each type."""
    values = schema.pop("enum") if "enum" in schema else [schema.pop("const")]
    schema.pop("type", None)
    by_kind: dict[str, list[Any]] = {}
    for value in values:
        by_kind.setdefault("null" if value is None else KINDS[type(value)], []).append(value)
    members: list[Json] = []
    for kind, same in by_kind.items():
        if kind == "null" or (kind == "boolean" and len(same) == 2):
            members.append({"type": kind})
        else:
            members.append({"type": kind} | ({"const": same[0]} if len(same) == 1 else {"enum": same}))
    return schema | (members[0] if len(members) == 1 else {"anyOf": members})
