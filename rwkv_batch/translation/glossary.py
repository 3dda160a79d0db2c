"""Terms that must be translated in a certain way.

A file of terms has one on each line, in columns that tabs part:

    source term <TAB> target term
    source language <TAB> target language <TAB> source term <TAB> target term [<TAB> case]

A language is a code or a name, and `*` or nothing is any. Forms of a term are parted by `|`: those of the
source are all found, and any of the target's will do. Where both have as many, each form of the source asks
for the one in its place, otherwise for the first. `case`: the source counts in this case only. Lines that
begin with `#` are left out.
"""

import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from html import unescape
from itertools import pairwise
from typing import NamedTuple

from ahocorasick_rs import AhoCorasick, MatchKind

from rwkv_batch.chat.languages import find
from rwkv_batch.translation.language.scripts import WORD, joins_words

ANY = ("", "*")
MOST_TERMS, LONGEST = 50_000, 200  # of a glossary, and characters of a form
MOST_TARGETS = 64  # forms of a target: an answer that lacks a term is searched for each of them
MOST_PAIRS = 64  # of languages, for which terms are kept
MOST_CHARACTERS = 500_000  # of the terms of a request: what finds them takes a hundred bytes for each
# Of HTML. Python reads no decimal number of thousands of digits.
ENTITY = re.compile(r"&(?:#[0-9]{1,32}|#[xX][0-9a-fA-F]+|[a-zA-Z][a-zA-Z0-9]*);?")
EDGE = "\0"  # stands where a word begins and ends in what is searched


class GlossaryError(ValueError):
    """A glossary that cannot be read; the message is a sentence."""


@dataclass(frozen=True)
class Term:
    """One line of a glossary."""

    source: tuple[str, ...]  # forms
    target: tuple[str, ...]
    source_language: str = ""  # "": any
    target_language: str = ""
    exact: bool = False  # whether the case of the source counts

    def wanted(self, form: int) -> str:
        """What the form of that number becomes."""
        return self.target[form if len(self.source) == len(self.target) else 0]


class Found(NamedTuple):
    """A term in a text."""

    start: int
    end: int
    term: Term
    wanted: str


class _Marked:
    """A text as it is searched: with an EDGE on both sides of each word, so that no part of one is found."""

    def __init__(self, text: str) -> None:
        self._edges = [at for word in WORD.finditer(text) for at in word.span()]
        self.plain, self.lowered = self._with_edges(text), self._with_edges(lower(text))
        self._edges = [at + number for number, at in enumerate(self._edges)]

    def _with_edges(self, text: str) -> str:
        ends = [0, *self._edges, len(text)]
        return EDGE.join(text[start:end] for start, end in pairwise(ends))

    def place(self, at: int) -> int:
        """Where in the text that place of the searched one is."""
        return at - bisect_left(self._edges, at)


class _Forms:
    """Forms of terms, all found in one pass: the time for a text does not depend on how many there are."""

    def __init__(self, exact: bool) -> None:
        self.exact = exact
        self._entries: dict[str, tuple[Term, int]] = {}
        self._list: list[tuple[Term, int]] = []
        self._found: AhoCorasick | None = None

    def __bool__(self) -> bool:
        return bool(self._entries)

    def add(self, form: str, number: int, term: Term) -> None:
        marked = _Marked(form)
        self._entries.setdefault(marked.plain if self.exact else marked.lowered, (term, number))

    def find(self, text: _Marked, start: int, end: int) -> list[tuple[int, int, Term, int]]:
        """Those in that part of the searched text, with the number of the form; the longest one counts."""
        if self._found is None:
            self._list = list(self._entries.values())
            self._found = AhoCorasick(self._entries, matchkind=MatchKind.LeftmostLongest)
        part = (text.plain if self.exact else text.lowered)[start:end]
        return [
            (start + first, start + last, *self._list[which])
            for which, first, last in self._found.find_matches_as_indexes(part)
        ]


class Terms:
    """The terms for one pair of languages, looked up in texts."""

    def __init__(self, terms: Iterable[Term], after: Iterable["Terms"] = ()) -> None:
        """Of two that have a form in common the first counts. `after`: others, which count behind these.

        Those whose case counts go before those whose case does not.
        """
        exact, loose = _Forms(True), _Forms(False)
        for term in terms:
            for number, form in enumerate(term.source):
                (exact if term.exact else loose).add(form, number, term)
        self._layers: list[_Forms] = [*filter(None, (exact, loose))]
        self._layers += [forms for each in after for forms in each._layers]

    def __bool__(self) -> bool:
        return bool(self._layers)

    def find(self, text: str) -> list[Found]:
        """All that stand in the text, in order; none of them in another one."""
        if not self._layers:
            return []
        marked = _Marked(text)
        gaps, found = [(0, len(marked.plain))], list[Found]()
        for forms in self._layers:
            left: list[tuple[int, int]] = []
            for start, end in gaps:
                for first, last, term, number in forms.find(marked, start, end):
                    found.append(Found(marked.place(first), marked.place(last), term, term.wanted(number)))
                    left.append((start, first))
                    start = last
                left.append((start, end))
            gaps = [(start, end) for start, end in left if start < end]
        return sorted(found, key=lambda each: each.start)

    def places(self, text: str, escaped: bool) -> list[tuple[int, int]]:
        """Where terms start and end in a text that may be `escaped`, as in HTML."""
        if not escaped or "&" not in text:
            return [(each.start, each.end) for each in self.find(text)]
        read, written = list[str](), list[int]()  # without escapes; where each character begins in the text
        done = 0
        for entity in ENTITY.finditer(text):
            one = unescape(entity[0])
            read += (text[done : entity.start()], one)
            written += (*range(done, entity.start()), *[entity.start()] * len(one))
            done = entity.end()
        read.append(text[done:])
        written += range(done, len(text) + 1)
        return [(written[each.start], written[each.end]) for each in self.find("".join(read))]


