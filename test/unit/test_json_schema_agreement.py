"""All that a schema's grammar lets through is valid by `jsonschema`: numbers, texts, objects and arrays.

Schemas are drawn at random, with the same seed each time. Texts are drawn from the grammar byte by byte, and
also made near the bounds of a schema, where two readings of it would differ.
"""

import json
import math
import random
import re
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction

import pytest
from schema_judge import ecma, fits, grammar, takes, walk

from rwkv_batch.text.grammars import GrammarError
from rwkv_batch.text.json_schema.formats import OF_LIBRARY, PATTERNS

BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
VALUES = [
    0,
    1,
    -1,
    0.5,
    -0.5,
    0.1,
    0.25,
    -1.5,
    2,
    9,
    10,
    99,
    100,
    99.9,
    100.1,
    1e-3,
    1e-9,
    -1e-9,
    12345.678,
    0.3,
]
VALUES += [7, 1e15, 2**53 - 1, -(2**53), 1e17, 1e18, 9.2e18, 1e19, -1e19, 1e300, -1e300, 5e-324, 0.224, 19.95]
MULTIPLES = [1, 2, 3, 5, 10, 0.5, 0.1, 0.01, 0.25, 7, 1.5, 100, 0.07, 0.3, 1e-5]


def near(bound: float) -> set[str]:
    """Numbers at and about a bound, as JSON may write them."""
    exact = Decimal(repr(bound))
    found = {exact + step * Decimal(10) ** -places for places in range(18) for step in (-1, 0, 1)}
    found |= {Decimal(repr(math.nextafter(bound, towards))) for towards in (-math.inf, math.inf)}
    plain = {format(value, "f") for value in found if value.is_finite()}
    return plain | {text + ("0" if "." in text else ".0") for text in plain}


def numeric(chance: random.Random) -> dict:
    def some(share: float) -> dict:
        return {
            key: chance.choice(VALUES)
            if chance.random() < 0.6
            else round(chance.uniform(-12, 12), chance.randrange(4))
            for key in BOUNDS
            if chance.random() < share
        }

    schema = {"type": chance.choice(["number", "number", "integer", ["integer", "null"]]), **some(0.4)}
    if chance.random() < 0.25:
        schema["multipleOf"] = chance.choice(MULTIPLES)
    if chance.random() < 0.2:
        schema["allOf"] = [some(0.4)]
    return schema


def bounds_in(schema: dict) -> Iterator[float]:
    for part in [schema, *schema.get("allOf", [])]:
        yield from (part[key] for key in BOUNDS if key in part)


@pytest.mark.parametrize("seed", range(3))
def test_numbers(seed: int):
    chance = random.Random(seed)
    compared = 0
    for _ in range(80):
        schema = numeric(chance)
        try:
            matcher = grammar(schema)
        except GrammarError:
            continue
        texts = {"-0", "0", "0.0", "1", "1e5", "1e-5", "null"} | {
            t for b in bounds_in(schema) for t in near(b)
        }
        wrong = {text for text in texts if takes(matcher, text) and not fits(schema, text)}
        drawn = {walk(matcher, chance) for _ in range(3)} - {None}
        wrong |= {text for text in drawn if not fits(schema, text)}
        assert not wrong, schema
        compared += 1
    assert compared > 40


@pytest.mark.parametrize("seed", range(2))
def test_numbers_well_within_their_bounds_are_taken(seed: int):
    chance = random.Random(seed)
    for _ in range(100):
        low, high = sorted(round(chance.uniform(-30, 30), chance.randrange(3)) for _ in range(2))
        keys = chance.choice(["minimum", "exclusiveMinimum"]), chance.choice(["maximum", "exclusiveMaximum"])
        if high - low < 0.01:
            continue
        matcher = grammar({"type": "number", keys[0]: low, keys[1]: high})
        middle = (Fraction(str(low)) + Fraction(str(high))) / 2
        inside = [middle, Fraction(str(low)) + Fraction(1, 1000), Fraction(str(high)) - Fraction(1, 1000)]
        for value in inside:
            text = str(float(value)).removesuffix(".0")
            assert takes(matcher, "0" if text == "-0" else text), (keys, low, high, text)


