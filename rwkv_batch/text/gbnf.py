"""GBNF, the form of grammars that llama.cpp has, as Lark of llguidance.

llguidance has a converter, whose rules and repetitions are right. What it makes of escapes is not, in its
version 1.9.1 (no report of it is known): it drops the zeros in front of `\\u00e9`, and passes `\\U0001F600`
and `\\[` on to a form that does not have them. `.` leaves out the line feed, and a class such as `[+--]` is
read as one of Rust, which has operators. So a grammar is rewritten first, in a part of GBNF that means the
same there. The syntax: grammars/README.md and src/llama-grammar.cpp of llama.cpp.
"""

import re

from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

SIMPLE = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", '"': '"', "[": "[", "]": "]"}
DIGITS = {"x": 2, "u": 4, "U": 8}  # of a code point, behind this letter
RULE = re.compile(r"^[ \t]*[A-Za-z0-9_-]+\s*::=", re.MULTILINE)
NAME = re.compile(r"[A-Za-z0-9_-]+")
REPEATED = re.compile(r"\{\s*(\d*)\s*(,?)\s*(\d*)\s*\}")
ANY = "[\\x00-\U0010ffff]"
LARGEST = 0x10FFFF


class GbnfError(ValueError):
    """A grammar that is not GBNF; the message says what is wrong, without a full stop."""


def is_gbnf(text: str) -> bool:
    """Whether a grammar has a rule of GBNF; else it is Lark."""
    return RULE.search(text) is not None


def to_lark(text: str) -> str:
    """Raises GbnfError."""
    try:
        return gbnf_to_lark(_Rewriting(text).whole())
    except RecursionError as error:
        raise GbnfError("its parentheses are nested too deeply") from error
    except GbnfToLarkError as error:
        line = error.pos.text.count("\n", 0, error.pos.pos) + 1
        raise GbnfError(f"{str(error).partition(' at line ')[0].lower()}, in line {line}") from error


