"""What is made of a JSON schema: faults of the library, mended or refused by the keyword and its place."""

import json

import pytest
from schema_judge import grammar, takes

from rwkv_batch.text.grammars import GrammarError
from rwkv_batch.text.reasons import KNOWN, reason


def number(**bounds: object) -> dict:
    return {"type": "number", **bounds}


def pattern(text: str) -> dict:
    return {"type": "string", "pattern": text}


OPEN = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": True}
KEYS = {"type": "object", "patternProperties": {"^a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (number(exclusiveMinimum=0, maximum=0.5), ["0.1", "0.5"], ["0", "0.0", "-0"]),
        (number(exclusiveMinimum=3, maximum=3.5), ["3.1"], ["3", "3.0"]),
        (number(minimum=-0.5, exclusiveMaximum=0), ["-0.5", "-0.1"], ["0", "-0"]),
        ({"allOf": [number(exclusiveMinimum=0), number(maximum=0.25)]}, ["0.25"], ["0"]),
        (number(exclusiveMinimum=0, exclusiveMaximum=1), ["0.9", "0.01"], ["0", "1", "1.0"]),
        (number(minimum=5, exclusiveMinimum=True), ["6", "5.1"], ["5", "2"]),
        (number(exclusiveMaximum=True, maximum=0.5), ["0.4"], ["0.5", "0.6"]),
        (number(exclusiveMaximum=0.224), ["0.223", "0.1"], ["0.224"]),
        ({"type": "integer", "maximum": 1.7e308}, ["7", "-7"], []),
        ({"type": "integer", "minimum": -1e300}, ["7", "-7"], []),
        ({"minLength": 2.0, "type": "string"}, ['"ab"'], ['"a"']),
        ({"type": "string", "format": "date"}, ['"2024-02-29"'], ['"2023-02-29"', '"1900-02-29"']),
        (
            {"type": "string", "format": "date-time"},
            ['"2024-02-29T00:00:00Z"'],
            ['"2023-02-29T00:00:00Z"', '"2023-02-28T00:00:60Z"'],
        ),
        (pattern(r"^[\x00-\x1f]$"), [r'"\n"', r'"\u0001"'], [r'"\\"', r'"\""', '"a"']),
        (pattern(r'^[^"]*$'), ['"ab"', r'"\\"'], [r'"\""', r'"a\"b"']),
        (pattern(r"^[^\\]+$"), ['"ab"', r'"\""'], [r'"\\"']),
        (pattern(r"^[a&&b]+$"), ['"a&b"'], ['"c"']),
        (pattern(r"^[[:alpha:]]$"), ['"a]"', '"[]"'], ['"z"', '"a"']),
        (pattern(r"^\cJ[\b]$"), [r'"\n\b"'], ['"J"']),
        (pattern(r"^[^]$"), ['"a"', r'"\n"', r'"\""', r'"\\"'], ['""']),
        (pattern(r"^\d$"), ['"7"'], ['"٧"']),
        (pattern(r"^.$"), ['"a"'], [r'"\n"', r'"\r"', '"\u2028"']),
        (pattern(r"^\ud83d\ude00$"), ['"\U0001f600"'], ['"a"']),
        (OPEN, ['{"a":1,"b":"x"}'], [r'{"a":1,"\u0061":"x"}', r'{"\u0061":"x"}']),
        (KEYS, ['{"ab":1,"b":"x"}'], [r'{"\u0061b":"x"}', '{"ab":"x"}']),
        ({"type": "string", "format": "path"}, ['"/a b"'], ["1"]),
        ({"type": "string", "format": "password", "minLength": 2}, ['"ab"'], ['"a"']),
        ({"type": "string", "format": "binary", "pattern": "^a"}, ['"ab"'], ['"b"']),
        ({"type": "integer", "format": "int64"}, ["7"], ["7.5"]),
        ({"type": "array", "uniqueItems": False, "items": {"type": "null"}}, ["[null,null]"], ["[1]"]),
        (
            {"type": "object", "required": ["a", "b"], "minProperties": 2},
            ['{"a":1,"b":2}'],
            ['{"a":1,"a":2}'],
        ),
        ({"oneOf": [{"const": 1}, {"const": 2}]}, ["1", "2"], ["3"]),
        ({"oneOf": [{"type": "string"}, {"type": "integer"}]}, ["1", '"a"'], ["null"]),
        (
            {"components": {"d": number(exclusiveMinimum=0, maximum=0.5)}, "$ref": "#/components/d"},
            ["0.5"],
            ["0"],
        ),
    ],
)
def test_a_schema_means_what_json_schema_says(schema: dict, right: list[str], wrong: list[str]):
    matcher = grammar(schema)
    assert [text for text in right if not takes(matcher, text)] == []
    assert [text for text in wrong if takes(matcher, text)] == []


