"""Objects take the keys that their schema names, those of all schemas that hold for them, and no others."""

import json

import pytest
from schema_judge import BYTES, grammar, takes

from rwkv_batch.text.grammars import BoundText, GrammarCompiler, GrammarError
from rwkv_batch.text.json_schema.closing import closed

A = {"type": "object", "properties": {"a": {"type": "integer"}}}
B = {"type": "object", "properties": {"b": {"type": "string"}}, "required": ["b"]}
DEFS = {"A": A, "B": B}


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (A, ["{}", '{"a":1}'], ['{"a":1,"c":2}', '{"c":2}']),
        ({"type": "object", "properties": {}}, ["{}"], ['{"a":1}']),
        ({"type": "object"}, ["{}", '{"a":1}'], []),
        (A | {"additionalProperties": True}, ['{"a":1,"c":2}'], ['{"a":"x"}']),
        (A | {"additionalProperties": {"type": "null"}}, ['{"a":1,"c":null}'], ['{"a":1,"c":2}']),
        (A | {"unevaluatedProperties": True}, ['{"a":1,"c":2}'], []),
        (A | {"required": ["c"]}, ['{"a":1,"c":[]}', '{"c":1}'], ['{"a":1}', '{"c":1,"d":2}']),
        (A | {"patternProperties": {"^x": {}}}, ['{"a":1,"x1":2}'], ['{"a":1,"c":2}']),
        ({"type": "array", "items": A}, ['[{"a":1}]'], ['[{"c":1}]']),
        ({"type": "object", "additionalProperties": A}, ['{"k":{"a":1}}'], ['{"k":{"c":1}}']),
        ({"anyOf": [A, B]}, ['{"a":1}', '{"b":"x"}'], ['{"a":1,"b":"x"}', '{"c":1}']),
        ({"anyOf": [A, {"type": "null"}]}, ['{"a":1}', "null"], ['{"c":1}']),
        (
            {"allOf": [A, B]},
            ['{"a":1,"b":"x"}', '{"b":"x"}'],
            ['{"a":1}', '{"b":"x","c":1}', '{"a":"x","b":"x"}'],
        ),
        ({"allOf": [A]}, ['{"a":1}'], ['{"c":1}']),
        ({"allOf": [A, {"description": "b"}]}, ['{"a":1}'], ['{"c":1}']),
        (A | {"allOf": [B]}, ['{"a":1,"b":"x"}'], ['{"a":1,"b":"x","c":1}', '{"a":1}']),
        (
            A | {"anyOf": [{"required": ["a"]}, {"required": ["c"]}]},
            ['{"a":1}', '{"c":2}'],
            ["{}", '{"d":1}'],
        ),
        ({"allOf": [A | {"additionalProperties": True}, B]}, ['{"a":1,"b":"x","c":1}'], ['{"c":1}']),
        ({"$defs": DEFS, "$ref": "#/$defs/A"}, ['{"a":1}'], ['{"c":1}']),
        ({"$defs": DEFS, "$ref": "#/$defs/A", "description": "x"}, ['{"a":1}'], ['{"c":1}']),
        (
            {"$defs": DEFS, "allOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}]},
            ['{"a":1,"b":"x"}'],
            ['{"a":1}', '{"a":1,"b":"x","c":1}'],
        ),
        (
            {
                "$defs": DEFS,
                "type": "object",
                "properties": {"x": {"$ref": "#/$defs/A"}, "y": B | {"$ref": "#/$defs/A"}},
            },
            ['{"x":{"a":1},"y":{"a":1,"b":"x"}}', '{"x":{"a":1},"y":{"b":"x","a":1}}'],
            ['{"x":{"a":1,"b":"x"}}', '{"y":{"b":"x","c":1}}'],
        ),
        (
            {"type": "object", "properties": {"v": {"type": "null"}, "next": {"$ref": "#"}}},
            ['{"v":null,"next":{"v":null}}'],
            ['{"v":null,"next":{"w":1}}'],
        ),
        (
            {
                "$defs": {"T": A | {"allOf": [{"properties": {"t": {"$ref": "#/$defs/T"}}}]}},
                "$ref": "#/$defs/T",
            },
            ['{"a":1,"t":{"a":2,"t":{}}}'],
            ['{"a":1,"t":{"c":2}}'],
        ),
        ({"components": {"A": A}, "$ref": "#/components/A"}, ['{"a":1}'], ['{"c":1}']),
        (
            {
                "$schema": "http://json-schema.org/draft-07/schema#",
                "definitions": DEFS,
                "allOf": [{"$ref": "#/definitions/A"}, {"$ref": "#/definitions/B"}],
            },
            ['{"a":1,"b":"x"}'],
            ['{"a":1}', '{"b":"x","c":1}'],
        ),
        (
            {"properties": {"a\n": {"type": "null"}}, "patternProperties": {"^a": True}, "type": "object"},
            [r'{"a\n":null,"ab":1}'],
            [r'{"a\n":1}', r'{"a\u000a":1}', r'{"a\n":null,"a\u000A":1}'],
        ),
        ({"const": {"properties": 1}}, ['{"properties":1}'], ["{}"]),
    ],
)
def test_an_object_takes_the_keys_that_are_named(schema: dict, right: list[str], wrong: list[str]):
    matcher = grammar(schema)
    orders = [text for text in right if takes(matcher, text)]
    assert orders, right
    assert len(orders) == len(right) or '"y"' in right[0]  # keys come in one order
    assert [text for text in wrong if takes(matcher, text)] == []


