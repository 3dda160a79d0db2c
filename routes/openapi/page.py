"""The document as a page: plain HTML without scripts, which asks nothing of any other place."""

import base64
import hashlib
import json
from collections.abc import Iterator
from html import escape
from typing import Any

from routes.http.errors import Json

STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
summary { cursor: pointer; padding: .3rem 0; }
details { border-bottom: 1px solid #8884; }
table { border-collapse: collapse; width: 100%; margin: .5rem 0 1rem; }
th, td { text-align: left; vertical-align: top; padding: .2rem .8rem .2rem 0; border-top: 1px solid #8884; }
code { font-size: .9em; overflow-wrap: anywhere; }
"""
_digest = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
POLICY = (
    f"default-src 'none'; style-src 'sha256-{_digest}'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def render(document: Json) -> str:
    """The HTML page of an OpenAPI document."""
    info = document["info"]
    title = escape(f"{info['title']} {info['version']}")
    routes = "".join(
        _operation(method, path, each)
        for path, methods in document["paths"].items()
        for method, each in methods.items()
    )
    schemas = "".join(_schema(name, each) for name, each in document["components"]["schemas"].items())
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style></head><body><h1>{title}</h1>"
        '<p>Programs read this as <a href="openapi.json">openapi.json</a>.</p>'
        f"<main><h2>Routes</h2>{routes}<h2>Bodies</h2>{schemas}</main></body></html>"
    )


def _operation(method: str, path: str, operation: Json) -> str:
    head = f"<code>{method.upper()} {escape(path)}</code> {escape(operation['summary'])}"
    parts = [f"<details><summary>{head}</summary>"]
    if parameters := operation["parameters"]:
        fields = [(each["name"], each["schema"], each["required"]) for each in parameters]
        parts.append("<p>In the URL:</p>" + _fields(fields))
    for media, content in operation.get("requestBody", {}).get("content", {}).items():
        parts.append(f"<p>Body, <code>{escape(media)}</code>: {_kind(content['schema'])}</p>")
    replies = ", ".join(f"<code>{escape(media)}</code>" for media in operation["responses"]["200"]["content"])
    error = operation["responses"]["default"]["content"]["application/json"]["schema"]
    return "".join([*parts, f"<p>Reply: {replies}. Errors: {_kind(error)}.</p></details>"])


def _schema(name: str, schema: Json) -> str:
    required = schema.get("required", [])
    fields = [(field, each, field in required) for field, each in schema.get("properties", {}).items()]
    head = f"<code>{escape(name)}</code> {escape(schema.get('description', ''))}"
    table = _fields(fields) if fields else f"<p>{_kind(schema)}</p>"
    return f'<details id="{escape(name)}"><summary>{head}</summary>{table}</details>'


def _fields(fields: list[tuple[str, Json, bool]]) -> str:
    rows = "".join(
        f"<tr><th scope=row><code>{escape(name)}</code><td>{_kind(schema)}<td>{_default(schema, required)}"
        for name, schema, required in fields
    )
    return f"<table><tr><th scope=col>Field<th scope=col>Takes<th scope=col>Without it{rows}</table>"


def _default(schema: Json, required: bool) -> str:
    if required:
        return "an error"
    return f"<code>{_json(schema['default'])}</code>" if "default" in schema else ""


def _kind(schema: Json) -> str:
    """What a schema allows, in words."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}"><code>{name}</code></a>'
    for word, between in (("anyOf", " or "), ("oneOf", " or "), ("allOf", " with ")):
        if word in schema:
            return between.join(_kind(each) for each in schema[word])
    if "enum" in schema or "const" in schema:
        values = schema.get("enum") or [schema["const"]]
        return " or ".join(f"<code>{_json(value)}</code>" for value in values)
    kinds = schema.get("type", "anything")
    kind = " or ".join(kinds) if isinstance(kinds, list) else str(kinds)
    if kind == "array":
        kind = f"list of {_kind(schema.get('items', {}))}"
    return ", ".join([kind if kind.startswith("list") else escape(kind), *_limits(schema)])


def _limits(schema: Json) -> Iterator[str]:
    for words, least, most in (
        ("from {} to {}", "minimum", "maximum"),
        ("{} to {} characters", "minLength", "maxLength"),
        ("{} to {} of them", "minItems", "maxItems"),
    ):
        if least in schema or most in schema:
            yield escape(words.format(schema.get(least, "any"), schema.get(most, "any")))
    if "exclusiveMinimum" in schema:
        yield escape(f"above {schema['exclusiveMinimum']}")


def _json(value: Any) -> str:
    return escape(json.dumps(value, ensure_ascii=False))
