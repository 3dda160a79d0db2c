"""Translates texts by prompts, in rounds: what an answer lacks is asked for again, in smaller pieces.

    1. Each segment whole, with its marks. A term stands as it is to be, where the checkpoint can read that.
    2. A segment whose answer lacks a term is asked for again as it was written, and the term alone, so that
       the model's own word for it can be found in the answer. That word is replaced.
    3. What still lacks a term, or a mark, is translated piece by piece: the text between marks and terms,
       which keep their places.

So marks and terms are always whole. Most segments need the first round alone.
"""

import re
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from html import escape, unescape
from typing import NamedTuple

from rwkv_batch.chat.languages import Language, find
from rwkv_batch.translation.detection import detect_together
from rwkv_batch.translation.forms import TranslationForm
from rwkv_batch.translation.glossary import NO_GLOSSARY, Found, Glossary, Terms, is_whole, places
from rwkv_batch.translation.marks import PLAIN, Handling, Mark, Token, fits, split
from rwkv_batch.translation.segments import Part, Segment, Sentences, cut

AUTO, ENGLISH = "auto", "en"
SHORT_MARK = 8  # characters; a longer one is shown to the model as a shorter one
MOST_ROWS = 4096  # at a time
MOST_WORDS = 20_000  # for terms, that are kept
LONGEST_ENDING = 3  # characters that inflection adds to a word
ENDS = ".!?。！？…:：;；,，"
WIDE = str.maketrans({"{": "[{｛]", "}": "[}｝]", "<": "[<＜]", ">": "[>＞]", "/": "[/／]"})


class PromptRow(NamedTuple):
    """A prompt, and the string behind its answer."""

    prompt: str
    stop: str


class Translated(NamedTuple):
    """What the model has made of a row. `complete`: it has ended by itself."""

    text: str
    complete: bool = True


@dataclass(frozen=True)
class TextsAsked:
    """What is to be translated."""

    texts: Sequence[str]
    target: str  # a language, by code or name
    source: str | None = None  # likewise; None: of each text the one that it seems to be in
    glossary: Glossary = NO_GLOSSARY
    context: str = ""  # what stands around the texts
    sentences: Sentences = "lines"
    handling: Handling = PLAIN


@dataclass
class Words:
    """The model's own words for terms, by source language, target language and term. Kept while it serves."""

    known: dict[tuple[str, str, str], str] = field(default_factory=dict)

    def put(self, key: tuple[str, str, str], word: str) -> None:
        if len(self.known) >= MOST_WORDS:
            self.known.pop(next(iter(self.known)), None)  # threads of streams put words, too
        self.known[key] = word


@dataclass
class _InWork:
    """A segment under way."""

    segment: Segment
    source: str  # the name of the language in prompts
    terms: list[Found]
    names: dict[str, Mark]  # how marks are shown to the model -> what they are
    shown: str  # the segment's text, with marks as they are shown
    replaced: str  # the same with terms as they are to be
    answer: list[Token] = field(default_factory=list)  # the last one with all marks


