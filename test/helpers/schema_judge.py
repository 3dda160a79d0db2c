"""What a JSON schema allows, by `jsonschema` and by the grammar that is made of it, byte by byte."""

import json
import random
import re
from decimal import Decimal, InvalidOperation, localcontext
from functools import cache

import jsonschema
import jsonschema_rs
import numpy as np
from jsonschema.exceptions import ValidationError
from llguidance import LLMatcher

from rwkv_batch.text.grammars import BoundText, GrammarCompiler

BYTES = 257  # ids: that of the end, and of a byte more than its value
MOST_BYTES = 400


SPACES = "\\s\u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"


def ecma(pattern: str) -> re.Pattern[str]:
    """The pattern by ECMA-262: `$` is the end, \\d and \\w are of ASCII. \\s may stand in classes only."""
    ends = re.sub(r"(?<!\\)\$", r"\\Z", pattern.replace("(?<", "(?P<"))
    return re.compile(ends.replace("\\s", SPACES), re.ASCII)


def _pattern(validator, pattern, instance, schema):
    if isinstance(instance, str) and not ecma(pattern).search(instance):
        yield ValidationError(f"{instance!r} does not match {pattern!r}")


def _is_number(checker, instance) -> bool:
    return isinstance(instance, int | Decimal) and not isinstance(instance, bool)


Judge = jsonschema.validators.extend(
    jsonschema.Draft202012Validator,
    {"pattern": _pattern},
    type_checker=jsonschema.Draft202012Validator.TYPE_CHECKER.redefine("number", _is_number),
)


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(BYTES)


def grammar(schema: object) -> LLMatcher:
    """Raises GrammarError."""
    return compiler().matcher(BoundText("json_schema", json.dumps(schema)))


def takes(matcher: LLMatcher, text: str) -> bool:
    """Whether the grammar allows this text, and that it ends there."""
    tried, ids = matcher.deep_copy(), [byte + 1 for byte in text.encode()]
    return tried.try_consume_tokens(ids) == len(ids) and tried.is_accepting()


def fits(schema: object, text: str) -> bool:
    """Numbers are compared by their digits: in fp64, 0.3 is no multiple of 0.1."""
    exact = json.loads(json.dumps(schema), parse_float=Decimal)
    judge = Judge(exact, format_checker=Judge.FORMAT_CHECKER)
    with localcontext(prec=700):
        try:
            value = json.loads(text, parse_float=Decimal)
        except InvalidOperation:  # an exponent of many digits, which JSON allows
            return True
        valid = judge.is_valid(value)
    return valid and _formats_fit(schema, json.loads(text))


def _formats_fit(schema: object, value: object) -> bool:
    """By a library that knows all formats."""
    if "format" not in json.dumps(schema):
        return True
    only = json.loads(
        json.dumps(schema), object_hook=lambda s: {k: v for k, v in s.items() if k != "multipleOf"}
    )
    return jsonschema_rs.validator_for(only, validate_formats=True).is_valid(value)


def walk(matcher: LLMatcher, chance: random.Random) -> str | None:
    """A text of the grammar, drawn byte by byte; None if it has become too long."""
    tried, ids = matcher.deep_copy(), []
    while len(ids) < MOST_BYTES:
        bits = np.unpackbits(np.frombuffer(tried.compute_bitmask(), np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits[:BYTES]).tolist()
        ends = [i for i in allowed if i == 0 or chr(i - 1) in '"}]']
        if tried.is_accepting() and (allowed == [0] or chance.random() < 0.3):
            return bytes(i - 1 for i in ids).decode()
        if ends and ends != [0] and chance.random() < 0.15:
            allowed = ends
        allowed = [i for i in allowed if i] or [0]
        assert allowed != [0], "it can neither end nor go on"
        ids.append(chance.choice(allowed))
        assert tried.consume_token(ids[-1])
    return None