def test_members_of_a_union_that_name_their_kind_are_told_apart():
    """pydantic writes such unions with references."""

    def animal(kind: str, *more: str) -> dict:
        named = {"kind": {"const": kind}} | {name: {"type": "integer"} for name in more}
        return {"type": "object", "properties": named, "required": ["kind", *more]}

    schema = {
        "$defs": {"Cat": animal("cat", "lives"), "Dog": animal("dog")},
        "discriminator": {"mapping": {"cat": "#/$defs/Cat", "dog": "#/$defs/Dog"}, "propertyName": "kind"},
        "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
    }
    matcher = grammar(schema)
    assert takes(matcher, '{"kind":"cat","lives":9}') and takes(matcher, '{"kind":"dog"}')
    assert not takes(matcher, '{"kind":"cat"}')


def test_many_members_of_a_union_are_told_apart():
    kinds = [
        {"properties": {"n": {"enum": [i, -i]}}, "required": ["n"], "type": "object"} for i in range(1, 400)
    ]
    matcher = grammar({"$defs": {"all": {"oneOf": kinds}}, "items": {"$ref": "#/$defs/all"}})
    assert takes(matcher, '[{"n":-399},{"n":1}]') and not takes(matcher, '[{"n":0}]')


def nested(levels: int) -> dict:
    """Each names the next three times."""
    inner = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 3} for i in range(levels)}
    return {"$defs": inner | {f"d{levels}": {}}, "oneOf": [{"$ref": "#/$defs/d0"}, {"$ref": "#/$defs/d1"}]}


WIDE = {"anyOf": [{"properties": {f"a{i}": {}}} for i in range(400)]}


@pytest.mark.parametrize(
    ("schema", "sentence"),
    [
        (nested(11), "#/oneOf has schemas that may fit one value"),
        (
            {"$defs": {"d": WIDE}, "prefixItems": [{"$ref": "#/$defs/d", "properties": {}}] * 400},
            "# has too many schemas that refer to others; use fewer",
        ),
    ],
)
def test_a_schema_of_many_references_is_refused_and_not_followed_for_long(schema: dict, sentence: str):
    with pytest.raises(GrammarError, match=sentence):
        grammar(schema)


