"""Marks: what in a text is not translated and must come back whole.

Those are tags of HTML and XML, code, URLs, what programs fill in (`{0}`, `%s`), and what Markdown writes
around a link's text. Each takes time linear in the text to find, for any text.
"""

import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

Kind = Literal["open", "close", "ordered", "free"]
VOIDS = "area base br col embed hr img input link meta param source track wbr"
VOID = frozenset(VOIDS.split())
# Elements whose content is not text, or is text that stays.
TEXTLESS = "script style code pre kbd samp var textarea svg math"
SILENT = frozenset(TEXTLESS.split())
RAW = frozenset({"script", "style", "textarea"})  # which hold no elements
TRIES = 8  # ends that are looked for in vain, each through all of the text
# Elements that part texts.
PARTING = (
    "address article aside blockquote body br caption center dd details dialog div dl dt fieldset figcaption "
    "figure footer form h1 h2 h3 h4 h5 h6 head header hr html li main menu nav ol optgroup option p pre "
    "section select summary table tbody td tfoot th thead title tr ul"
)
BLOCKS = frozenset(PARTING.split())
STANDING_ALONE = BLOCKS | {"script", "style"}
ATTRIBUTES = r"""(?:(?:[^<>"']|"[^"<]*"|'[^'<]*')*+|[^<>]*)"""
TAG = re.compile(rf"<(/?)([A-Za-z][\w:.-]{{0,60}}+){ATTRIBUTES}>|<[!?][A-Za-z][^<>]*>")
BRACKETS = re.compile(r"\n|!?\[|\]\((?:[^()\s]|\([^()\s]*\))*(?:[ \t]+\"[^\"\n]*\")?\)")
FILLED = re.compile(
    r"""
    (?P<link> (?:https?|ftp)://[^\s<>"'`\u3000-\u303f\u4e00-\u9fff\uff00-\uffef]+
            | \bwww\.[^\s<>"'`\u3000-\u303f\u4e00-\u9fff\uff00-\uffef]+
            | (?<![\w.+-])[\w.+-]{1,64}@[A-Za-z0-9-]{1,63}(?:\.[A-Za-z0-9-]{2,63}){1,8} )
    | (?P<free> \{\{[^{}\n]{0,200}\}\} | \$\{[^{}\n]{1,200}\} | \{[\w.:!,+-]{1,60}\} | %\([\w.]{1,60}\)[sdifr]
            | (?<![\d%])%\d{1,2}\$[sdifuxXc@] | \[\[\w{1,20}\]\] )
    | (?P<ordered> \{\} | (?<![\w%])%[-+0]{0,2}\d{0,3}(?:\.\d{1,3})?(?:hh|h|ll|l|z)?
            [sdifuxXeEgGcp@](?![A-Za-z]) )
    """,
    re.VERBOSE,
)
ENTITY = re.compile(r"&(?:lt|gt|#60|#62|#[xX]3[cCeE]);")
TICKS = re.compile(r"`+")
LONGEST_CODE = 2000  # characters between backticks
CLOSING = re.compile(r"</[A-Za-z][\w:.-]{0,60}>")
STAYING = re.compile(r"<!--|<!\[CDATA\[|(?:^|(?<=\n))(?:```|~~~)|<([A-Za-z][\w:.-]{0,60})(?:\s[^<>]*)?>")
UNTRANSLATED = re.compile(r"\stranslate\s*=\s*[\"']?no\b|\sclass\s*=\s*[\"'][^\"']*\bnotranslate\b")
FENCES = ("```", "~~~")
ENDS = {"<!--": "-->", "<![CDATA[": "]]>", "```": "\n```", "~~~": "\n~~~"}
AT_END = ".,;:!?)]}*_"  # of a URL in running text


@dataclass(frozen=True)
class Mark:
    """A part of a text that stays as it is."""

    text: str
    kind: Kind = "free"  # of a pair, or whether others of its kind must not change places with it
    name: str = ""  # of a pair; of a tag
    parts: bool = False  # a text ends in front of it


