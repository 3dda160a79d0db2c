"""Translates texts by prompts. What an answer lacks is asked for again as soon as that answer is there.

    1. Each segment whole, with its marks. A term stands as it is to be, where the checkpoint can read that.
       Where it cannot, each term is asked for by itself beside the segments, unless it is known.
    2. A segment whose answer lacks a term is asked for again as it was written, and the term alone, unless
       that was done. The model's own word for the term is found in the answer, and replaced.
    3. Where that word is a part of a longer one, the term takes its place, and the model goes on behind it.
    4. What still lacks a term, or a mark, is translated piece by piece: the text between marks and terms,
       which keep their places.

So marks and terms are always whole. Most segments need one row, and none waits for the rows of another.
Those with terms come first, so that what they lack runs beside the others.
"""

import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from html import escape, unescape
from threading import Lock
from typing import NamedTuple, TypeVar

from rwkv_batch.chat.languages import Language, find, name_of
from rwkv_batch.translation.forms import TranslationForm
from rwkv_batch.translation.glossary import NO_GLOSSARY, Found, Glossary, Terms, is_whole, lower, places
from rwkv_batch.translation.language.detection import detect_together
from rwkv_batch.translation.marks import PLAIN, Handling, Mark, Token, fits, split
from rwkv_batch.translation.segments import Part, Segment, Sentences, cut, nothing

AUTO, ENGLISH = "auto", "en"
SHORT_MARK = 8  # characters; a longer one is shown to the model as a shorter one
MOST_WORDS = 20_000  # for terms, that are kept
MOST_AROUND = 300  # characters in front of a prompt
LONGEST_ENDING = 3  # characters that inflection adds to a word
MOST_BESIDE = 40  # characters on each side of a term by which it is known again
LAST_WORD, NEXT_WORD = re.compile(r"\w+\W*$"), re.compile(r"\W*\w+")
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
    context: str = ""  # what stands around the texts; without it each stands behind the one before
    sentences: Sentences = "lines"
    handling: Handling = PLAIN


WordKey = tuple[str, str, str]
Kept = TypeVar("Kept")


@dataclass
class Words:
    """The model's own words for terms, by source language, target language and term. Kept while it serves.

    `hidden`: terms between the words around them whose own word was not found in the translation.
    """

    known: dict[WordKey, str] = field(default_factory=dict)
    hidden: dict[WordKey, None] = field(default_factory=dict)
    # Threads of streams put words, too.
    _changing: Lock = field(default_factory=Lock, repr=False, compare=False)

    def put(self, key: WordKey, word: str) -> None:
        self._keep(self.known, key, word)

    def hide(self, key: WordKey) -> None:
        self._keep(self.hidden, key, None)

    def _keep(self, among: dict[WordKey, Kept], key: WordKey, kept: Kept) -> None:
        with self._changing:
            if key not in among and len(among) >= MOST_WORDS:
                del among[next(iter(among))]
            among[key] = kept


@dataclass(eq=False)
class _InWork:
    """A segment under way."""

    segment: Segment
    source: str  # the name of the language in prompts
    around: str  # what is put in front of prompts
    terms: list[Found]
    names: dict[str, Mark]  # how marks are shown to the model -> what they are
    shown: str  # the segment's text, with marks as they are shown
    replaced: str  # the same with terms as they are to be
    answer: list[Token] = field(default_factory=list)  # the last one with all marks
    waits: int = 0  # for so many rows
    goes_on: bool = False  # it was tried to go on behind a term


@dataclass
class _Pieces:
    """A segment that is translated in pieces."""

    work: _InWork
    texts: list[tuple[str, bool]]  # with whether it is translated
    made: dict[int, str] = field(default_factory=dict)  # by place

    @property
    def asked(self) -> list[int]:
        return [place for place, (_, runs) in enumerate(self.texts) if runs]


Taking = Callable[[Translated], list[PromptRow]]  # from an answer to what it makes necessary