class Translator:
    """Translates what is asked, by rows that somebody else runs: send their answers into `rounds`."""

    def __init__(self, asked: TextsAsked, form: TranslationForm, words: Words, model: str = "") -> None:
        """`words`: what is known of the model of that name already."""
        self.asked, self._form, self._words, self._model = asked, form, words, model
        target = find(asked.target)
        self._target = target.name if target else asked.target
        self.sources = self._sources(target)
        self.parts: list[Part] = []
        for number, text in enumerate(asked.texts):
            self.parts += cut(text, number, form.most, asked.sentences, asked.handling)
            self.parts.append(_End(number))
        self.segments = [part for part in self.parts if isinstance(part, Segment)]
        self.confidences: list[float]

    def _sources(self, target: Language | None) -> list[str]:
        """The code of each text's language, as the client or the detection names it."""
        if self.asked.source is not None:
            self.confidences = [1.0] * len(self.asked.texts)
            self._names = [name_of(self.asked.source)] * len(self.asked.texts)
            return [self.asked.source] * len(self.asked.texts)
        found = detect_together(list(self.asked.texts), self.asked.context)
        self.confidences = [each.confidence for each in found]
        codes = [each.code or ENGLISH for each in found]  # clients expect that where nothing is known
        # what seems to be in the target's language is likely in another one
        self._names = [AUTO if _is_in(code, target) else name_of(code) for code in codes]
        return codes

    def texts(self) -> list[str]:
        """The translations, once all segments have an answer."""
        made: list[list[str]] = [[] for _ in self.asked.texts]
        number = 0
        for part in self.parts:
            if isinstance(part, _End):
                number += 1
            else:
                made[number].append(part if isinstance(part, str) else part.answer or "")
        return ["".join(pieces) for pieces in made]

    def has_terms(self, segment: Segment) -> bool:
        """Whether there is a term in it."""
        terms = self._terms(segment)
        return any(terms.find(token) for token in segment.tokens if isinstance(token, str))

    def rounds(self) -> Generator[list[PromptRow], list[Translated], None]:
        """Yields the rows of each round, and wants their answers in this order."""
        waiting = [self._begin(segment) for segment in self.segments]
        answers = yield [self._row(work.source, self._first(work)) for work in waiting]
        waiting = [w for w, answer in zip(waiting, answers, strict=True) if not self._take(w, answer)]
        if waiting:
            waiting = yield from self._second(waiting)
        if waiting:
            yield from self._pieces(waiting)

    def _first(self, work: _InWork) -> str:
        return work.replaced if self._form.terms_in_source else work.shown

    def _second(self, waiting: list[_InWork]) -> Generator[list[PromptRow], list[Translated], list[_InWork]]:
        """Translate what was written, with the model's own words for terms. Returns what is left."""
        again = [w for w in waiting if w.terms and self._first(w) != w.shown]
        missing: dict[tuple[str, str, str], tuple[_InWork, Found]] = {}
        for work in waiting:
            for each in work.terms if work.answer or self._first(work) != work.shown else ():
                if (key := self._key(work, each)) not in self._words.known:
                    missing[key] = work, each
        rows = [self._row(w.source, w.shown) for w in again]
        rows += [self._row(w.source, self._source_of(w, each)) for w, each in missing.values()]
        answers = yield from _in_parts(rows)
        for key, answer in zip(missing, answers[len(again) :], strict=True):
            self._words.put(key, answer.text.strip().strip(ENDS) if answer.complete else "")
        for work, answer in zip(again, answers, strict=False):
            self._take(work, answer)
        return [w for w in waiting if w.segment.answer is None and not self._put_in_place(w)]

    def _pieces(self, waiting: list[_InWork]) -> Generator[list[PromptRow], list[Translated], None]:
        """The text between marks and terms by itself."""
        pieces = [self._between(work) for work in waiting]
        rows = [
            self._row(w.source, text[slice(*_inside(text))])
            for w, parts in zip(waiting, pieces, strict=True)
            for text, runs in parts
            if runs
        ]
        answers = iter((yield from _in_parts(rows)))
        for work, parts in zip(waiting, pieces, strict=True):
            made = "".join(self._piece(text, next(answers)) if runs else text for text, runs in parts)
            marks = _marks_of(work.segment.tokens)
            whole = made if self._reads_as(made, marks) else "".join(self._as_it_was(*part) for part in parts)
            work.segment.answer = whole

    def _begin(self, segment: Segment) -> _InWork:
        names: dict[str, Mark] = {}
        source = self._names[segment.text]
        terms = self._terms(segment)
        literal, shown, replaced = segment.source, "", ""
        found: list[Found] = []
        opened: list[tuple[str, str]] = []  # names of pairs that are shown otherwise, and how
        for token in segment.tokens:
            if isinstance(token, Mark):
                name = _shown_as(token, literal, len(names), opened)
                names[name] = token
                shown, replaced = shown + name, replaced + name
                continue
            text, done = self._read(token), 0
            for each in terms.find(text):
                replaced += text[done : each.start] + each.wanted
                done = each.end
                found.append(each._replace(start=len(shown) + each.start, end=len(shown) + each.end))
            shown, replaced = shown + text, replaced + text[done:]
        return _InWork(segment, source, found, names, shown, replaced)

    def _terms(self, segment: Segment) -> Terms:
        return self.asked.glossary.pair(self._names[segment.text], self._target)

    def _take(self, work: _InWork, answer: Translated) -> bool:
        """Whether the answer to a whole segment will do, which it then has."""
        text = answer.text.strip()
        tokens = _tokens(text, work.names)
        if not text or not answer.complete or not self._has_marks(work, tokens):
            return False
        work.answer = tokens
        return self._put(work, tokens)

    def _put(self, work: _InWork, tokens: list[Token]) -> bool:
        """The segment has this answer, unless it lacks a term."""
        if _lacks(work, tokens):
            return False
        work.segment.answer = self._written(tokens)
        return True

    def _has_marks(self, work: _InWork, tokens: Sequence[Token]) -> bool:
        """Whether the marks are those of the source, in an order that parses, and are found as such."""
        marks = [token for token in tokens if isinstance(token, Mark)]
        return fits(_marks_of(work.segment.tokens), marks) and self._reads_as(self._written(tokens), marks)

    def _reads_as(self, text: str, marks: list[Mark]) -> bool:
        found = _marks_of(split(text, self.asked.handling))
        return [mark.text for mark in found] == [mark.text for mark in marks]

    def _put_in_place(self, work: _InWork) -> bool:
        """Whether the model's own words for the missing terms could be replaced in its last answer."""
        tokens = list(work.answer)
        for each in _lacks(work, tokens) if tokens else ():
            word = self._words.known.get(self._key(work, each), "")
            if not word or not _replace_one(tokens, word, each.wanted):
                return False
        return bool(tokens) and self._has_marks(work, tokens) and self._put(work, tokens)

    def _between(self, work: _InWork) -> list[tuple[str, bool]]:
        """The segment in pieces, and which of them are translated."""
        pieces: list[tuple[str, bool]] = []
        terms = self._terms(work.segment)
        for token in work.segment.tokens:
            if isinstance(token, Mark):
                pieces.append((token.text, False))
                continue
            text, done = self._read(token), 0
            for each in terms.find(text):
                pieces += [self._as_piece(text[done : each.start]), (self._write(each.wanted), False)]
                done = each.end
            pieces.append(self._as_piece(text[done:]))
        return pieces

    def _as_it_was(self, text: str, runs: bool) -> str:
        return self._write(text) if runs else text

    def _as_piece(self, text: str) -> tuple[str, bool]:
        runs = any(map(str.isalpha, text))
        return (text, True) if runs else (self._write(text), False)

    def _piece(self, source: str, answer: Translated) -> str:
        """What a piece becomes, between the signs that it had around it."""
        text = "".join(token for token in split(answer.text, self._plain) if isinstance(token, str)).strip()
        start, stop = _inside(source)
        inside = source[start:stop]
        if not text or not answer.complete:
            text = inside
        elif inside[-1] not in ENDS:
            text = text.rstrip(ENDS)
        return self._write(source[:start] + text + source[stop:])

    def _row(self, source: str, text: str) -> PromptRow:
        texts = {"source": source, "target": self._target}
        head, _, tail = self._form.prompt.partition("{text}")
        return PromptRow(head.format(**texts) + text + tail.format(**texts), self._form.stop.format(**texts))

    def _key(self, work: _InWork, term: Found) -> tuple[str, str, str]:
        return f"{self._model}\n{work.source}", self._target, self._source_of(work, term)

    @staticmethod
    def _source_of(work: _InWork, term: Found) -> str:
        return work.shown[term.start : term.end]

    @cached_property
    def _plain(self) -> Handling:
        return Handling(literals=self.asked.handling.literals)

    def _read(self, text: str) -> str:
        """The text in the form that the model sees."""
        return unescape(text) if self.asked.handling.escaped else text

    def _write(self, text: str) -> str:
        return escape(text, quote=False) if self.asked.handling.escaped else text

    def _written(self, tokens: Sequence[Token]) -> str:
        return "".join(self._write(token) if isinstance(token, str) else token.text for token in tokens)