@dataclass(frozen=True)
class Handling:
    """How the marks of a text are found."""

    escaped: bool = False  # text between tags is escaped, as in HTML and XML
    html: bool = False  # tags are those of HTML: some part texts, and some have none
    literals: tuple[str, ...] = ()  # further marks that the client uses
    silent: frozenset[str] = frozenset()  # names of tags whose content is not translated
    parting: frozenset[str] = frozenset()  # names of tags that part texts
    joining: frozenset[str] = frozenset()  # names of tags that do not

    @cached_property
    def all_silent(self) -> frozenset[str]:
        """Names of tags whose content stays, also those of HTML."""
        return self.silent | (SILENT if self.html else frozenset())

    @cached_property
    def all_parting(self) -> frozenset[str]:
        """Names of tags that part texts, also those of HTML."""
        return (self.parting | (BLOCKS if self.html else frozenset())) - self.joining

    @cached_property
    def patterns(self) -> list[re.Pattern[str]]:
        """What finds marks other than tags, code and links of Markdown, in this order."""
        longest_first = sorted(filter(None, self.literals), key=len, reverse=True)
        literals = [re.compile("|".join(map(re.escape, longest_first)))] if longest_first else []
        return [*literals, FILLED, *([ENTITY] if self.escaped else [])]


Token = str | Mark
PLAIN = Handling()
HTML = Handling(escaped=True, html=True)


def split(text: str, handling: Handling = PLAIN) -> list[Token]:
    """The text as parts that are translated, and marks, in order. Joined they are the text again."""
    tokens: list[Token] = []
    for piece in _silent(text, handling):
        if isinstance(piece, Mark):
            tokens.append(piece)
            continue
        found = _mark([piece] if handling.escaped else _code(piece), TAG, lambda each: _tag(each, handling))
        found = found if handling.escaped else _brackets(found)
        for pattern in handling.patterns:
            found = _mark(found, pattern, _filled)
        tokens += found
    return [token for token in tokens if token]


def fits(source: Sequence[Mark], answer: Sequence[Mark]) -> bool:
    """Whether an answer has the marks of its source, each as often, in an order that parses."""
    if Counter(mark.text for mark in source) != Counter(mark.text for mark in answer):
        return False
    if _ordered(source) != _ordered(answer):
        return False
    return _parses(answer) if _parses(source) else _tags_of(source) == _tags_of(answer)


def _ordered(marks: Iterable[Mark]) -> list[str]:
    return [mark.text for mark in marks if mark.kind == "ordered"]


def _tags_of(marks: Iterable[Mark]) -> list[str]:
    return [mark.text for mark in marks if mark.kind in ("open", "close")]


def _parses(marks: Iterable[Mark]) -> bool:
    """Whether each tag is closed, the last that was opened first."""
    opened: list[str] = []
    for mark in marks:
        if mark.kind == "open":
            opened.append(mark.name)
        elif mark.kind == "close" and (not opened or opened.pop() != mark.name):
            return False
    return not opened


def _silent(text: str, handling: Handling) -> Iterator[Token]:
    """The text, and as marks what stays whole in it: comments, blocks of code, elements without text."""
    names = handling.all_silent
    missing: set[str] = set()  # ends that do not come any more
    tries = TRIES
    last: dict[str, int] | None = None  # where each closing tag stands last, once that matters
    done = at = 0
    while found := STAYING.search(text, at):
        at, name = found.end(), found[1]
        if name and name not in names and name.lower() not in names and not UNTRANSLATED.search(found[0]):
            continue
        end = ENDS.get(found[0], f"</{name}>")
        if name and last is None:
            last = {tag[0]: tag.start() for tag in CLOSING.finditer(text)}
        if name and (found[0].endswith("/>") or not last or last.get(end, -1) < at):
            continue
        close = -1 if end in missing else text.find(end, at)
        if close < 0:
            missing.add(end)
            continue
        yield text[done : found.start()]
        done = close + len(end)
        if name and tries and name.lower() not in RAW and text.find(f"<{name}", at, close) >= 0:
            if (own := _own_end(text, name, at)) > 0:
                done = own
            else:
                tries -= 1
        at = done
        parts = found[0] in FENCES or (bool(name) and name.lower() in STANDING_ALONE)
        yield Mark(text[found.start() : done], parts=parts)
    yield text[done:]


