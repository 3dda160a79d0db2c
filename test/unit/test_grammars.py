"""What grammars let a text be: token by token, against the text that it must be."""

import json

import numpy as np
import pytest

from rwkv_batch.text.grammars import BoundText, GrammarCompiler, GrammarError, MaskThreads
from rwkv_batch.text.tokenizer import END_OF_TEXT, Tokenizer

VOCAB = 65536
PERSON = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Paris"]}}, "required": ["city"]}
ARGUMENTS = {"field": "tools[0].function.parameters", "schema": CITY}
CALL = ['"get", "arguments":', ARGUMENTS, "}</tool_call>"]
CALLS = json.dumps({"first": [CALL], "more": [["<tool_call>", ARGUMENTS, ">"]], "until": ""})
TAGGED = json.dumps({"first": [CALL], "more": [], "until": "<tool_call>{"})
EITHER = json.dumps(
    {
        "first": [["<tool_call>{", *CALL]],
        "more": [["<tool_call>{", *CALL]],
        "until": "",
        "answer": {"kind": "json_schema", "source": PERSON, "field": "response_format"},
    }
)
ROME = '"get", "arguments": {"city": "Rome"}}</tool_call>'
BERLIN = ROME.replace("Rome", "Berlin")
THOUGHT = BoundText("json_schema", PERSON, ">", "</think>")
TOO_FINE = {"type": "integer", "multipleOf": 7919, "maximum": 10**29}
HOSTILE = "start: A\nA: /(.*a.{12})/ & /(.*b.{13})/ & /(.*c.{14})/"


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(VOCAB)


def allowed(compiler: GrammarCompiler, bound: BoundText, text: str) -> set[int] | None:
    """What may be drawn behind the text; None if the text itself may not be written."""
    matcher = compiler.matcher(bound)
    for token in Tokenizer().encode(text):
        if not _may(matcher, token):
            return None
        matcher.consume_token(token)
    return _ids(matcher)