def _in_parts(rows: list[PromptRow]) -> Generator[list[PromptRow], list[Translated], list[Translated]]:
    """Yields as many rows at a time as are taken. Returns all answers."""
    answers: list[Translated] = []
    for start in range(0, len(rows), MOST_ROWS):
        answers += yield rows[start : start + MOST_ROWS]
    return answers


class _End(str):
    """Ends the parts of a text."""

    def __new__(cls, number: int) -> "_End":
        return super().__new__(cls, "")


def _is_in(code: str, target: Language | None) -> bool:
    found = find(code)
    return found is not None and target is not None and found.code == target.code


def name_of(language: str) -> str:
    """The name a model knows a language by; what names none stands for itself."""
    found = find(language)
    return found.name if found else language


def _marks_of(tokens: Sequence[Token]) -> list[Mark]:
    return [token for token in tokens if isinstance(token, Mark)]


def _inside(text: str) -> tuple[int, int]:
    """Where the words of a piece begin and end; a mark at its end belongs to the last one."""
    places = [place for place, letter in enumerate(text) if letter.isalnum()]
    start, stop = places[0], places[-1] + 1
    while stop < len(text) and text[stop] in ENDS:
        stop += 1
    return start, stop


def _shown_as(mark: Mark, literal: str, number: int, opened: list[tuple[str, str]]) -> str:
    """How the model sees a mark: as it is, or as a short one that the text does not have."""
    short = len(mark.text) <= SHORT_MARK and not mark.text.startswith(("[", "![", "]"))
    if mark.kind == "close":
        for i in reversed(range(len(opened))):
            if opened[i][0] == mark.name:
                name = opened.pop(i)[1]
                return f"</{name}>" if name else mark.text
        return mark.text if short else _unused("</x{}>", literal, number)
    if mark.kind == "open":
        name = "" if short else _unused("x{}", literal, number)
        opened.append((mark.name, name))
        return f"<{name}>" if name else mark.text
    return mark.text if short else _unused("{{{}}}", literal, number)


