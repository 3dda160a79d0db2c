"""GBNF as llama.cpp has it: which texts a grammar allows, byte by byte."""

import json

import pytest
from llguidance import LLMatcher, LLTokenizer

from rwkv_batch.text.gbnf import GbnfError, is_gbnf, to_lark

BYTES = LLTokenizer("byte")
# How a character can be written -> the character.
ESCAPES = {
    r"\n": "\n",
    r"\r": "\r",
    r"\t": "\t",
    r"\\": "\\",
    r"\"": '"',
    r"\[": "[",
    r"\]": "]",
    r"\x00": "\0",
    r"\x41": "A",
    r"\x7f": "\x7f",
    r"\x85": "\x85",
    r"\xe9": "é",
    r"\xFF": "ÿ",
    r"\u0041": "A",
    r"\u00e9": "é",
    r"\u0100": "Ā",
    r"\u2028": "\u2028",
    r"\u4E2D": "中",
    r"\uffff": "\uffff",
    r"\U00000041": "A",
    r"\U000000e9": "é",
    r"\U0001F600": "\U0001f600",
    r"\U0010ffff": "\U0010ffff",
}
NEXT_TO = 'abAZ0é中-^[]\\"/&~|.(){}*+?\n \0\U0001f600'


def allows(grammar: str, *texts: str) -> list[bool]:
    lark = json.dumps({"grammars": [{"lark_grammar": to_lark(grammar)}]})
    matcher = LLMatcher(BYTES, lark, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    found = []
    for text in texts:
        tried, tokens = matcher.deep_copy(), list(text.encode())
        found.append(tried.try_consume_tokens(tokens) == len(tokens) and tried.is_accepting())
    return found


@pytest.mark.parametrize("written", ESCAPES)
def test_an_escape_is_its_character_in_a_text_and_in_a_class(written: str):
    char = ESCAPES[written]
    others = [other for other in NEXT_TO if other != char]
    assert allows(f'root ::= "d{written}c"', f"d{char}c") == [True]
    assert not any(allows(f'root ::= "d{written}c"', *(f"d{other}c" for other in others)))
    assert allows(f"root ::= [{written}]", char, *others) == [True] + [False] * len(others)
    assert allows(f"root ::= [^{written}]", char, *others) == [False] + [True] * len(others)
    assert allows(f"root ::= [a{written}b]", char, "a", "b") == [True] * 3


@pytest.mark.parametrize("char", [chr(code) for code in range(0x20, 0x7F)] + ["é", "中", "\U0001f600"])
def test_any_other_character_stands_for_itself(char: str):
    others = [other for other in NEXT_TO if other != char]
    if char not in '"\\':
        assert allows(f'root ::= "{char}{char}"', char * 2) == [True]
    if char not in "]\\":
        assert allows(f"root ::= [_{char}]", char, "_") == [True, True]
        wrong = allows(f"root ::= [_{char}]", *others)
        assert not any(wrong), [other for other, bad in zip(others, wrong, strict=True) if bad]


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        (r'root ::= "d\u00e9cade"', ["décade"], ["d\u0e9cade", "decade"]),
        (r"root ::= [\u00e0-\u00ff]", ["à", "é", "ÿ"], ["a", "Ā"]),
        (r"root ::= [\U0001F600-\U0001F64F]+", ["\U0001f600\U0001f64f"], ["\U0001f650"]),
        (r"root ::= [^\u0000-\u007f]", ["é", "中"], ["a", "\n"]),
        (r"root ::= [\x41-\x43a-c]", ["A", "C", "b"], ["D", "d"]),
        (r"root ::= [\[-\]]", ["[", "\\", "]"], ["Z", "^", "-"]),
        ("root ::= [a-]", ["a", "-"], ["b"]),
        ("root ::= [-a]", ["a", "-"], ["b"]),
        ("root ::= [+--]", ["+", ",", "-"], ["*", "."]),
        ("root ::= [a&&b]", ["a", "&", "b"], ["c"]),
        ("root ::= [a~~b]", ["a", "~", "b"], ["c"]),
        ("root ::= [a^]", ["a", "^"], ["b"]),
        ("root ::= [^^]", ["a", "\n"], ["^"]),
        ("root ::= [^]", ["a", "\n", "\U0010ffff"], ["", "ab"]),
        ("root ::= .", ["a", "\n", "é", "\U0001f600"], ["", "ab"]),
        ('root ::= "" | "a"', ["", "a"], ["b"]),
        ('root ::= word "b"\nword ::= [a-z]*', ["aab", "b", "bb"], ["a", ""]),
        ('root ::= t t\nt ::= "a" | "aa"', ["aa", "aaa", "aaaa"], ["a", "aaaaa"]),
        ('root ::= "a" | "ab" "c" | "a" "bd"', ["a", "abc", "abd"], ["ab"]),
        ('root ::= "a"{3}', ["aaa"], ["aa", "aaaa"]),
        ('root ::= "a"{2,}', ["aa", "aaaaa"], ["a"]),
        ('root ::= "a"{1,2} "b"', ["ab", "aab"], ["b", "aaab"]),
        ('root ::= "a"{0,2}', ["", "aa"], ["aaa"]),
        ('root ::= "a"{,2}', ["", "aa"], ["aaa"]),
        ('root ::= [ab]{ 1 , 2 } ("c" "d"){2}', ["acdcd"], ["acd"]),
        ('root ::= "a"{0} "b"', ["b"], ["ab", ""]),
        ('root ::= ("a" | "b" "c"){0,0} "d"', ["d"], ["ad"]),
        ('root ::= "a"? "b"* "c"+', ["c", "abbcc"], ["ab"]),
        ('# one\nroot ::= "#" # two "x"\n  | [#]{2} # three\n', ["#", "##"], ["x", ""]),
        ('root ::= (\n  "a" # first\n  | "b"\n)', ["a", "b"], ["ab"]),
        ('root ::= start " " Start-2\nstart ::= [a-z]+\nStart-2 ::= start', ["a b"], ["a"]),
        ('root ::= a-b a_b aB\na-b ::= "1"\na_b ::= "2"\naB ::= "3"', ["123"], ["111"]),
        ('root::="a"', ["a"], ["b"]),
        ('root ::=\n  "a" |\n  "b"', ["a", "b"], ["ab"]),
        ('root ::= "(" root ")" | "x"', ["x", "((x))"], ["(x"]),
        (r'root ::= "\"" [^"\\]* "\""', ['""', '"a\nb"'], ['"\\"', '"']),
    ],
)
def test_a_grammar_allows_its_texts(grammar: str, right: list[str], wrong: list[str]):
    assert allows(grammar, *right, *wrong) == [True] * len(right) + [False] * len(wrong)


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (r'root ::= "\q"', r"\\q is no escape; those are .*\\xHH \\uHHHH \\UHHHHHHHH, in line 1"),
        (r'root ::= "\u12"', r"\\u is no escape"),
        (r'root ::= "\x4"', r"\\x is no escape"),
        (r"root ::= [\uD83D]", r"\\uD83D is no character; one beyond \\uffff is written"),
        (r'root ::= "\U00110000"', "is no character"),
        ('root ::= "a', "a text in quotation marks has no end"),
        ('root ::= "a\\', "an escape has no end"),
        ("root ::= [a", "a class has no end"),
        ("root ::= []", "a class has no characters"),
        ("root ::= [z-a]", "the range from 'z' to 'a' is empty"),
        ('root ::= "a"{}', "a repetition is written"),
        ('root ::= "a"{3,2}', "at least 3 and at most 2"),
        ('root ::= ("a"', "a parenthesis is not closed"),
        ('root ::= "a")', "a parenthesis is closed that is not open"),
        ('root ::= "a"\n\nb ::= other', "no rule is named other, in line 3"),
        ('other ::= "a"', "no rule named root"),
        ('root ::= "a"\n\nroot "b"', "expected ::=, in line 3"),
        ("root ::= <think>", "'<' has no meaning here"),
        ("root ::= " + "(" * 5000 + '"a"' + ")" * 5000, "nested too deeply"),
    ],
)
def test_what_is_no_gbnf_is_refused_by_what_is_wrong(grammar: str, words: str):
    with pytest.raises(GbnfError, match=words):
        to_lark(grammar)


def test_lark_is_no_gbnf():
    assert is_gbnf("# a\n root ::= x") and not is_gbnf('start: "::=" | a\na: "root ::="')