class Translator:
    """Translates what is asked, by rows that somebody else runs: those of `start`, and those of `take`."""

    def __init__(self, asked: TextsAsked, form: TranslationForm, words: Words, model: str = "") -> None:
        """`words`: what is known of the model of that name already."""
        self.asked, self._form, self._words, self._model = asked, form, words, model
        self._taking: dict[int, Taking] = {}  # of rows that run, by number
        self._asked = 0  # rows so far
        self._wholes: dict[int, int] = {}  # row -> the segment that it is
        self._asking: dict[WordKey, list[_InWork]] = {}  # words, and what waits for them
        target = find(asked.target)
        self._target = target.name if target else asked.target
        self.sources = self._sources(target)
        self.parts: list[Part] = []
        for number, text in enumerate(asked.texts):
            terms = asked.glossary.pair(self._names[number], self._target)
            whole = partial(terms.places, escaped=asked.handling.escaped) if terms else nothing
            self.parts += cut(text, number, form.most, asked.sentences, asked.handling, whole)
            self.parts.append(_End(number))
        self.segments = [part for part in self.parts if isinstance(part, Segment)]
        self.confidences: list[float]
        self.most_pieces = 0  # rows that segments may become, once it has started

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

    def keep_apart(self) -> None:
        """Keep for this alone what its answers say of the model, which runs it otherwise than for others."""
        self._words = Words({**self._words.known}, {**self._words.hidden})

    def has_terms(self, segment: Segment) -> bool:
        """Whether there is a term in it."""
        terms = self._terms(segment)
        return any(terms.find(token) for token in segment.tokens if isinstance(token, str))

    def start(self) -> list[PromptRow]:
        """The rows that are known at once."""
        works = [self._begin(*each) for each in zip(self.segments, self._around(), strict=True)]
        self.most_pieces = sum(len(work.segment.tokens) + len(work.terms) for work in works)
        numbers = sorted(range(len(works)), key=lambda number: not works[number].terms)
        rows = [row for number in numbers for row in self._ask_first(works[number], number)]
        if not self._form.terms_in_source:
            whole = [works[number] for number in numbers if works[number].waits]
            rows += [row for work in whole for row in self._ask_words(work)]
        return rows

    def _ask_first(self, work: _InWork, number: int) -> list[PromptRow]:
        """All of a segment; or pieces, where a term of it was not found between the same words before."""
        hidden = self._words.hidden
        if hidden and any(self._around_term(work, term) in hidden for term in work.terms):
            return self._ask_pieces(work)
        self._wholes[self._asked] = number
        return [self._ask_whole(work, self._first(work))]

    def whole(self, row: int) -> int | None:
        """The number of the segment that a row is for, if it is the first one for all of it."""
        return self._wholes.get(row)

    def take(self, number: int, answer: Translated) -> list[PromptRow]:
        """The answer to a row. Returns further rows, whose numbers follow those of all before."""
        return self._taking.pop(number)(answer)

    def _ask(self, source: str, text: str, take: Taking) -> PromptRow:
        self._taking[self._asked] = take
        self._asked += 1
        texts = {"source": source, "target": self._target}
        head, _, tail = self._form.prompt.partition("{text}")
        prompt = head.format(**texts) + text + tail.format(**texts)
        return PromptRow(prompt, self._form.stop.format(**texts))

    def _ask_whole(self, work: _InWork, text: str) -> PromptRow:
        work.waits += 1
        row = self._ask(work.source, text, partial(self._take_whole, work, text))
        return row._replace(prompt=work.around + row.prompt)

    def _take_whole(self, work: _InWork, text: str, answer: Translated) -> list[PromptRow]:
        work.waits -= 1
        if self._take(work, answer):
            return []
        rows = []
        if work.terms and text != work.shown:
            rows.append(self._ask_whole(work, work.shown))
        if work.answer or text != work.shown:
            rows += self._ask_words(work)
        return rows or self._settle(work)

    def _ask_words(self, work: _InWork) -> list[PromptRow]:
        """The segment waits for the model's own words for its terms; rows for those that are not known."""
        rows = []
        for term in work.terms:
            if (key := self._key(work, term)) in self._words.known:
                continue
            if key not in self._asking:
                self._asking[key] = []
                rows.append(
                    self._ask(work.source, self._source_of(work, term), partial(self._take_word, key))
                )
            self._asking[key].append(work)
            work.waits += 1
        return rows

    def _take_word(self, key: WordKey, answer: Translated) -> list[PromptRow]:
        self._words.put(key, answer.text.strip().strip(ENDS) if answer.complete else "")
        waiting = self._asking.pop(key)
        for work in waiting:
            work.waits -= 1
        return [row for work in dict.fromkeys(waiting) for row in self._settle(work)]

    def _settle(self, work: _InWork) -> list[PromptRow]:
        """What is left to do for a segment once all that it waits for is there."""
        if work.waits or work.segment.answer is not None or self._put_in_place(work):
            return []
        if begun := self._begun(work):
            work.waits += 1
            row = self._ask(work.source, work.shown, partial(self._take_rest, work, begun))
            return [row._replace(prompt=f"{work.around}{row.prompt} {begun}")]
        self._note_hidden(work)
        return self._ask_pieces(work)

    def _note_hidden(self, work: _InWork) -> None:
        """Of which terms the model's own word does not stand in its last answer."""
        tokens = list(work.answer)
        for term in _lacks(work, tokens) if tokens else ():
            word = self._words.known.get(self._key(work, term), "")
            if not (word and _replace_one(tokens, word, term.wanted)):
                self._words.hide(self._around_term(work, term))

    def _around_term(self, work: _InWork, term: Found) -> WordKey:
        """A term with the words on both sides."""
        before = LAST_WORD.search(work.shown[max(0, term.start - MOST_BESIDE) : term.start])
        after = NEXT_WORD.match(work.shown[term.end : term.end + MOST_BESIDE])
        phrase = (before[0] if before else "", self._source_of(work, term), after[0] if after else "")
        return f"{self._model}\n{work.source}", self._target, "\n".join(phrase)

    def _ask_pieces(self, work: _InWork) -> list[PromptRow]:
        pieces = _Pieces(work, self._between(work))
        rows = [
            self._ask(work.source, text[slice(*_inside(text))], partial(self._take_piece, pieces, place))
            for place, (text, runs) in enumerate(pieces.texts)
            if runs
        ]
        if not rows:
            self._put_together(pieces)
        return rows

    def _begun(self, work: _InWork) -> str:
        """The last answer up to where the model's own word is a part of a longer one, and the term there."""
        tokens = list(work.answer)
        for each in _lacks(work, tokens) if tokens and not work.goes_on else ():
            word = self._words.known.get(self._key(work, each), "")
            if word and _replace_one(tokens, word, each.wanted):
                continue
            if not word or (before := _before_compound(tokens, word)) is None:
                break
            work.goes_on = True
            names = {mark.text: name for name, mark in work.names.items()}
            return (
                "".join(names.get(t.text, t.text) if isinstance(t, Mark) else t for t in before) + each.wanted
            )
        return ""

    def _take_rest(self, work: _InWork, begun: str, answer: Translated) -> list[PromptRow]:
        work.waits -= 1
        whole = answer._replace(text=begun + answer.text)
        return [] if self._take(work, whole) else self._settle(work)

    def _take_piece(self, pieces: _Pieces, place: int, answer: Translated) -> list[PromptRow]:
        pieces.made[place] = self._piece(pieces.texts[place][0], answer)
        if len(pieces.made) == len(pieces.asked):
            self._put_together(pieces)
        return []

    def _put_together(self, pieces: _Pieces) -> None:
        """The text between marks and terms, each translated by itself."""
        parts = list(enumerate(pieces.texts))
        made = "".join(pieces.made[place] if runs else text for place, (text, runs) in parts)
        marks = _marks_of(pieces.work.segment.tokens)
        as_it_was = "".join(self._as_it_was(*part) for part in pieces.texts)
        pieces.work.segment.answer = made if self._reads_as(made, marks) else as_it_was

    def _first(self, work: _InWork) -> str:
        return work.replaced if self._form.terms_in_source else work.shown

    def _around(self) -> list[str]:
        """What is put in front of the prompt of each segment."""
        form = self._form.context
        if not form:
            return [""] * len(self.segments)
        before = ["", *(segment.source for segment in self.segments)]
        shown = [_ending(self.asked.context or text) for text in before[: len(self.segments)]]
        head, _, tail = form.partition("{context}")
        fronts = []
        for segment, text in zip(self.segments, shown, strict=True):
            texts = {"source": self._names[segment.text], "target": self._target}
            fronts.append(head.format(**texts) + text + tail.format(**texts) if text else "")
        return fronts

    def _begin(self, segment: Segment, around: str) -> _InWork:
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
        return _InWork(segment, source, around, found, names, shown, replaced)

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

    def _key(self, work: _InWork, term: Found) -> WordKey:
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


