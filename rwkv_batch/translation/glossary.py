"""Terms that must be translated in a certain way.

A file of terms has one on each line, in columns that tabs part:

    source term <TAB> target term
    source language <TAB> target language <TAB> source term <TAB> target term [<TAB> case]

A language is a code or a name, and `*` or nothing is any. Forms of a term are parted by `|`: those of the
source are all found, and any of the target's will do. Where both have as many, each form of the source asks
for the one in its place, otherwise for the first. `case`: the source counts in this case only. Lines that
begin with `#` are left out.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from rwkv_batch.chat.languages import find
from rwkv_batch.translation.scripts import joins_words

ANY = ("", "*")
MOST_TERMS, LONGEST = 50_000, 200  # of a glossary, and characters of a form
MOST_PAIRS = 64  # of languages, for which terms are kept
KEY = 8  # first characters by which a form is looked up


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


class Terms:
    """The terms for one pair of languages, looked up in texts."""

    def __init__(self, terms: Iterable[Term], after: "Terms | None" = None) -> None:
        """Of two that have a form in common the first counts. `after`: others, which count behind these."""
        self._after = after
        self._sizes: dict[str, list[int]] = {}  # of the forms that begin so
        self._forms: dict[str, list[tuple[str, int, Term]]] = {}  # by a form in lower case
        seen: set[tuple[str, bool]] = set()
        for term in terms:
            for number, form in enumerate(term.source):
                if (entry := (form if term.exact else lower(form), term.exact)) not in seen:
                    seen.add(entry)
                    self._forms.setdefault(lower(form), []).append((form, number, term))
        for form in self._forms:
            self._sizes.setdefault(form[:KEY], []).append(len(form))
        for key, sizes in self._sizes.items():
            self._sizes[key] = sorted(set(sizes), reverse=True)  # the longest one counts

    def __bool__(self) -> bool:
        return bool(self._forms) or bool(self._after)

    def find(self, text: str) -> list[Found]:
        """All that stand in the text, in order; none of them in another one."""
        found: list[Found] = []
        if not self:
            return found
        lowered, at = lower(text), 0
        while at < len(text):
            if each := self.at(text, lowered, at):
                found.append(each)
                at = each.end
            else:
                at += 1
        return found

    def at(self, text: str, lowered: str, at: int) -> Found | None:
        """The term that begins there. `lowered`: the text as `lower` has it."""
        if at and joins_words(lowered[at]) and joins_words(lowered[at - 1]):
            return None  # inside of a word
        for length in range(KEY, 0, -1):
            for size in self._sizes.get(lowered[at : at + length], ()):
                end = at + size
                for form, number, term in self._forms.get(lowered[at:end], ()):
                    if (not term.exact or text.startswith(form, at)) and is_whole(text, at, end):
                        return Found(at, end, term, term.wanted(number))
        return self._after.at(text, lowered, at) if self._after else None


@dataclass(frozen=True, eq=False)  # it may hold many terms, and is looked up for each segment
class Glossary:
    """Terms for any pair of languages. Of two that have a form in common the first counts."""

    terms: tuple[Term, ...] = ()
    after: "Glossary | None" = None  # what counts behind these
    _pairs: dict[tuple[str, str], Terms] = field(default_factory=dict, init=False, repr=False)

    def pair(self, source: str, target: str) -> Terms:
        """Those for texts in these languages, which may be codes or names; "auto" is any."""
        if not (self.terms or self.after):
            return NO_TERMS
        made = self._pairs.get((source, target))
        if made is None:
            own = (
                term
                for term in self.terms
                if _is_for(term.source_language, source) and _is_for(term.target_language, target)
            )
            made = Terms(own, self.after.pair(source, target) if self.after else None)
            if len(self._pairs) >= MOST_PAIRS:
                self._pairs.clear()
            self._pairs[source, target] = made
        return made

    def before(self, other: "Glossary") -> "Glossary":
        """This one, and what another one has besides."""
        return Glossary(self.terms, other) if self.terms else other


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
    given = [(source, target) for source, target in pairs.items() if _forms(source) and _forms(target)]
    terms = tuple(_term(["", "", source, target]) for source, target in given)
    if (forms := sum(len(term.source) + len(term.target) for term in terms)) > MOST_TERMS:
        raise GlossaryError(f"the terms have {forms} forms, and at most {MOST_TERMS} are taken")
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
    if max(map(len, (*forms[0], *forms[1]))) > LONGEST:
        raise GlossaryError(f"a form of a term has at most {LONGEST} characters")
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
