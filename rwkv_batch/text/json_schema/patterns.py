"""Patterns of JSON schemas, which are regular expressions of ECMA-262, in the form of llguidance (Rust's).

A sign may mean different things in the two: `[a&&b]` and `[[:alpha:]]` are a class with an operator, and one
of names, in Rust's; `\\s`, `.` and `\\w` have other characters.

No pattern gets U+0000: where the characters of a class have all of U+0000 to U+001F, llguidance 1.9.1 also
takes `\\"` and `\\\\` in JSON, so that `^[^"]$` and `^[\\x00-\\x1f]$` let the wrong ones pass (no report of
it is known).
"""

import re

from rwkv_batch.text.json_schema.errors import SchemaError

CONTROLS = {"t": "\t", "n": "\n", "v": "\v", "f": "\f", "r": "\r"}
SPACES = r"\t-\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
CLASSES = {"d": "0-9", "w": "0-9A-Z_a-z", "s": SPACES}
ANY_BUT_LINE_ENDS = r"[^\n\r\u2028\u2029]"
REPEATED = re.compile(r"\{\d+(,\d*)?\}")
NAMED_GROUP = re.compile(r"\?P?<[A-Za-z_]\w*>")
LOOKING = ("?=", "?!", "?<=", "?<!")
PROPERTY = re.compile(r"[pP]\{[A-Za-z_=]+\}")
SIGNS = "^$\\.*+?()[]{}|/"


def to_rust(pattern: str, place: str) -> str:
    """Raises SchemaError."""
    return _Pattern(pattern, place).whole()