LITERALS = [
    *"ab0_&~/ :,=!@#%;<>'`é中",
    r"\.",
    r"\\",
    r"\[",
    r"\]",
    r"\-",
    r"\/",
    r"\n",
    r"\x41",
    r"\u00e9",
    r"\^",
]
LITERALS += [r"\$", r"\|", '"', "]", "}"]
ITEMS = [
    "a",
    "b",
    "a-f",
    "0-9",
    "_",
    "-",
    "&&",
    "~~",
    "--",
    "[",
    r"\]",
    r"\\",
    '"',
    r"\d",
    r"\w",
    r"\s",
    r"\D",
    r"\W",
]
ITEMS += [r"\n", r"\x00-\x1f", r"\x01", "é", "^", "!-/", "[:alpha:", r"\u4e00-\u9fff", "|", "."]
TIMES = ["", "", "", "", "*", "+", "?", "{2}", "{1,2}", "{0,}", "*?", "??"]
SIGNS = [*'ab0_-&~/" :é中[]^|.\\A!\n\t\x01\x1f\0']


def pattern(chance: random.Random, depth: int = 2) -> str:
    def atom() -> str:
        kind = chance.random()
        if kind < 0.45:
            return chance.choice(LITERALS)
        if kind < 0.75:
            items = "".join(chance.choices(ITEMS, k=chance.randint(1, 3)))
            return f"[{chance.choice(['', '^'])}{items}]"
        if kind < 0.85 or not depth:
            return chance.choice([r"\d", r"\w", r"[\s]", r"\D", r"\W", "."])
        return chance.choice(["(", "(?:"]) + pattern(chance, depth - 1) + ")"

    def sequence() -> str:
        return "".join(atom() + chance.choice(TIMES) for _ in range(chance.randint(1, 3)))

    return "|".join(sequence() for _ in range(chance.randint(1, 2)))


@pytest.mark.filterwarnings("ignore:Possible:FutureWarning")
@pytest.mark.parametrize("seed", range(3))
def test_patterns(seed: int):
    chance = random.Random(seed)
    compared = 0
    for _ in range(80):
        inner = pattern(chance)
        wanted = chance.choice(["^{}$", "^{}$", "^(?:{})$", "^{}", "{}$", "{}"]).format(inner)
        try:
            judge, matcher = ecma(wanted), grammar({"type": "string", "pattern": wanted})
        except (GrammarError, re.error):
            continue
        texts = {"".join(chance.choices(SIGNS, k=chance.randrange(5))) for _ in range(40)}
        wrong = {text for text in texts if takes(matcher, json.dumps(text)) and not judge.search(text)}
        missing = {
            text
            for text in texts
            if judge.search(text)
            and "\0" not in text
            and not takes(matcher, json.dumps(text, ensure_ascii=False))
        }
        drawn = [json.loads(text) for _ in range(3) if (text := walk(matcher, chance))]
        wrong |= {text for text in drawn if len(text) < 40 and not judge.search(text)}  # some judge for long
        assert not wrong and not missing, wanted
        compared += 1
    assert compared > 40


FORMATS = {
    "date": "2024-02-29 2023-02-29 2000-02-29 1900-02-29 2100-02-29 0000-01-01 0001-01-01 9999-12-31 "
    "2023-04-31 2023-13-01 2023-00-10 2023-1-1 2024-02-30 0004-02-29 0100-02-29 0400-02-29 2023-06-30Z",
    "time": "12:00:00Z 12:00:60Z 24:00:00Z 12:00 12:00:00.5+01:00 12:00:00+24:00 12:60:00Z 12:00:00.Z",
    "date-time": "2023-02-29T00:00:00Z 2024-02-29T00:00:00Z 2023-01-01T00:00:00 "
    "2023-01-01T12:00:00.123+05:30 2023-01-01T12:00:60Z 0000-01-01T00:00:00Z",
    "duration": "P PT P1Y P1Y2M P1Y2D P1W P1W2D PT1H2S PT1M2S P1YT1H PT1.5S P1DT P-1D p1d",
    "email": "a@b a.b@c.d a..b@c @b a@ a@b_c a@-b.c a@b..c " + "a" * 64 + "@b.c " + "a" * 65 + "@b.c",
    "hostname": "a a.b -a a- a_b 1 a. ab--c " + "a" * 64 + " " + ".".join(["a" * 60] * 5),
    "ipv4": "1.2.3.4 256.1.1.1 01.2.3.4 1.2.3 1.2.3.4.5 0.0.0.0 255.255.255.255",
    "ipv6": ":: ::1 1:: 1:2:3:4:5:6:7:8 1:2:3:4:5:6:7:: ::2:3:4:5:6:7:8 1::8 1:2:3:4:5:6:7 "
    "1:2:3:4:5:6:7:8:9 1::2::3 12345:: fe80::1%eth0 :1:2:3:4:5:6:7:8 1:2:3:4::5:6:7:8",
    "uuid": "00000000-0000-0000-0000-00000000000f 0000000-0000-0000-0000-000000000000 "
    "g0000000-0000-0000-0000-000000000000 00000000000000000000000000000000",
    "uri": "http://a http://a.b/c?d#e a:b //a http://[::1]/ http://[::1 mailto:a@b.c urn:x:y http://a/%zz "
    "http://a/%41 1a:b a:/ http://1.2.3.4:80/a/b file:///a",
}