def _ending(text: str) -> str:
    """The last words of a text, in one line: a blank one would end a prompt."""
    line = " ".join(text.split())
    if len(line) <= MOST_AROUND:
        return line
    return line[-MOST_AROUND:].partition(" ")[2] or line[-MOST_AROUND:]


class _End(str):
    """Ends the parts of a text."""

    def __new__(cls, number: int) -> "_End":
        return super().__new__(cls, "")


def _is_in(code: str, target: Language | None) -> bool:
    found = find(code)
    return found is not None and target is not None and found.code == target.code


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
    untried: dict[str, Iterator[int]] = {}  # by form, the places that were free until now
    absent: set[int] = set()  # terms of which no form stands anywhere any more
    terms = {id(each.term): each.term for each in work.terms}
    longest = {key: max(map(len, term.target)) for key, term in terms.items()}
    lacking = []
    for each in sorted(work.terms, key=lambda found: -longest[id(found.term)]):
        forms = () if id(each.term) in absent else (each.wanted, *each.term.target)
        for form in forms:
            if (left := untried.get(form)) is None:
                left = untried[form] = iter(places(text, form))
            at = next((p for p in left if not any(taken[p : p + len(form)])), None)
            if at is not None:
                taken[at : at + len(form)] = [True] * len(form)
                break
        else:
            absent.add(id(each.term))
            lacking.append(each)
    return lacking