class _Pattern:
    def __init__(self, pattern: str, place: str) -> None:
        self._text, self._place, self._at = pattern, place, 0

    def whole(self) -> str:
        out: list[str] = []
        can_repeat, depth = False, 0
        while self._at < len(self._text):
            char = self._text[self._at]
            depth += (char == "(") - (char == ")")
            if depth < 0:
                raise self._error("closes a group that is not open")
            repeated = REPEATED.match(self._text, self._at)
            if char in "*+?" or repeated:
                if not can_repeat:
                    raise self._error("repeats nothing")
                out.append(self._take(repeated.end() - self._at if repeated else 1))
                if self._text.startswith("?", self._at):  # the same texts, the shortest first
                    out.append(self._take(1))
                can_repeat = False
                continue
            can_repeat = char not in "^|("
            match char:
                case "\\":
                    out.append(self._escape())
                case "[":
                    out.append(self._class())
                case ".":
                    out.append(ANY_BUT_LINE_ENDS)
                    self._at += 1
                case "(":
                    out.append(self._group())
                case "^" | "$" | "|" | ")":
                    can_repeat = char == ")"
                    out.append(self._take(1))
                case _:
                    self._at += 1
                    out.append(self._literal(char))
        if depth:
            raise self._error("has a group without an end")
        return "".join(out)

    def _take(self, count: int) -> str:
        self._at += count
        return self._text[self._at - count : self._at]

    def _group(self) -> str:
        self._at += 1
        if not self._text.startswith("?", self._at):
            return "(?:"
        if self._text.startswith("?:", self._at):
            self._at += 2
            return "(?:"
        if named := NAMED_GROUP.match(self._text, self._at):
            self._at = named.end()
            return "(?:"
        if self._text.startswith(LOOKING, self._at):
            raise self._error("looks ahead or behind")
        raise self._error("has a group of a kind that is not known here")

    def _escape(self) -> str:
        """Outside of a class."""
        kind = self._kind()
        if kind in CLASSES:
            self._at += 2
            return f"[{CLASSES[kind]}]"
        if kind.lower() in CLASSES:
            self._at += 2
            return f"[^{CLASSES[kind.lower()]}]"
        if found := PROPERTY.match(self._text, self._at + 1):
            self._at = found.end()
            return f"[\\{found[0]}--\\x00]"
        if kind in "bB":
            raise self._error(f"has \\{kind}")
        if kind in "123456789k":
            raise self._error("refers back to a group")
        return self._literal(self._character())

    def _kind(self) -> str:
        """The sign behind a backslash."""
        if self._at + 1 == len(self._text):
            raise self._error("ends with a backslash")
        return self._text[self._at + 1]

    def _character(self) -> str:
        """The character that an escape stands for."""
        kind = self._kind()
        self._at += 2
        if kind in CONTROLS:
            return CONTROLS[kind]
        if kind == "0" and not self._text[self._at : self._at + 1].isdigit():
            return "\0"
        if kind == "c" and re.match("[A-Za-z]", self._text[self._at : self._at + 1]):
            return chr(ord(self._take(1)) % 32)
        if kind == "u" and (braced := re.compile(r"\{([0-9a-fA-F]{1,6})\}").match(self._text, self._at)):
            self._at = braced.end()
            return self._coded(int(braced[1], 16))
        if kind in "xu":
            code = self._hexadecimal(2 if kind == "x" else 4)
            if 0xD800 <= code <= 0xDBFF and self._text.startswith("\\u", self._at):
                self._at += 2
                code = 0x10000 + ((code - 0xD800) << 10) + self._hexadecimal(4) - 0xDC00
            return self._coded(code)
        if kind.isalnum():
            raise self._error(f"has the escape \\{kind}")
        return kind

    def _hexadecimal(self, digits: int) -> int:
        text = self._take(digits)
        if not re.fullmatch(f"[0-9a-fA-F]{{{digits}}}", text):
            raise self._error("has an escape without its digits")
        return int(text, 16)

    def _coded(self, code: int) -> str:
        if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
            raise self._error("has an escape that is no character")
        return chr(code)

    def _literal(self, char: str) -> str:
        if char == "\0":
            raise self._error("asks for U+0000")
        return _escaped(char)

    def _class(self) -> str:
        self._at += 1
        negated = self._text.startswith("^", self._at)
        self._at += negated
        out: list[str] = []
        while not self._text.startswith("]", self._at):
            if self._at == len(self._text):
                raise self._error("has a class without an end")
            item = self._item()
            if len(item) > 1 or not self._text.startswith("-", self._at):
                out.append(_in_class(item))
                continue
            self._at += 1
            if self._text.startswith("]", self._at) or self._at == len(self._text):
                out += [_in_class(item), "\\-"]
                continue
            last = self._item()
            if len(last) > 1:
                out += [_in_class(item), "\\-", last]
            elif last < item:
                raise self._error("has a range whose end comes before its beginning")
            else:
                out.append(f"{_escaped(item)}-{_escaped(last)}" if item < last else _in_class(item))
        self._at += 1
        if negated:
            return f"[^\\x00{''.join(out)}]"
        if not out:
            raise self._error("has a class without characters")
        return f"[[{''.join(out)}]--\\x00]"

    def _item(self) -> str:
        """A character of a class; or several, as they stand in one of Rust's."""
        if not self._text.startswith("\\", self._at):
            return self._take(1)
        kind = self._kind()
        if kind in CLASSES:
            self._at += 2
            return CLASSES[kind]
        if kind.lower() in CLASSES:
            self._at += 2
            return f"[^{CLASSES[kind.lower()]}]"
        if found := PROPERTY.match(self._text, self._at + 1):
            self._at = found.end()
            return f"\\{found[0]}"
        if kind == "b":
            self._at += 2
            return "\b"
        if kind == "-":
            self._at += 2
            return "-"
        return self._character()

    def _error(self, what: str) -> SchemaError:
        return SchemaError(self._place, f"{what}, which cannot be enforced; write the pattern without it")


def _escaped(char: str) -> str:
    return char if char.isalnum() else f"\\u{{{ord(char):x}}}"


def _in_class(item: str) -> str:
    return _escaped(item) if len(item) == 1 else item