def _own_end(text: str, name: str, at: int) -> int:
    """Where an element ends that may hold others of its name; -1 if it does not end."""
    depth = 1
    for tag in re.compile(rf"<(/?){re.escape(name)}(?:\s[^<>]*|/)?>").finditer(text, at):
        depth += -1 if tag[1] else not tag[0].endswith("/>")
        if not depth:
            return tag.end()
    return -1


def _code(text: str) -> list[Token]:
    """Code in backticks, which ends at as many as it begins with, in the same line."""
    tokens: list[Token] = []
    runs = [each.span() for each in TICKS.finditer(text)]
    alike: dict[int, deque[int]] = {}
    for number, (start, end) in enumerate(runs):
        alike.setdefault(end - start, deque()).append(number)
    done = number = 0
    while number < len(runs):
        start, end = runs[number]
        same = alike[end - start]
        while same and same[0] <= number:
            same.popleft()
        if same and (close := runs[same[0]])[0] - end < LONGEST_CODE and "\n" not in text[end : close[0]]:
            tokens += [text[done:start], Mark(text[start : close[1]])]
            done, number = close[1], same[0]
        number += 1
    return [*tokens, text[done:]]


def _mark(
    tokens: list[Token], pattern: re.Pattern[str], make: Callable[[re.Match[str]], Mark | None]
) -> list[Token]:
    """The tokens, with marks where the pattern is found."""
    made: list[Token] = []
    for token in tokens:
        if isinstance(token, Mark):
            made.append(token)
            continue
        done = 0
        for found in pattern.finditer(token):
            if mark := make(found):
                made += [token[done : found.start()], mark]
                done = found.start() + len(mark.text)
        made.append(token[done:])
    return made


def _filled(found: re.Match[str]) -> Mark | None:
    if found.lastgroup == "link":
        text = found[0].rstrip(AT_END)
        return Mark(text) if text else None
    return Mark(found[0], "ordered" if found.lastgroup == "ordered" else "free")


def _tag(found: re.Match[str], handling: Handling) -> Mark:
    text, name = found[0], found[2] or ""
    parts = not handling.all_parting.isdisjoint((name, name.lower()))
    if not name or text.endswith("/>") or name.lower() in VOID:
        return Mark(text, parts=parts)
    return Mark(text, "close" if found[1] else "open", name, parts)


def _brackets(tokens: list[Token]) -> list[Token]:
    """Links of Markdown: marks are what stands around their text."""
    if not any(isinstance(token, str) and "](" in token for token in tokens):
        return tokens
    names: dict[tuple[int, int], tuple[Kind, str]] = {}  # (token, place) -> of the mark there
    opened: list[tuple[int, int]] = []
    for number, token in enumerate(tokens):
        for found in BRACKETS.finditer(token) if isinstance(token, str) else ():
            place = number, found.start()
            if found[0] == "\n":
                opened.clear()
            elif not found[0].startswith("]"):
                opened.append(place)
            elif opened:
                name = f"link{len(names)}"
                names[opened.pop()], names[place] = ("open", name), ("close", name)
    numbered = iter(range(len(tokens)))

    def made(token: Token) -> list[Token]:
        number = next(numbered)
        return _mark([token], BRACKETS, lambda each: _bracket(each, names.get((number, each.start()))))

    return [part for token in tokens for part in made(token)]


def _bracket(found: re.Match[str], named: tuple[Kind, str] | None) -> Mark | None:
    return Mark(found[0], *named) if named else None
