"""The OpenAPI document against what the server parses and answers, by requests that are generated from it."""

import base64
import contextlib
import copy
import hashlib
import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser

import jsonschema_rs
import pytest
import schemathesis
from frontend_process import PASSWORD
from openapi_calls import calls, cases, operations, plain, send

from routes.http.body import parse
from routes.http.errors import ApiError
from routes.openai.schemas import ChatBody
from routes.openapi.document import document
from routes.openapi.operations import JSON, OPERATIONS, operation
from routes.table import ROUTES

DOCUMENT = document(ROUTES, guarded=False)
CALLS = operations(DOCUMENT)
CHAT = next(call for call in CALLS if call.path == "/openai/v1/chat/completions")
# A number that no part of the server could work with.
TOO_LARGE = "too large"


def json_body(call) -> dict:
    """The schema of its body, empty if it has none."""
    content = DOCUMENT["paths"][call.path][call.method].get("requestBody", {}).get("content", {})
    return content.get(JSON, {}).get("schema", {})


def test_it_is_a_valid_document_of_all_routes(server):
    assert server.http.get("/openapi.json").json() == json.loads(json.dumps(DOCUMENT))
    schemathesis.openapi.from_dict(DOCUMENT).validate()
    described = {
        (method.upper(), re.sub(r"{(\w+)}", r":\1", path))
        for path, methods in DOCUMENT["paths"].items()
        for method in methods
    }
    assert described == {(method, route.path) for route in ROUTES for method in route.methods.split()}
    assert {path.rpartition(" ")[2] for path in OPERATIONS} == {route.path for route in ROUTES}
    identities = [each["operationId"] for methods in DOCUMENT["paths"].values() for each in methods.values()]
    assert len(set(identities)) == len(identities)


def test_its_schemas_say_nothing_that_json_schema_does_not_know():
    """pydantic leaves its own names of bounds where a check of ours stands in front."""
    text = json.dumps(DOCUMENT["components"])
    assert not re.search(r'"(ge|le|gt|lt|min_length|max_length|multiple_of)":', text)
    assert '"minimum":' in text and '"maximum":' in text


def contents(described: dict) -> dict:
    """What a reply holds that is no error, by its media type."""
    (reply,) = [reply for status, reply in described["responses"].items() if status != "default"]
    return reply.get("content", {})


def everything_in(schema: object) -> Iterator[dict]:
    """All schemas and objects inside, itself included."""
    if isinstance(schema, dict):
        yield schema
    for each in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from everything_in(each)


def test_generators_of_clients_can_read_it():
    """Values have one type, no field is demanded that may lack, replies have a type, routes a group."""
    for schema in everything_in(DOCUMENT):
        for name in ("enum", "const"):
            if name in schema and "properties" not in schema:
                assert isinstance(schema["type"], str), schema
    assert '"default":' not in json.dumps(DOCUMENT["components"]), "generators demand fields with a default"
    groups = [tag["name"] for tag in DOCUMENT["tags"]]
    used = []
    for path, methods in DOCUMENT["paths"].items():
        for each in methods.values():
            used += each["tags"]
            replies = contents(each)
            if path != "/openapi.json" and JSON in replies:
                schema = replies[JSON]["schema"]
                members = schema.get("anyOf", [schema.get("items", schema)])
                assert all("$ref" in member for member in members), path
    assert sorted(set(used)) == sorted(groups)


def test_what_it_says_is_refused_is_refused():
    """Such fields are not described, as nobody needs to send them."""
    seen = 0
    bodies = {body.__name__: body for each in OPERATIONS.values() for body in each.bodies}
    needed = {
        "FimBody": {"prompt": "x"},
        "MessagesBody": {"max_tokens": 1},
        "DeepLFields": {"text": "x", "target_lang": "de"},
    }
    for name, body in bodies.items():
        refused = DOCUMENT["components"]["schemas"][name].get("x-refused", {})
        for field in refused:
            assert field not in DOCUMENT["components"]["schemas"][name]["properties"]
            with pytest.raises(ApiError, match=re.escape(field)):
                body.from_json(needed.get(name, {}) | {field: 5})
            seen += 1
    assert seen > 100


