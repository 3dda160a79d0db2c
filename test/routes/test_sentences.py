"""What clients are told of wrong fields: words of JSON, not those of Python or of pydantic."""

import json
import re

import pytest

from routes.http.body import parse
from routes.http.errors import ApiError
from routes.openapi.operations import OPERATIONS

ALL = {body for each in OPERATIONS.values() for body in each.bodies if body.model_fields}
BODIES = sorted(ALL, key=lambda body: body.__name__)
DEEP: list = []
for _ in range(50):
    DEEP = [DEEP]
WRONG: list = [
    None,
    True,
    False,
    0,
    -1,
    1.5,
    1e308,
    10**29,
    -(2**63),
    "",
    " ",
    "x",
    "1e400",
    "NaN",
    "9" * 40,
    "\0",
    "[1",
    "9" * 5000,
    "\ufeff{}",
    {},
    [],
    [1],
    ["x"],
    [None],
    [[]],
    [{}],
    {"x": 1},
    {"type": "x"},
    [{"type": "x"}],
    [{"role": "x"}],
    [{"role": "user", "content": 1}],
    [{"role": "user", "content": [{}]}],
    DEEP,
    [{"role": "assistant", "tool_calls": [{}]}],
    [{"role": "assistant", "tool_calls": [{"function": 1}]}],
    [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": [1]}}]}],
    [{"type": "function", "function": {"name": 1}}],
    [{"name": "f", "input_schema": 1}],
]
# One of each that routes need, so that the field in question is the first that is wrong.
RIGHT = {
    "messages": [{"role": "user", "content": "a"}], "contents": ["a"], "prefix": ["a"], "suffix": ["b"],
    "text_list": ["a"], "target_lang": "fr", "state_filenames": ["a"], "state_gatingweight": [1],
    "tokens": [1], "max_tokens": 1, "dialogue_idx": 0,
} | dict.fromkeys(
    ("prompt", "model", "input", "session_id", "state_id", "lora_name", "lora_path", "adapter_id", "path",
     "text", "model_filename", "state_filename", "state_viewname", "request_id", "content"), "a"
)  # fmt: skip
# Words of pydantic, of Python and of its parsers, which name nothing that a client sends.
FOREIGN = re.compile(
    r"instance of|dictionary|utf-8-sig|Error\b|pydantic|unable to (parse|interpret)|after validation"
    r"|pattern|extract fields|extra inputs|\b(True|False|None|dict|str|int|bool|nan|inf)\b|\[str"
)


def told(body: type, fields: dict) -> str:
    """The message for these fields; empty if they are taken."""
    try:
        body.from_json(fields)
    except ApiError as error:
        assert error.status == 400
        return error.message
    return ""


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_a_wrong_field_is_told_in_words_of_json(body):
    names = {field.alias or name for name, field in body.model_fields.items()}
    right = {name: value for name, value in RIGHT.items() if name in names}
    seen = {told(body, {})}
    for name in sorted(names):
        seen |= {told(body, right | {name: value}) for value in WRONG}
    if "options" in names:
        options = body.model_fields["options"].annotation.model_fields
        seen |= {told(body, right | {"options": {name: value}}) for name in options for value in WRONG}
    for message in filter(None, seen):
        said = re.sub(r'"[^"]*"|\'[^\']*\'', "", message)  # what the client has sent, and literals
        assert not FOREIGN.search(said), message
        assert "\n" not in message and len(message) < 6000
    assert any(seen)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("options", True, "must be an object"),
        ("stream", "perhaps", "must be true or false"),
        ("messages", 5, "must be a list"),
        ("messages", [5], "must be an object"),
        ("top_logprobs", "many", "must be a whole number"),
        ("top_logprobs", "9" * 5000, "is too large"),
    ],
)
def test_kinds_of_values_by_their_names_in_json(name, value, words):
    body = next(body for body in BODIES if body.__name__ == "OllamaChatBody")
    assert words in told(body, {name: value})


def test_a_byte_order_mark_in_front_of_a_body_is_passed_over():
    body = json.dumps({"contents": ["\ufeffa"]}, ensure_ascii=False)
    for marks in (1, 2):
        read = parse(b"\xef\xbb\xbf" * marks + body.encode(), 1000)
        assert read == ({"contents": ["\ufeffa"]}, None)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"\xef\xbb\xbf", "Invalid JSON: Expecting value at line 1"),
        ("{}".encode("utf-16"), "not UTF-8"),
        (b'{"a": "\n"}', "Invalid control character at line 1, column 8."),
        (b'{"a": "\\q"}', "Invalid JSON"),
        (b'{"a": 1e999}', "The number 1e999 of a is too large."),
        (b'{"a": ' + b"[" * 90000, "nested too deeply"),
    ],
)
def test_a_body_that_is_no_json_is_told_in_words_of_json(body, words):
    _, error = parse(body, 1 << 20)
    assert error is not None and words in error.message
    assert not FOREIGN.search(error.message)
    assert " at at " not in error.message
