"""The document as a page: plain HTML without scripts, which asks nothing of any other place."""

import base64
import hashlib
import json
from collections.abc import Iterator
from html import escape
from typing import Any

from routes.http.errors import Json
from routes.http.schemas import REFUSED
from routes.openapi.document import DEFAULT
from routes.openapi.operations import JSON

SHAPES = "Bodies and replies"

STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8881; --link: light-dark(#0757a8, #8ab8ff);
  --get: light-dark(#0a6b3a, #6fd39b); --post: light-dark(#0757a8, #8ab8ff);
  --delete: light-dark(#a12222, #ff9b9b); font: 16px/1.5 system-ui, sans-serif; }
body { max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
a { color: var(--link); }
nav ul { display: flex; flex-wrap: wrap; gap: .4rem 1.2rem; padding: .8rem 1rem; list-style: none;
  border: 1px solid var(--line); border-radius: .5rem; background: var(--soft); }
h2 { margin: 2.5rem 0 .2rem; scroll-margin-top: 1rem; }
section > p { margin: 0 0 .8rem; opacity: .8; }
summary { cursor: pointer; padding: .5rem .8rem; }
summary:hover { background: var(--soft); }
details { border: 1px solid var(--line); border-radius: .5rem; margin: .4rem 0; overflow: clip; }
details > :not(summary) { margin-left: 1rem; margin-right: 1rem; }
details[open] > summary { border-bottom: 1px solid var(--line); background: var(--soft); }
table { border-collapse: collapse; width: calc(100% - 2rem); margin: .6rem 0 1rem; }
th, td { text-align: left; vertical-align: top; padding: .3rem .8rem .3rem 0; }
tr > * { border-top: 1px solid var(--line); }
tr:first-child > * { border-top: 0; }
th[scope=row] { font-weight: 600; white-space: nowrap; }
code { font-size: .9em; overflow-wrap: anywhere; }
b { display: inline-block; min-width: 4rem; font: 700 .75rem/1.5 ui-monospace, monospace; }
.get { color: var(--get); } .post { color: var(--post); } .delete { color: var(--delete); }
@media (max-width: 40rem) { table, tbody, tr, td { display: block; } td { border-top: 0; }
  th[scope=col] { display: none; } }
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
    groups = {tag["name"]: tag["description"] for tag in document["tags"]}
    links = "".join(f'<li><a href="#{_anchor(name)}">{escape(name)}</a>' for name in [*groups, SHAPES])
    routes = "".join(_group(name, description, document["paths"]) for name, description in groups.items())
    schemas = "".join(_schema(name, each) for name, each in document["components"]["schemas"].items())
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style></head><body><h1>{title}</h1>"
        '<p>Programs read this as <a href="openapi.json">openapi.json</a>.</p>'
        f"<nav aria-label=Groups><ul>{links}</ul></nav><main>{routes}"
        f"<section><h2 id={_anchor(SHAPES)}>{SHAPES}</h2>"
        f"<p>What the routes take and give.</p>{schemas}</section></main></body></html>"
    )


def _anchor(name: str) -> str:
    return "group-" + name.lower().replace(" ", "-")


def _group(name: str, description: str, paths: Json) -> str:
    routes = "".join(
        _operation(method, path, each)
        for path, methods in paths.items()
        for method, each in methods.items()
        if name in each["tags"]
    )
    return (
        f"<section><h2 id={_anchor(name)}>{escape(name)}</h2><p>{escape(description)}</p>{routes}</section>"
    )


def _operation(method: str, path: str, operation: Json) -> str:
    head = f"<b class={method}>{method.upper()}</b><code>{escape(path)}</code> {escape(operation['summary'])}"
    parts = [f"<details><summary>{head}</summary>"]
    if parameters := operation["parameters"]:
        fields = [(each["name"], each["schema"], each["required"]) for each in parameters]
        parts.append("<p>In the URL:</p>" + _fields(fields))
    for media, content in operation.get("requestBody", {}).get("content", {}).items():
        parts.append(f"<p>Body, <code>{escape(media)}</code>: {_kind(content['schema'])}</p>")
    reply, error = operation["responses"].values()
    replies = reply.get("content", {}).items()
    given = ", ".join(
        f"<code>{escape(media)}</code>" + (f": {_kind(each['schema'])}" if media == JSON else "")
        for media, each in replies
    )
    errors = _kind(error["content"][JSON]["schema"])
    return "".join([*parts, f"<p>Reply, {given or 'without a body'}. Errors: {errors}.</p></details>"])


def _schema(name: str, schema: Json) -> str:
    required = schema.get("required", [])
    fields = [(field, each, field in required) for field, each in schema.get("properties", {}).items()]
    head = f"<code>{escape(name)}</code> {escape(schema.get('description', ''))}"
    table = _fields(fields) if fields else f"<p>{_kind(schema)}</p>"
    if refused := schema.get(REFUSED):
        rows = "".join(
            f"<tr><th scope=row><code>{escape(field)}</code><td>{escape(why)}"
            for field, why in refused.items()
        )
        table += f"<table><tr><th scope=col>Refused<th scope=col>Because{rows}</table>"
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
    return f"<code>{_json(schema[DEFAULT])}</code>" if DEFAULT in schema else ""


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