@pytest.mark.parametrize("name", sorted({*PATTERNS, *OF_LIBRARY}))
def test_formats(name: str):
    chance = random.Random(0)
    schema = {"type": "string", "format": name}
    matcher = grammar(schema)
    texts = [json.dumps(text) for text in FORMATS[name].split(" ")]
    taken = [text for text in texts if takes(matcher, text)]
    assert taken and len(taken) < len(texts)
    drawn = [text for _ in range(40) if (text := walk(matcher, chance))]
    assert not [text for text in taken + drawn if not fits(schema, text)]


def test_a_format_and_a_pattern_hold_together():
    matcher = grammar({"type": "string", "format": "date", "pattern": "^2023"})
    assert takes(matcher, '"2023-02-28"')
    assert not takes(matcher, '"2023-02-29"') and not takes(matcher, '"2024-02-29"')


NAMES = ["a", "b", "a/b", "é", 'q"']
LEAVES = [{"type": "integer"}, {"type": "string", "maxLength": 3}, {"type": "null"}, {"enum": [1, "x", None]}]
SCHEMAS = [
    *LEAVES,
    True,
    False,
    {"const": {"k": [1.5, "v"]}},
    {"type": ["boolean", "string"], "maxLength": 2},
]


def compound(chance: random.Random, depth: int = 2) -> dict | bool:
    """Without what is refused, and with keys that an object may spell in two ways."""
    if not depth or chance.random() < 0.2:
        return chance.choice(SCHEMAS)
    inner = [compound(chance, depth - 1) for _ in range(3)]
    match chance.randrange(6):
        case 0 | 1:
            names = chance.sample(NAMES, 2)
            schema: dict = {"type": "object", "properties": dict(zip(names, inner, strict=False))}
            schema["required"] = chance.sample(names, chance.randrange(3))
            rest = chance.choice([None, False, inner[2], {"type": "integer"}])
            return schema if rest is None else schema | {"additionalProperties": rest}
        case 2:
            return {"type": "object", "patternProperties": {"^a": inner[0]}, "additionalProperties": inner[1]}
        case 3:
            least = chance.randrange(3)
            return {
                "type": "array",
                "prefixItems": inner[:2],
                "items": inner[2],
                "minItems": least,
                "maxItems": 3,
            }
        case 4:
            return {"anyOf": inner}
    return {
        "allOf": [inner[0], chance.choice([{"maxProperties": 2}, {"type": ["object", "string", "integer"]}])]
    }


TWICE = [
    r'{"a":1,"\u0061":"x"}',
    r'{"b":null,"\u0062":0}',
    r'{"a":1,"a\/b":"xyzw"}',
    '{"a":1,"a":2}',
    '{"é":1}',
]
TWICE += [r'{"\u00e9":"wide"}', "[]", "[1]", '["x",null]', "[null,null,1,2]", "{}", '"abcd"', "1"]


@pytest.mark.parametrize("seed", range(3))
def test_objects_and_arrays(seed: int):
    chance = random.Random(seed)
    compared = 0
    for _ in range(100):
        schema = compound(chance)
        try:
            matcher = grammar(schema)
        except GrammarError:
            continue
        drawn = {walk(matcher, chance) for _ in range(4)} - {None}
        texts = [text for text in TWICE if takes(matcher, text)] + list(drawn)
        wrong = [text for text in texts if not fits(schema, text)]
        assert not wrong, schema
        compared += 1
    assert compared > 50