@pytest.mark.parametrize("call", [*filter(json_body, CALLS)], ids=lambda call: call.label)
def test_what_it_allows_is_parsed(call):
    """By the class of the body, unless one thing has two values by two names, which no schema can exclude.

    That other things than its fields are missing is another matter.
    """
    allowed = jsonschema_rs.validator_for(json_body(call) | {"components": DOCUMENT["components"]})
    described = operation(call.method.upper(), re.sub(r"{(\w+)}", r":\1", call.path))
    parsed = 0
    for case in cases(call, 1, 8):
        body = plain(case.body) if isinstance(case.body, dict) else {}
        fields, problem = parse(json.dumps(body), 1 << 24)
        if problem or not allowed.is_valid(fields):
            assert not problem or TOO_LARGE in problem.message, problem
            continue
        refusals = []
        for model in described.bodies:
            try:
                model.from_json(fields)
                break
            except ApiError as error:
                if error.message.endswith("send one of them."):
                    break
                refusals.append(f"{model.__name__}: {error.message}")
        else:
            pytest.fail(f"{refusals} of {json.dumps(fields)[:1000]}")
        parsed += 1
    assert parsed


@pytest.mark.parametrize(
    ("field", "right", "wrong"),
    [
        ("guided_json", {"type": "object"}, 5),
        ("response_format", {"type": "json_object"}, {"type": "xml"}),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": {}}}, {"type": "json_schema"}),
        ("structured_outputs", {"choice": ["a"], "backend": None}, {"backend": "x"}),
    ],
)
def test_the_forms_of_answers_are_described(field, right, wrong):
    """Fields that are read by hand."""
    allowed = jsonschema_rs.validator_for(json_body(CHAT) | {"components": DOCUMENT["components"]})
    for value, good in ((right, True), (wrong, False)):
        body = {"messages": [{"role": "user", "content": "Hi"}], field: value}
        assert allowed.is_valid(body) is good
        with contextlib.nullcontext() if good else pytest.raises(ApiError, match=field):
            ChatBody.from_json(body)


def with_closed_replies() -> dict:
    """The document in which no reply has a field that it does not say."""
    closed = copy.deepcopy(DOCUMENT)
    schemas, left = closed["components"]["schemas"], []
    for methods in closed["paths"].values():
        left += [contents(each).get(JSON, {}) for each in methods.values()]
    done = set()
    while left:
        for schema in everything_in(left.pop()):
            name = schema.get("$ref", "").rpartition("/")[2]
            if name and name not in done and name not in OPEN:
                done.add(name)
                left.append(schemas[name])
                schemas[name] |= {"additionalProperties": False} if "properties" in schemas[name] else {}
    return closed


OPEN = {"InfillText"}  # response_fields chooses what it holds
CLOSED_CALLS = operations(with_closed_replies())


@pytest.mark.parametrize("call", CLOSED_CALLS, ids=lambda call: call.label)
def test_every_reply_is_as_it_says(server, call):
    for case in calls(call, 1, 3):
        send(case, f"http://127.0.0.1:{server.port}")


def test_a_password_guards_it_and_is_declared(locked):
    for path in ("/openapi.json", "/docs"):
        assert locked.http.get(path).status_code == 401
        assert locked.http.get(path, params={"password": PASSWORD}).status_code == 200
    declared = locked.http.get("/openapi.json", headers={"x-api-key": PASSWORD}).json()
    assert set(declared["components"]["securitySchemes"]) == {"bearer", "key", "azure", "url"}
    ways = [{"bearer": []}, {"key": []}, {"azure": []}, {"url": []}]
    assert declared["paths"]["/v1/models"]["get"]["security"] == ways
    assert declared["paths"]["/health"]["get"]["security"] == [{}]
    translation = "/translate/v1/batch-translate"
    assert declared["paths"][translation]["post"]["security"] == [{}]
    protected = document(ROUTES, True, [translation])["paths"][translation]["post"]
    assert protected["security"] == declared["paths"]["/v1/models"]["get"]["security"]


class HeldByPage(HTMLParser):
    """What a page holds."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.links: list[str] = []
        self.names: set[str] = set()
        self.attributes: set[str] = set()
        self.style = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            self.attributes.add(name)
            if name == "id":
                self.names.add(f"#{value}")
            if name in ("href", "src", "action"):
                self.links.append(value or "")

    def handle_data(self, data: str) -> None:
        if self.lasttag == "style":
            self.style += data


def test_the_page_shows_every_route_and_asks_nothing_of_other_hosts(server):
    reply = server.http.get("/docs")
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    page = HeldByPage(reply.text)
    assert not page.tags & {"script", "img", "iframe", "link", "form", "object"}
    assert not {name for name in page.attributes if name.startswith("on") or name == "style"}
    assert set(page.links) - {"openapi.json"} <= page.names, "every link stays on the page"
    for path in DOCUMENT["paths"]:
        assert path in reply.text
    policy = reply.headers["content-security-policy"]
    digest = base64.b64encode(hashlib.sha256(page.style.encode()).digest()).decode()
    assert policy.startswith("default-src 'none'") and f"style-src 'sha256-{digest}'" in policy
    assert "unsafe" not in policy and "*" not in policy
