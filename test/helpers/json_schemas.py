"""Random JSON schemas, of the keywords that grammars bind, and what a model writes under them."""

import json

from hypothesis import strategies as st

NAMES = st.sampled_from(["name", "age", "city", "tags", "id", "价格", "a b", 'say "hi"', "x/y"])
TEXTS = st.text(alphabet=st.sampled_from('abcXYZ 09_-"\\/é中\n'), max_size=8)


def _strings() -> st.SearchStrategy[dict]:
    limits = st.tuples(st.integers(0, 6), st.integers(0, 12)).map(sorted)
    return st.one_of(
        limits.map(lambda m: {"type": "string", "minLength": m[0], "maxLength": m[1]}),
        st.sampled_from(["^[a-z]{1,8}$", "^[A-Z]{2}-[0-9]{3}$", "^(yes|no)$"]).map(
            lambda pattern: {"type": "string", "pattern": pattern}
        ),
        st.sampled_from(["date", "time", "uuid", "ipv4", "email"]).map(
            lambda form: {"type": "string", "format": form}
        ),
    )


def _numbers() -> st.SearchStrategy[dict]:
    limits = st.tuples(st.integers(-1000, 1000), st.integers(-1000, 1000)).map(sorted)
    return st.one_of(
        limits.map(lambda m: {"type": "integer", "minimum": m[0], "maximum": m[1]}),
        limits.map(lambda m: {"type": "number", "minimum": m[0], "maximum": m[1] + 1}),
        limits.filter(lambda m: m[1] - m[0] > 2).map(
            lambda m: {"type": "integer", "exclusiveMinimum": m[0], "exclusiveMaximum": m[1]}
        ),
        st.sampled_from([2, 5, 10]).map(lambda of: {"type": "integer", "multipleOf": of, "minimum": 0}),
    )


def _leaves() -> st.SearchStrategy[dict]:
    plain = st.one_of(TEXTS, st.integers(-99, 99), st.booleans(), st.none())
    return st.one_of(
        _strings(),
        _numbers(),
        st.just({"type": "boolean"}),
        st.just({"type": "null"}),
        st.lists(plain, min_size=1, max_size=4).map(lambda values: {"enum": values}),
        st.one_of(plain, st.integers(), st.lists(st.integers(), max_size=3)).map(lambda v: {"const": v}),
        st.just({"type": ["integer", "null"]}),
    )


def _objects(children: st.SearchStrategy[dict]) -> st.SearchStrategy[dict]:
    def made(drawn: tuple[dict, list[bool]]) -> dict:
        properties, needed = drawn
        required = [name for name, need in zip(properties, needed, strict=False) if need]
        # Closed to other properties: a model that is unsure would add some for ever.
        return {
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": False,
        }

    names = st.dictionaries(NAMES, children, max_size=4)
    return st.tuples(names, st.lists(st.booleans(), min_size=4, max_size=4)).map(made)


def _nested(children: st.SearchStrategy[dict]) -> st.SearchStrategy[dict]:
    lengths = st.tuples(st.integers(0, 2), st.integers(0, 3)).map(sorted)
    return st.one_of(
        _objects(children),
        st.tuples(children, lengths).map(
            lambda d: {"type": "array", "items": d[0], "minItems": d[1][0], "maxItems": d[1][1]}
        ),
        st.lists(children, min_size=1, max_size=3).map(
            lambda items: {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
        ),
        st.lists(children, min_size=1, max_size=3).map(lambda some: {"anyOf": some}),
        children.map(
            lambda child: {
                "$defs": {"part": child},
                "type": "object",
                "properties": {"part": {"$ref": "#/$defs/part"}},
                "required": ["part"],
                "additionalProperties": False,
            }
        ),
    )


def schemas() -> st.SearchStrategy[dict]:
    """Of values with an end. A $ref is of a definition in the same schema, so a nested one has none."""
    inner = st.recursive(_leaves(), lambda children: _nested(children).filter(_without_refs), max_leaves=6)
    return st.one_of(_leaves(), _nested(inner))


def _without_refs(schema: dict) -> bool:
    return "$ref" not in json.dumps(schema)