class _Rewriting:
    """Parts of a grammar, one after the other, as the converter reads them right."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0
        self._parts: list[str] = []
        self._open: list[int] = []  # places in `_parts` of parentheses that are open
        self._last = 0  # where in `_parts` the element begins that a repetition is for
        self._names: dict[str, str] = {}
        self._defined: set[str] = set()
        self._used: dict[str, int] = {}  # by name: where

    def whole(self) -> str:
        while self._at < len(self._text):
            self._next()
        if self._open:
            raise self._error("a parenthesis is not closed")
        if "root" not in self._defined:
            raise GbnfError("it has no rule named root")
        for name in self._used.keys() - self._defined:
            self._at = self._used[name]
            raise self._error(f"no rule is named {name}")
        # The converter makes a regular expression of each rule without recursion but root. Within root, each
        # would take as much as it can, and leave nothing behind. So root is a rule like others.
        return "".join([*self._parts, f"\nroot ::= {self._names['root']}\n"])

    def _next(self) -> None:
        char = self._text[self._at]
        if char == "#":
            end = self._text.find("\n", self._at)
            self._at = len(self._text) if end < 0 else end
        elif char.isspace():
            self._put(char)
        elif char == "|":  # the converter knows line feeds behind it only
            spaces = []
            while self._parts and self._parts[-1].isspace():
                spaces.append(self._parts.pop())
            self._put(char)
            self._parts += spaces
        elif char == '"':
            self._element(self._literal())
        elif char == "[":
            self._element(self._class())
        elif char == ".":
            self._at += 1
            self._element(ANY)
        elif char == "(":
            self._open.append(len(self._parts))
            self._put(char)
        elif char == ")":
            if not self._open:
                raise self._error("a parenthesis is closed that is not open")
            self._put(char)
            self._last = self._open.pop()
        elif char in "*+?":
            self._put(char)
        elif char == "{":
            self._repetition()
        elif self._text.startswith("::=", self._at):
            self._parts.append("::=")
            self._at += 3
        elif found := NAME.match(self._text, self._at):
            self._rule(found)
        else:
            raise self._error(f"{char!r} has no meaning here")

    def _put(self, char: str) -> None:
        self._parts.append(char)
        self._at += 1

    def _element(self, text: str) -> None:
        self._last = len(self._parts)
        self._parts.append(text)

    def _rule(self, found: re.Match[str]) -> None:
        name = found[0]
        if re.compile(r"\s*::=").match(self._text, found.end()):
            self._defined.add(name)
        else:
            self._used.setdefault(name, self._at)
        # The converter changes names, and takes no two that are equal then.
        self._names.setdefault(name, f"r{len(self._names)}")
        self._at = found.end()
        self._element(self._names[name])

    def _repetition(self) -> None:
        found = REPEATED.match(self._text, self._at)
        if not found or not (found[1] or found[3]):
            raise self._error("a repetition is written {2}, {2,} or {2,3}")
        least = int(found[1] or 0)
        most = int(found[3]) if found[3] else None if found[2] else least
        if most is not None and most < least:
            raise self._error(f"a repetition has at least {least} and at most {most}")
        if most == 0:
            self._parts[self._last :] = ['""']
        else:
            self._parts.append(f"{{{least},{'' if most is None else most}}}")
        self._at = found.end()

    def _literal(self) -> str:
        out, end = [], ""
        self._at += 1
        while (end := self._current("a text in quotation marks")) != '"':
            char = self._character(end)
            if char in '"\\':
                out.append("\\" + char)
            else:
                out.append(char if char >= " " and char != "\x7f" else f"\\x{ord(char):02x}")
        self._at += 1
        return f'"{"".join(out)}"'

    def _class(self) -> str:
        out = ["["]
        self._at += 1
        if negated := self._current("a class") == "^":
            self._at += 1
        while (current := self._current("a class")) != "]":
            first = last = self._character(current)
            if self._text.startswith("-", self._at) and not self._text.startswith("-]", self._at):
                self._at += 1
                last = self._character(self._current("a class"))
            if last < first:
                raise self._error(f"the range from {first!r} to {last!r} is empty")
            out.append(_in_class(first) if first == last else f"{_in_class(first)}-{_in_class(last)}")
        self._at += 1
        if len(out) > 1:
            return "".join(["[^" if negated else "[", *out[1:], "]"])
        if negated:
            return ANY
        raise self._error("a class has no characters")

    def _current(self, what: str) -> str:
        if self._at >= len(self._text):
            raise self._error(f"{what} has no end")
        return self._text[self._at]

    def _character(self, current: str) -> str:
        """The character here, which may be escaped, and go on behind it."""
        self._at += 1
        if current != "\\":
            return current
        kind = self._current("an escape")
        self._at += 1
        if kind in SIMPLE:
            return SIMPLE[kind]
        digits = self._text[self._at : self._at + DIGITS.get(kind, 0)]
        if not digits or not re.fullmatch(f"[0-9a-fA-F]{{{DIGITS[kind]}}}", digits):
            raise self._error(f"\\{kind} is no escape; those are {_escapes()}")
        self._at += len(digits)
        code = int(digits, 16)
        if code > LARGEST or 0xD800 <= code <= 0xDFFF:
            raise self._error(f"\\{kind}{digits} is no character; one beyond \\uffff is written \\U0001f600")
        return chr(code)

    def _error(self, why: str) -> GbnfError:
        line = self._text.count("\n", 0, self._at) + 1
        return GbnfError(f"{why}, in line {line}")


def _escapes() -> str:
    return " ".join(['\\n \\r \\t \\\\ \\" \\[ \\]', *(f"\\{kind}{'H' * n}" for kind, n in DIGITS.items())])


def _in_class(char: str) -> str:
    """In a class of Rust's, where signs may be operators."""
    return char if char.isalnum() or char > "\x7f" else f"\\x{ord(char):02x}"