def _ids(matcher) -> set[int]:
    bits, errors = MaskThreads(1, VOCAB // 32).masks([matcher])
    assert errors == [""]
    return set(np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist())


def _may(matcher, token: int) -> bool:
    return token in _ids(matcher)


@pytest.mark.parametrize(
    ("bound", "text"),
    [
        (BoundText("json_schema", PERSON), '{"name": "Anna", "age": 7}'),
        (BoundText("json_schema", PERSON), '{\n  "name": "安娜 \\n",\n  "age": -12\n}'),
        (BoundText("json_schema", PERSON, space=True), ' {"name": "", "age": 0}'),
        (BoundText("json_schema", PERSON, rest=">"), '>\n{"name": "", "age": 0}'),
        (THOUGHT, '> a\n\nb < {"x"</think>\n\n{"name": "", "age": 0}'),
        (BoundText("json_schema", '{"type": "object"}'), '{"a": [1, {"b": null}]}'),
        (BoundText("regex", r"a/b|\d{2}\/c"), "a/b"),
        (BoundText("regex", r"a/b|\d{2}\/c"), "42/c"),
        (BoundText("choice", '["yes", "\\"no\\"\\n"]'), '"no"\n'),
        (BoundText("grammar", 'root ::= "a" ("," "a")*'), "a,a,a"),
        (BoundText("grammar", "start: x+\nx: /[a-c]/ | %json {}"), "abc"),
        (BoundText("calls", CALLS), ROME),
        (BoundText("calls", CALLS), ROME + '\n<tool_call>{"city": "Paris"}>'),
        (BoundText("tagged_calls", TAGGED), "No tool < helps.\n"),
        (BoundText("tagged_calls", TAGGED), "So: <tool_call>{" + ROME),
        (BoundText("calls", EITHER), '{"name": "", "age": 0}'),
        (BoundText("calls", EITHER), "<tool_call>{" + ROME),
        (BoundText("calls", EITHER), "<tool_call>{" + ROME + "\n<tool_call>{" + ROME),
        (BoundText("calls", EITHER, ">", "</think>"), "> a {</think>\n<tool_call>{" + ROME),
        (BoundText("calls", EITHER, space=True), ' {"name": "", "age": 0}'),
    ],
)
def test_a_text_by_the_grammar_may_be_written_and_may_end(compiler, bound: BoundText, text: str):
    end = allowed(compiler, bound, text)
    assert end is not None and END_OF_TEXT in end


@pytest.mark.parametrize(
    ("bound", "text"),
    [
        (BoundText("json_schema", PERSON), '{"age": 7}'),
        (BoundText("json_schema", PERSON), '{"name": "Anna", "age": 7.5}'),
        (BoundText("json_schema", PERSON), ' {"name": "Anna", "age": 7}'),
        (BoundText("json_schema", PERSON), '{\n\n"name": "Anna", "age": 7}'),
        (THOUGHT, '{"name": "", "age": 0}'),
        (BoundText("json_schema", '{"type": "object"}'), "[1]"),
        (BoundText("regex", "[a-z]+"), "ab1"),
        (BoundText("choice", '["yes", "no"]'), "yesno"),
        (BoundText("calls", CALLS), BERLIN),
        (BoundText("tagged_calls", TAGGED), "So: <tool_call>{" + BERLIN),
        (BoundText("calls", EITHER), '{"name": "", "age": 0.5}'),
        (BoundText("calls", EITHER), "<tool_call>{" + BERLIN),
        (BoundText("calls", EITHER), 'So: {"name": "", "age": 0}'),
        (BoundText("calls", EITHER), '{"name": "", "age": 0}\n<tool_call>{' + ROME),
    ],
)
def test_another_text_may_not(compiler, bound: BoundText, text: str):
    assert allowed(compiler, bound, text) is None


def test_nothing_but_the_end_follows_a_complete_text(compiler):
    assert allowed(compiler, BoundText("json_schema", PERSON), '{"name": "", "age": 0}') == {END_OF_TEXT}


def test_a_text_does_not_end_early(compiler):
    assert END_OF_TEXT not in (
        allowed(compiler, BoundText("choice", '["yes", "yesterday"]'), "yester") or {0}
    )


def test_matchers_of_one_grammar_are_independent(compiler):
    one, two = (compiler.matcher(BoundText("choice", '["yes", "no"]')) for _ in range(2))
    one.consume_token(Tokenizer().encode("yes")[0])
    assert _ids(one) == {END_OF_TEXT} and Tokenizer().encode("no")[0] in _ids(two)


def test_a_token_may_begin_with_the_end_of_a_character(compiler):
    """A character of several bytes that no token has alone can still be written."""
    matcher = compiler.matcher(BoundText("regex", "\U0001f9ec"))
    for byte in "\U0001f9ec".encode():
        assert byte + 1 in _ids(matcher) or len(_ids(matcher)) == 1
        matcher.consume_token(byte + 1 if byte + 1 in _ids(matcher) else next(iter(_ids(matcher))))
        if _ids(matcher) == {END_OF_TEXT}:
            return
    raise AssertionError("the character cannot be written")


CHAIN = "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(900))
DEEP = {
    "chain of rules": BoundText("grammar", CHAIN + '\nr900: "a"'),
    "parentheses": BoundText("grammar", "start: " + "(" * 5000 + '"a"' + ")" * 5000),
    "parentheses of GBNF": BoundText("grammar", "root ::= " + "(" * 5000 + '"a"' + ")" * 5000),
    "groups": BoundText("regex", "(" * 50_000 + "a" + ")" * 50_000),
    "references": BoundText(
        "json_schema",
        json.dumps(
            {
                "$defs": {f"d{i}": {"properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(3000)}
                | {"d3000": {"type": "null"}},
                "$ref": "#/$defs/d0",
            }
        ),
    ),
    "arrays": BoundText("json_schema", '{"items":' * 20_000 + "{}" + "}" * 20_000),
}


@pytest.mark.parametrize("name", DEEP)
def test_what_is_nested_deeply_does_no_harm(compiler, name: str):
    """It is compiled or refused, and the process goes on."""
    try:
        compiler.matcher(DEEP[name])
    except GrammarError as refused:
        assert str(refused).endswith(".")
    assert allowed(compiler, BoundText("choice", '["a"]'), "a") == {END_OF_TEXT}


@pytest.mark.parametrize(
    ("bound", "words"),
    [
        (BoundText("json_schema", '{"type": "thing"}'), "thing"),
        (BoundText("json_schema", '{"if": {}, "then": {}}'), "#/if cannot be enforced; leave it out"),
        (BoundText("json_schema", "[]"), "neither"),
        (BoundText("json_schema", '{"const": 9007199254740993}'), "9007199254740993"),
        (BoundText("regex", "(a"), "unclosed group"),
        (BoundText("regex", "(?<=a)b"), "look"),
        (BoundText("regex", r"[^\s\S]"), "no text fits it"),
        (BoundText("grammar", "root ::= root"), "no text fits it"),
        (BoundText("grammar", "start: nowhere"), "nowhere"),
        (BoundText("grammar", ""), "root"),
        (BoundText("regex", "a" * 300_000), "at most"),
        (BoundText("grammar", HOSTILE), "too complex"),
        (
            BoundText("json_schema", '{"type": "integer", "multipleOf": 7919, "maximum": 1' + "0" * 29 + "}"),
            "too",
        ),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_sentence(compiler, bound: BoundText, words: str):
    with pytest.raises(GrammarError, match=words) as refused:
        compiler.matcher(bound)
    assert str(refused.value).endswith(".") and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("tool", "answer", "field"),
    [
        (CITY, ("regex", "(a"), "response_format"),
        (CITY, ("regex", r"[^\s\S]"), "response_format"),
        (CITY, ("grammar", "root ::= " + "a " * 10_000), "response_format"),
        (CITY, ("json_schema", '{"not": {}}'), "response_format"),
        ({"not": {}}, ("regex", "a"), ARGUMENTS["field"]),
    ],
)
def test_what_is_wrong_is_said_of_the_tool_or_of_the_answer(compiler, tool: dict, answer: tuple, field: str):
    kind, source = answer
    either = json.loads(EITHER) | {"answer": {"kind": kind, "source": source, "field": "response_format"}}
    either |= {"first": [[ARGUMENTS | {"schema": tool}]], "more": []}
    with pytest.raises(GrammarError) as refused:
        compiler.matcher(BoundText("calls", json.dumps(either)))
    assert refused.value.field == field and f" of {field} " in str(refused.value)


def test_a_bound_beyond_the_integers_of_fp64_is_kept(compiler):
    schema = json.dumps({"type": "integer", "maximum": 2**63 - 1})
    assert allowed(compiler, BoundText("json_schema", schema), str(2**63)) is None
    assert allowed(compiler, BoundText("json_schema", schema), str(2**63 - 2048)) is not None


def test_a_model_with_fewer_tokens_writes_it_in_these():
    compiler = GrammarCompiler(300)
    bits, errors = MaskThreads(1, 10).masks([compiler.matcher(BoundText("json_schema", PERSON))])
    ids = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
    assert errors == [""] and ids.tolist() == [ord("{") + 1]
