"""Cuts texts into segments, each the text of one prompt, and puts them together again."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from html import unescape
from itertools import groupby
from typing import Literal

from rwkv_batch.translation.marks import PLAIN, Handling, Mark, Token, split

Sentences = Literal[
    "lines", "texts", "whole"
]  # where texts are cut: at lines too, at sentences only, nowhere
LONGEST_WHOLE = 2000  # characters that stay together; an answer has no tokens for many more
LINE = re.compile(r"(\r\n|[\r\n\u2028\u2029\u0085\v\f])")
BLANK_LINE = re.compile(r"((?:\r\n|[\r\n])[ \t]*(?:\r\n|[\r\n])\s*)")
# The end of a sentence, with the space behind it. Not behind a single letter, or a number at a line's start.
SENTENCE = re.compile(
    r"""(?<![\s.][A-Za-z]\.)(?<!^[A-Za-z]\.)(?<=[.!?…])["'”’»)\]]*\s+(?=[^\sa-z])|(?<=[。！？；])[”’」』）]*\s*(?=\S)"""
)
PART = re.compile(r"(?<=[,;:，、；：])\s*|\s+")  # where a sentence is cut that is too long
LONGEST_ENTITY = 32  # characters
ENTITY_BEGUN = re.compile(r"&#?\w*\Z")  # of HTML; a cut in it would change it
SPACES = ("&nbsp;", "&#160;", "&#xa0;", "&#xA0;")  # in HTML
# What lines of Markdown begin with.
LEAD = re.compile(r"^(?:\s*(?:[-*+•>]|\#{1,6}|\d{1,3}[.)])\s+)+")


@dataclass
class Segment:
    """What one prompt holds: text and marks, without white space around them."""

    tokens: list[Token]
    text: int  # the number of the text that it is of
    answer: str | None = field(default=None)  # once it is known

    @property
    def source(self) -> str:
        return plain(self.tokens)


Part = str | Segment
Spans = list[tuple[int, int]]
Whole = Callable[[str], Spans]  # from a text to what of it is never cut: where each such part starts and ends


def plain(tokens: Sequence[Token]) -> str:
    """The text of tokens, marks as they are."""
    return "".join(token if isinstance(token, str) else token.text for token in tokens)


def nothing(text: str) -> Spans:
    """Any text may be cut anywhere."""
    return []


def cut(
    text: str,
    number: int,
    most: int,
    sentences: Sentences,
    handling: Handling = PLAIN,
    whole: Whole = nothing,
) -> list[Part]:
    """The parts of text `number`: what stays, and segments, none of which has more than `most` characters.

    A mark is never cut, and no part of a line that must stay `whole`: these alone may be longer. Without cuts
    at sentences, `most` is at least LONGEST_WHOLE.
    """
    parts: list[Part] = []
    if sentences == "whole":
        most = max(most, LONGEST_WHOLE)
    for line in _lines(split(text, handling), sentences):
        if isinstance(line, str):
            parts.append(line)
            continue
        for tokens in _sized(line, most, whole):
            parts += _trimmed(tokens, number, whole if sentences == "lines" else None, handling.escaped)
    return parts


def _lines(tokens: Sequence[Token], sentences: Sentences) -> Iterator[str | list[Token]]:
    """Lists of tokens that belong together, and what parts them."""
    ends = LINE if sentences == "lines" else BLANK_LINE  # a blank line would end a prompt
    line: list[Token] = []
    for token in tokens:
        if isinstance(token, Mark):
            if token.parts:
                yield line
                yield token.text
                line = []
            else:
                line.append(token)
            continue
        for number, piece in enumerate(ends.split(token)):
            if number % 2:
                yield line
                yield piece
                line = []
            elif piece:
                line.append(piece)
    yield line


def _sized(tokens: list[Token], most: int, whole: Whole) -> Iterator[list[Token]]:
    """The tokens, cut at sentences where they are longer, and at commas where these are."""
    if len(plain(tokens)) <= most:
        yield tokens
        return
    pieces = [piece for part in _cut_at(tokens, SENTENCE, whole) for piece in _short(part, most, whole)]
    group: list[Token] = []
    size = 0
    for piece in pieces:
        length = len(plain(piece))
        if group and size + length > most:
            yield group
            group, size = [], 0
        group, size = group + piece, size + length
    if group:
        yield group


def _short(tokens: list[Token], most: int, whole: Whole) -> Iterator[list[Token]]:
    if len(plain(tokens)) <= most:
        yield tokens
    else:
        yield from (piece for part in _cut_at(tokens, PART, whole) for piece in _hacked(part, most, whole))