def _replace_one(tokens: list[Token], word: str, wanted: str) -> bool:
    """Puts a term in the first place where the model's own word stands; whether there is one.

    An ending may follow the word.
    """
    plain = re.escape(_folded(word))
    endings = (plain, rf"{plain}\w{{1,{LONGEST_ENDING}}}")
    for ending in endings if len(word) > LONGEST_ENDING else endings[:1]:
        for number, token in enumerate(tokens):
            for found in re.finditer(ending, _folded(token)) if isinstance(token, str) else ():
                if isinstance(token, str) and is_whole(token, *found.span()):
                    tokens[number] = token[: found.start()] + wanted + token[found.end() :]
                    return True
    return False


def _before_compound(tokens: list[Token], word: str) -> list[Token] | None:
    """What stands in front of a longer word that begins or ends with this one; None if there is none."""
    if len(word) <= LONGEST_ENDING:
        return None
    plain = re.escape(_folded(word))
    compound = re.compile(rf"\b(?:{plain}\w+|\w+{plain}\w{{0,{LONGEST_ENDING}}}\b)")
    for number, token in enumerate(tokens):
        if isinstance(token, str) and (found := compound.search(_folded(token))):
            return [*tokens[:number], token[: found.start()]]
    return None


def _folded(text: str) -> str:
    """In lower case and without accents, each character in its place: inflection may change these."""
    lowered = lower(text)
    return lowered if lowered.isascii() else "".join(unicodedata.normalize("NFD", c)[0] for c in lowered)