@dataclass(frozen=True, eq=False)  # it may hold many terms, and is looked up for each segment
class Glossary:
    """Terms for any pair of languages. Of two that have a form in common the first counts."""

    terms: tuple[Term, ...] = ()
    after: tuple["Glossary", ...] = ()  # what counts behind these, in this order
    _pairs: dict[tuple[str, str], Terms] = field(default_factory=dict, init=False, repr=False)

    def __bool__(self) -> bool:
        return bool(self.terms or self.after)

    def pair(self, source: str, target: str) -> Terms:
        """Those for texts in these languages, which may be codes or names; "auto" is any."""
        if not self:
            return NO_TERMS
        made = self._pairs.get((source, target))
        if made is None:
            own = (
                term
                for term in self.terms
                if _is_for(term.source_language, source) and _is_for(term.target_language, target)
            )
            made = Terms(own, [each.pair(source, target) for each in self.after])
            if len(self._pairs) >= MOST_PAIRS:
                self._pairs.clear()
            self._pairs[source, target] = made
        return made

    def before(self, other: "Glossary") -> "Glossary":
        """This one, and what another one has besides. Each keeps its own terms as they are looked up."""
        return Glossary(after=(self, other)) if self and other else self or other


def _is_for(named: str, language: str) -> bool:
    """Whether a term of the language `named` counts in `language`; a plain one counts in its varieties."""
    if not named:
        return True
    own, other = find(named), find(language)
    if own is None or other is None:
        return False
    plain = find(own.code)
    return own.code == other.code and (
        own.name == other.name or (plain is not None and own.name == plain.name)
    )


def parse(text: str) -> Glossary:
    """The glossary of a file's text. Raises GlossaryError."""
    terms: list[Term] = []
    for number, line in enumerate(text.removeprefix("\ufeff").splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        columns = [column.strip() for column in line.split("\t")]
        if len(columns) == 2:
            columns = ["", "", *columns]
        if len(columns) not in (4, 5):
            raise GlossaryError(
                f"line {number} has {len(columns)} columns; a term has 2, or 4 with languages, parted by tabs"
            )
        try:
            terms.append(_term(columns))
        except GlossaryError as error:
            raise GlossaryError(f"line {number}: {error}") from None
    if len(terms) > MOST_TERMS:
        raise GlossaryError(f"it has {len(terms)} terms, and at most {MOST_TERMS} are taken")
    return Glossary(tuple(terms))


def from_pairs(pairs: Mapping[str, str]) -> Glossary:
    """That of a request: terms, and what they become. What lacks one of the two is no term.

    Raises GlossaryError.
    """
    return from_entries(
        (source, target) for source, target in pairs.items() if _forms(source) and _forms(target)
    )


def from_entries(
    entries: Iterable[tuple[str, str]], source_language: str = "", target_language: str = ""
) -> Glossary:
    """Terms, and what they become, for texts in these languages. Raises GlossaryError."""
    terms = tuple(_term([source_language, target_language, *entry]) for entry in entries)
    if (forms := sum(len(term.source) + len(term.target) for term in terms)) > MOST_TERMS:
        raise GlossaryError(f"the terms have {forms} forms, and at most {MOST_TERMS} are taken")
    if (size := sum(map(len, (form for term in terms for form in term.source)))) > MOST_CHARACTERS:
        raise GlossaryError(f"the terms have {size} characters, and at most {MOST_CHARACTERS} are taken")
    return Glossary(terms)


def _forms(side: str) -> tuple[str, ...]:
    return tuple(filter(None, (form.strip() for form in side.split("|"))))


def _term(columns: list[str]) -> Term:
    source_language, target_language, source, target, *options = columns
    for name in (source_language, target_language):
        if name not in ANY and find(name) is None:
            raise GlossaryError(f'"{name[:40]}" is no language; write a code, or * for any')
    if options and options[0] not in ("", "case"):
        raise GlossaryError(f'"{options[0][:40]}" is no option; leave it out, or write case')
    forms = _forms(source), _forms(target)
    if not all(forms):
        raise GlossaryError("a term needs a source and a target")
    if len(forms[1]) > MOST_TARGETS:
        raise GlossaryError(
            f"a term becomes one of {len(forms[1])} forms, and at most {MOST_TARGETS} are taken"
        )
    if max(map(len, (*forms[0], *forms[1]))) > LONGEST:
        raise GlossaryError(f"a form of a term has at most {LONGEST} characters")
    if EDGE in source:
        raise GlossaryError("a term has no character 0 in it")
    source_language = "" if source_language in ANY else source_language
    target_language = "" if target_language in ANY else target_language
    return Term(forms[0], forms[1], source_language, target_language, bool(options and options[0]))


def lower(text: str) -> str:
    """In lower case, each character in its place."""
    lowered = text.lower()
    if len(lowered) == len(text):
        return lowered
    return "".join(c.lower() if len(c.lower()) == 1 else c for c in text)


def is_whole(text: str, start: int, end: int) -> bool:
    """Whether that part of the text is no part of a longer word."""
    before = start == 0 or not (joins_words(text[start]) and joins_words(text[start - 1]))
    return before and (end == len(text) or not (joins_words(text[end - 1]) and joins_words(text[end])))


def places(text: str, form: str) -> list[int]:
    """Where a form stands in the text as a whole word."""
    found, at = [], text.find(form)
    while at >= 0:
        if is_whole(text, at, at + len(form)):
            found.append(at)
        at = text.find(form, at + len(form))
    return found


NO_TERMS = Terms(())
NO_GLOSSARY = Glossary()