def _hacked(tokens: list[Token], most: int, whole: Whole) -> Iterator[list[Token]]:
    """What has no place for a cut, cut anywhere."""
    for token in tokens:
        if isinstance(token, Mark) or len(token) <= most:
            yield [token]
        else:
            spans, start = _Inside(whole(token)), 0
            while start < len(token):
                end = min(start + most, len(token))
                begun = ENTITY_BEGUN.search(token, max(start + 1, end - LONGEST_ENTITY), end)
                if begun and end < len(token):
                    end = begun.start()
                if span := spans.around(end):
                    end = span[0] if span[0] > start else span[1]
                yield [token[start:end]]
                start = end


class _Inside:
    """Looks up places of a text, each behind the one before, in spans of it, which do not overlap."""

    def __init__(self, spans: Spans) -> None:
        self._left, self._next = iter(spans), (0, 0)

    def around(self, place: int) -> tuple[int, int] | None:
        """The span that a cut there would go through."""
        while self._next[1] <= place and (span := next(self._left, None)):
            self._next = span
        start, end = self._next
        return self._next if start < place < end else None


def _cut_at(tokens: list[Token], pattern: re.Pattern[str], whole: Whole) -> Iterator[list[Token]]:
    """The tokens, cut behind each place where the pattern is found in a text, unless that must stay whole."""
    group: list[Token] = []
    for token in tokens:
        if isinstance(token, Mark):
            group.append(token)
            continue
        done, spans = 0, _Inside(whole(token))
        for found in pattern.finditer(token):
            if found.end() > done and not spans.around(found.end()):
                yield [*group, token[done : found.end()]]
                group, done = [], found.end()
        if done < len(token):
            group.append(token[done:])
    if group:
        yield group


def _trimmed(tokens: list[Token], number: int, line: Whole | None, escaped: bool) -> Iterator[Part]:
    """A segment, and the white space and tags around it, which stay. Without letters all of it stays.

    `line`: it is one, which Markdown may begin; what of it must stay whole. `escaped`: as in HTML, which has
    no Markdown.
    """
    tokens = _joined(tokens)
    lead = ""
    if line and not escaped and tokens and isinstance(first := tokens[0], str):
        found = LEAD.match(first)
        if found and not _Inside(line(first)).around(found.end()):
            lead, tokens[0] = found[0], first[found.end() :]
    texts = [unescape(token) if escaped else token for token in tokens if isinstance(token, str)]
    if not any(map(str.isalpha, "".join(texts))):
        yield lead + plain(tokens)
        return
    start, stop = _inside(tokens)
    inside = tokens[start:stop]
    before = after = ""
    if isinstance(first := inside[0], str):
        begin = _space_before(first, escaped)
        before, inside[0] = first[:begin], first[begin:]
    if isinstance(last := inside[-1], str):
        end = _space_behind(last, escaped)
        after, inside[-1] = last[end:], last[:end]
    yield lead + plain(tokens[:start]) + before
    yield Segment([token for token in inside if token], number)
    yield after + plain(tokens[stop:])


def _joined(tokens: list[Token]) -> list[Token]:
    """The tokens with neighbouring texts as one: a term may stand where they were cut."""
    joined: list[Token] = []
    for is_mark, neighbours in groupby(tokens, lambda token: isinstance(token, Mark)):
        some = [*neighbours]
        joined += some if is_mark else [plain(some)]
    return [token for token in joined if token]


def _space_before(text: str, escaped: bool) -> int:
    """Where the white space at the beginning ends."""
    begin = len(text) - len(text.lstrip())
    while escaped and text.startswith(SPACES, begin):
        rest = text[text.index(";", begin) + 1 :].lstrip()
        begin = len(text) - len(rest)
    return begin


def _space_behind(text: str, escaped: bool) -> int:
    """Where the white space at the end begins."""
    end = len(text.rstrip())
    while escaped and text.endswith(SPACES, 0, end):
        end = len(text[: text.rindex("&", 0, end)].rstrip())
    return end


def _inside(tokens: list[Token]) -> tuple[int, int]:
    """Where the segment begins and ends: inside of white space, of lone tags, and of a pair around all."""
    start, stop = 0, len(tokens)
    while True:
        if _is_outside(tokens[start]):
            start += 1
        elif _is_outside(tokens[stop - 1]):
            stop -= 1
        elif _is_pair(tokens[start:stop]):
            start, stop = start + 1, stop - 1
        else:
            return start, stop


def _is_outside(token: Token) -> bool:
    if isinstance(token, str):
        return not token.strip()
    return token.kind == "free" and token.text.startswith("<") and "</" not in token.text


def _is_pair(tokens: list[Token]) -> bool:
    """Whether the first one is a tag that the last one closes."""
    depth = 0
    for number, token in enumerate(tokens, 1):
        if isinstance(token, Mark):
            depth += {"open": 1, "close": -1}.get(token.kind, 0)
        if depth <= 0:
            return 1 < number == len(tokens) and _name_of(tokens[0]) == _name_of(token) != ""
    return False


def _name_of(token: Token) -> str:
    return "" if isinstance(token, str) else token.name