@pytest.mark.parametrize(
    "schema", [True, 5, {"properties": 5}, {"allOf": 5}, {"$ref": 5}, {"required": [5]}, {"$ref": "#"}]
)
def test_what_is_no_schema_stays_as_it_is(schema: object):
    assert closed(schema) == schema or closed(schema) == {"properties": 5, "additionalProperties": False}


def call(schema: dict, leniency: int) -> BoundText:
    part = {"field": "tools[0].function.parameters", "schema": schema, "leniency": leniency}
    return BoundText("calls", json.dumps({"first": [["<", part, ">"]], "more": [], "until": ""}))


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (A | {"not": {"required": ["a"]}}, ['{"a":1}'], ['{"a":"x"}', '{"c":1}']),
        (
            A | {"properties": {"a": {"type": "array", "uniqueItems": True, "items": {"type": "null"}}}},
            ['{"a":[null]}'],
            ['{"a":[1]}'],
        ),
        (
            A | {"properties": {"a": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}},
            ['{"a":1}'],
            ['{"a":"x"}'],
        ),
        (
            A | {"properties": {"a": {"type": "string", "pattern": "a(?=b)", "maxLength": 2}}},
            ['{"a":"xy"}'],
            ['{"a":"xyz"}'],
        ),
        (
            A | {"properties": {"a": {"type": "integer", "multipleOf": 0.07, "maximum": 3}}},
            ['{"a":2}'],
            ['{"a":4}'],
        ),
        (A | {"properties": {"a": {"enum": [1, 2**60]}}}, ['{"a":1}'], ['{"c":1}']),
        (
            A
            | {
                "properties": {
                    "a": {"allOf": [{"multipleOf": 65537}, {"multipleOf": 65539, "type": "integer"}]}
                }
            },
            ['{"a":7}'],
            ['{"a":"x"}'],
        ),
        (A | {"patternProperties": {"^a": {}, "a$": {}}}, ['{"a":1}'], ['{"c":1}']),
        (A | {"properties": {"a": {"$ref": "#/$defs/none"}}}, ['{"a":"x"}'], ['{"c":1}']),
    ],
)
def test_a_call_is_bound_to_the_nearest_schema_that_can_be(schema: dict, right: list[str], wrong: list[str]):
    compiler = GrammarCompiler(BYTES)
    matcher = compiler.matcher(call(schema, 1))
    assert [text for text in right if not takes(matcher, f"<{text}>")] == []
    assert [text for text in wrong if takes(matcher, f"<{text}>")] == []
    with pytest.raises(GrammarError):
        compiler.matcher(call(schema, 0))


def test_a_schema_that_can_be_met_is_met_whether_strict_or_not():
    for leniency in (0, 1):
        matcher = GrammarCompiler(BYTES).matcher(call(B, leniency))
        assert takes(matcher, '<{"b":"x"}>') and not takes(matcher, "<{}>")
