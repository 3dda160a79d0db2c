"""Texts with placeholders, tags, links, code and terms, and what is wrong with their translations."""

import random
from collections import Counter
from collections.abc import Callable

from rwkv_batch.translation.forms import TranslationForm
from rwkv_batch.translation.marks import PLAIN, Mark, fits, split
from rwkv_batch.translation.translator import PromptRow, TextsAsked, Translated, Translator, Words

Model = Callable[[str], str]  # from a prompt to the answer
SENTENCES = (
    ("The dog sees the house.", "dog", "house"),
    ("The cat drinks cold water.", "cat", "water"),
    ("We buy a new car today.", "car", "today"),
    ("My friend reads the old book.", "friend", "book"),
    ("The teacher has three children.", "teacher", "children"),
    ("I do not like the red apple.", "apple", "like"),
    ("She can open the big door.", "door", "open"),
    ("The man works in the garden.", "man", "garden"),
)
TERMS = {"dog": "Vierbeiner", "cat": "Samtpfote", "car": "Kraftwagen", "book": "Wälzer", "door": "Pforte"}
SINGLE = ("{0}", "{name}", "%s", "%d", "`x = 1`", "https://example.org/a?b=c", "<br/>", "{{n}}", "%1$s")
PAIRS = (
    ("<b>", "</b>"),
    ("<b0>", "</b0>"),
    ('<a href="https://example.org/x">', "</a>"),
    ("[", "](https://e.org)"),
)


def generated(number: int) -> str:
    """A text of one to three sentences with marks in them, the same for the same number."""
    dice = random.Random(number)
    sentences = []
    for _ in range(dice.choice((1, 1, 2, 3))):
        words = dice.choice(SENTENCES)[0].split()
        for _ in range(dice.choice((0, 1, 1, 2))):
            words.insert(dice.randrange(len(words)), dice.choice(SINGLE))
        if dice.random() < 0.5:
            start = dice.randrange(len(words) - 1)
            end = dice.randrange(start, len(words) - 1)
            opening, closing = dice.choice(PAIRS)
            words[start] = opening + words[start]
            words[end] += closing
        sentences.append(" ".join(words))
    return dice.choice((" ", "\n", "\n\n")).join(sentences)


def broken(source: str, answer: str) -> str:
    """What is wrong with the marks of a translation; "" if nothing is."""
    wanted, found = ([t for t in split(text, PLAIN) if isinstance(t, Mark)] for text in (source, answer))
    if Counter(mark.text for mark in wanted) != Counter(mark.text for mark in found):
        return f"{source!r} has other marks than {answer!r}"
    return "" if fits(wanted, found) else f"{answer!r} has the marks of {source!r} in no order that parses"


def lacking(source: str, answer: str, terms: dict[str, str]) -> str:
    """The first term that a translation has less often than its source; "" if there is none."""
    plain = [" ".join(t for t in split(text, PLAIN) if isinstance(t, str)) for text in (source, answer)]
    words = [Counter("".join(c if c.isalnum() else " " for c in text).split()) for text in plain]
    for term, wanted in terms.items():
        if words[1][wanted] < words[0][term]:
            return f"{answer!r} has not the {wanted} of {source!r}"
    return ""


def translate(
    asked: TextsAsked, model: Model, form: TranslationForm | None = None
) -> tuple[list[str], list[list[PromptRow]]]:
    """The translations by a model, and the rows of each round: those that it knows of when the last ends."""
    translator, rounds = Translator(asked, form or TranslationForm(), Words()), []
    rows, number = translator.start(), 0
    while rows:
        rounds.append(rows)
        numbers, number = range(number, number + len(rows)), number + len(rows)
        answers = [Translated(model(row.prompt)) for row in rows]
        rows = [row for each in zip(numbers, answers, strict=True) for row in translator.take(*each)]
    return translator.texts(), rounds