@pytest.mark.parametrize(
    ("schema", "sentence"),
    [
        ({"properties": {"a/b": {"not": {}}}}, "#/properties/a~1b/not cannot be enforced; leave it out"),
        ({"items": {"uniqueItems": True}}, "#/items/uniqueItems cannot be enforced"),
        ({"if": {}, "then": {}}, "#/if cannot be enforced"),
        ({"propertyNames": {"maxLength": 3}}, "#/propertyNames cannot be enforced"),
        (
            {"anyOf": [{"oneOf": [{"minimum": 1}, {"maximum": 2}]}]},
            "#/anyOf/0/oneOf has schemas that may fit one",
        ),
        (
            {"$defs": {"d": {"enum": [2**53 + 1]}}},
            r"#/\$defs/d/enum/0 is 9007199254740993, which has more digits",
        ),
        ({"const": {"a": [1, {"b": -(2**60)}]}}, "#/const/a/1/b is -1152921504606846976"),
        ({"enum": [["x", 1e300]]}, r"#/enum/0/1 is 1e\+300"),
        ({"const": 0.1 + 0.2}, "#/const is 0.30000000000000004"),
        ({"type": "number", "multipleOf": 0.07}, "#/multipleOf is 0.07, which cannot be enforced"),
        ({"allOf": [{"multipleOf": 65537}, {"multipleOf": 65539}]}, "# has multipleOf 65537 and 65539"),
        (
            {"multipleOf": 65537, "$ref": "#/$defs/a", "$defs": {"a": {"multipleOf": 65539}}},
            "multipleOf 65537 and",
        ),
        ({"type": "integer", "minimum": 1e19}, "#/minimum is beyond"),
        ({"type": "number", "exclusiveMaximum": -1e19}, "#/exclusiveMaximum is beyond"),
        ({"minimum": "1"}, "#/minimum is no number"),
        ({"type": "string", "pattern": "a(?=b)"}, "#/pattern looks ahead or behind"),
        ({"patternProperties": {r"(a)\1": {}}}, "patternProperties/.* refers back to a group"),
        ({"type": "string", "pattern": "("}, "#/pattern has a group without an end"),
        ({"type": "string", "pattern": r"\bword"}, r"#/pattern has \\b"),
        ({"type": "string", "pattern": r"a\0b"}, "asks for U\\+0000"),
        ({"type": "string", "pattern": "(?i)a"}, "a group of a kind that is not known"),
        ({"type": "string", "pattern": "a**"}, "repeats nothing"),
        ({"type": "any"}, "#/type is 'any'; types are null, boolean"),
        ({"minProperties": 2}, "#/minProperties cannot be enforced beyond 1; name the keys in required"),
        ({"minLength": -1}, "#/minLength is no whole number"),
        ({"enum": []}, "#/enum is no list of values"),
        ({"$ref": "#/$defs/none"}, "#/\\$ref names #/\\$defs/none, which the schema does not have"),
        ({"$ref": "https://example.com/a.json"}, "nothing is fetched"),
        ({"$schema": "https://example.com/dialect"}, "names a dialect"),
        ({"properties": {"a": 1}}, "#/properties/a is neither an object nor a boolean"),
        ({"anyOf": {}}, "#/anyOf is no list of schemas"),
        ({"oneOf": [{"type": "object", "required": [[]]}] * 2}, "#/oneOf/0/required is no list of names"),
        ({"oneOf": [{"type": [[]]}, {"type": "null"}]}, "#/oneOf/0/type is '\\[\\]'"),
        (
            {**OPEN, "minProperties": 1},
            "minProperties and maxProperties are enforced only where",
        ),
        (
            {"patternProperties": {"^a": {"type": "null"}, "b$": {}}},
            "a key may match .* of patternProperties",
        ),
        (
            {"type": "object", "properties": {"a": {"const": "\x01"}}, "additionalProperties": {}},
            "#/properties/a/const has a control character",
        ),
        (
            {"$defs": {"a": {"$ref": "#/$defs/b", "maximum": 2}, "b": {"$ref": "#/$defs/a", "minimum": 1}}}
            | {"$ref": "#/$defs/a"},
            "a \\$ref that leads to itself has other keywords beside it",
        ),
        (False, "nothing fits it"),
        ({"type": "string", "pattern": "a^b"}, "bounds of words, and \\^ and \\$ inside of a text"),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_its_place(schema: object, sentence: str):
    with pytest.raises(GrammarError, match=sentence) as refused:
        grammar(schema)
    text = str(refused.value)
    assert text.startswith("The JSON schema cannot be used: ") and text.endswith(".") and "\n" not in text


@pytest.mark.parametrize(
    "message",
    [
        "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf with anyOf",
        "lexer error: too many expressions constructed\n<non-verbose/>",
        "Too many items (limit 2000; mask); try avoiding single-byte/short lexemes",
        "initial lexer configuration (grammar) too big (limit for this grammar: 1000000)",
        "Current row has 2001 items; consider making your grammar left-recursive if it's right-recursive",
        "Unicode-aware Perl class not found (make sure the unicode-perl feature is enabled)",
        "no tokenizer - can't validate <special_token>",
        "Resource 'a' is not present in a registry and retrieving it failed: Default retriever fetches none",
    ],
)
def test_no_sentence_names_what_no_request_can_set(message: str):
    said = reason(message)
    own = ["coerce", "option", "limit", "fuel", "feature", "retriev", "lexe", "tokenizer", "recursive"]
    assert said and not [word for word in own if word in said.lower()]


def test_every_sentence_about_a_known_message_can_be_written():
    assert all("{" not in words.format(what="x") for words in KNOWN.values())
    assert json.dumps(reason("")) == '""'
