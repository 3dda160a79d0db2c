"""Why llguidance refuses a grammar, in words for who has sent it.

Its messages name options that no request has, and its own state. Those of version 1.9.1 are here; one that is
not known comes as it is, without what it says of its own.
"""

import re

TOO_COMPLEX = "it is too complex; use fewer or smaller repetitions and bounds"
# Part of a message -> a sentence without its end. Groups of the first may stand in the second.
KNOWN = {
    r"coerce_one_of|oneOf constraints": (
        "oneOf is enforced only where no value can fit two of its schemas; use anyOf"
    ),
    r"Unimplemented keys: \[(?P<what>.*)\]": "{what} cannot be enforced; leave it out",
    r"min/maxProperties only supported": (
        "minProperties and maxProperties are enforced only where required names all of properties"
    ),
    r"patternProperty regexes (?P<what>.*) are not disjoint": (
        "a key may match {what} of patternProperties; write them so that none can match both"
    ),
    r"circular references with sibling keys": (
        "a $ref that leads to itself has other keywords beside it; put them into the schema that it names"
    ),
    r"^(Pointer|Anchor) '(?P<what>.*)' does not exist": "a $ref names {what}, which the schema does not have",
    r"not present in a registry|external resources": (
        "a $ref names another document, and nothing is fetched; put it under $defs"
    ),
    r"Regex is empty|Constant .* doesn't match": (
        "no text fits the pattern, format and lengths that hold for it together; leave one of them out"
    ),
    r"Unable to determine if regex is empty": (
        "the pattern, format and lengths that hold for one text are too complex together; leave one out"
    ),
    r"lookarounds not supported|look-around": (
        "look-around, bounds of words, and ^ and $ inside of a text cannot be enforced; write it without them"
    ),
    r"backreferences are not supported": "a group cannot be referred to again; write it out",
    r"Failed to generate regex for": "a bound of a number cannot be enforced; use one with fewer digits",
    r"Unsatisfiable schema: (?P<what>.*)": "nothing fits it: {what}",
    r"stack level exceeded|recursion limit": "it is nested too deeply; use fewer levels",
    r"too many (expressions|states|items)|too (big|large)|fuel|consider making": TOO_COMPLEX,
    r"NoExtensionBias": "no text fits it",
    r"no tokenizer|special token|token range": (
        "a grammar is over texts here, and cannot name tokens; write their texts"
    ),
}
OWN = re.compile(r" \((make sure|at \"|limit for)[^)]*\)+|; try [^;]*|<non-verbose/>")


def reason(message: str) -> str:
    """What a message of the library says, without a full stop; empty if it says nothing."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    for line in lines:
        for known, words in KNOWN.items():
            if found := re.search(known, line, re.IGNORECASE):
                return words.format(**{name: text[:120] for name, text in found.groupdict().items()})
    said = next((line for line in lines if line.startswith("error: ")), lines[0] if lines else "")
    return OWN.sub("", said.removeprefix("error: "))[:200].rstrip(". ")