def _unused(form: str, literal: str, number: int) -> str:
    while (name := form.format(number)) in literal:
        number += 1
    return name


def _tokens(text: str, names: dict[str, Mark]) -> list[Token]:
    """An answer, with marks where it has what stands for one."""
    if not names:
        return [text]
    patterns = "|".join(map(_pattern, sorted(names, key=len, reverse=True)))
    tokens: list[Token] = []
    done = 0
    for found in re.finditer(patterns, text):
        name = re.sub(r"\s", "", found[0]).translate(NARROW) if found[0] not in names else found[0]
        if name in names:
            tokens += [text[done : found.start()], names[name]]
            done = found.end()
    return [token for token in (*tokens, text[done:]) if token]


NARROW = str.maketrans("｛｝＜＞／", "{}<>/")


def _pattern(name: str) -> str:
    """Finds a mark that the model has written with spaces in it or in wide characters."""
    if name[0] not in "{<":
        return re.escape(name)
    return r"\s?".join(re.escape(c) if c not in "{}<>/" else c.translate(WIDE) for c in name)


def _lacks(work: _InWork, tokens: Sequence[Token]) -> list[Found]:
    """The terms that an answer does not have, as often as the source."""
    if not work.terms:
        return []
    text = "\n".join(token for token in tokens if isinstance(token, str))
    taken = [False] * len(text)
    lacking = []
    for each in sorted(work.terms, key=lambda t: -max(map(len, t.term.target))):
        for form in (each.wanted, *each.term.target):
            at = next((p for p in places(text, form) if not any(taken[p : p + len(form)])), None)
            if at is not None:
                taken[at : at + len(form)] = [True] * len(form)
                break
        else:
            lacking.append(each)
    return lacking


def _replace_one(tokens: list[Token], word: str, wanted: str) -> bool:
    """Puts a term in the first place where the model's own word stands; whether there is one.

    An ending may follow the word.
    """
    endings = (rf"{re.escape(word)}", rf"{re.escape(word)}\w{{1,{LONGEST_ENDING}}}")
    for ending in endings if len(word) > LONGEST_ENDING else endings[:1]:
        for number, token in enumerate(tokens):
            for found in re.finditer(ending, token, re.IGNORECASE) if isinstance(token, str) else ():
                if isinstance(token, str) and is_whole(token, *found.span()):
                    tokens[number] = token[: found.start()] + wanted + token[found.end() :]
                    return True
    return False
