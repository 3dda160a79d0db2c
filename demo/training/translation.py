"""Translation examples: fixed phrases in seven languages; composed sentences, phrases and words in four."""

import re
from random import Random

from demo.training.conversation import conversation
from demo.training.example import Example, pick
from demo.training.lexicon import LANGUAGES
from demo.training.meaning import Sentence
from demo.training.phrases import CODES, PHRASES
from demo.training.sentences import sentence
from rwkv_batch.chat import templates

COMPOSED = {"en": "en", "zh-CN": "zh", "fr": "fr", "de": "de"}  # code -> field of Sentence
MARKS = ".!?。！？ ¡¿"
REQUESTS = (
    "Translate to {}: {}", "Translate to {}: {}", "Translate into {}: {}", "Translate this to {}: {}", "Translate into {}:\n{}",
    "Please translate into {}: {}", "{1} in {0}?", "How do you say in {}: {}", "Say in {}: {}", "translate to {}: {}",
)  # fmt: skip
LOCAL = {  # requests in the language of the one who asks: names of the target languages
    "zh": ("翻译成{}：{}", {"en": "英语", "zh": "中文", "fr": "法语", "de": "德语"}),
    "fr": ("Traduis en {} : {}", {"en": "anglais", "zh": "chinois", "fr": "français", "de": "allemand"}),
    "de": (
        "Übersetze ins {}: {}",
        {"en": "Englische", "zh": "Chinesische", "fr": "Französische", "de": "Deutsche"},
    ),
}
SHORTER = (  # English that is only read, never written
    (" do not ", " don't "), (" does not ", " doesn't "), (" did not ", " didn't "), (" cannot ", " can't "), (" will not ", " won't "),
    (" is not ", " isn't "), (" are not ", " aren't "), (" was not ", " wasn't "), (" were not ", " weren't "),
    (" should not ", " shouldn't "), ("I am ", "I'm "), ("I will ", "I'll "), ("I would ", "I'd "), ("He is ", "He's "),
    ("She is ", "She's "), ("We are ", "We're "), ("They are ", "They're "), ("It is ", "It's "), ("There is ", "There's "),
    ("You are ", "You're "),
)  # fmt: skip


def code_pair(rng: Random, codes: tuple[str, ...]) -> tuple[str, str]:
    """Two different codes; English and Chinese come up more often, because readers try them first."""
    weights = [2 if code in ("en", "zh-CN") else 1.5 if code in COMPOSED else 1 for code in codes]
    (source,) = rng.choices(codes, weights)
    while True:
        (target,) = rng.choices(codes, weights)
        if target != source:
            return source, target


def join(sentences: list[str], code: str) -> str:
    return ("" if code in ("zh-CN", "ja") else " ").join(sentences)


def render(
    rng: Random,
    kind: str,
    text: str,
    answer: str,
    source: str,
    target: str,
    key: str = "",
    names: tuple[str, ...] = (),
) -> Example:
    """Mostly in the form of the translate route, sometimes asked for in a chat."""
    if rng.random() < 0.15:
        asked = rng.choice(REQUESTS).format(templates.language(target), text)
        here, there = COMPOSED.get(source, ""), COMPOSED.get(target, "")
        if here in LOCAL and there and rng.random() < 0.4:
            form, called = LOCAL[here]
            asked = form.format(called[there], text)
        return conversation(rng, kind, [templates.Message("user", asked)], answer, key=key, names=names)
    shown = "auto" if rng.random() < 0.15 else source
    return Example(kind, templates.translation(text, shown, target), f" {answer}", key, names)


def phrase(rng: Random) -> Example:
    """A fixed phrase or two, sometimes in lower case, sometimes without the final mark.

    Without it the answer has none either.
    """
    source, target = code_pair(rng, CODES)
    texts, answers = [], []
    for _ in range(1 if rng.random() < 0.75 else 2):
        row = rng.choice(PHRASES[:4]) if rng.random() < 0.2 else rng.choice(PHRASES)
        texts.append(rng.choice([form for form in row[CODES.index(source)] if not form.startswith("=")]))
        answers.append(row[CODES.index(target)][0].removeprefix("="))
    text, answer = join(texts, source), join(answers, target)
    if rng.random() < 0.3:
        text, answer = text.strip(MARKS), answer.strip(MARKS)
    if rng.random() < 0.1:
        text = text.lower()
    return render(rng, "phrase", text, answer, source, target)


def as_typed(rng: Random, text: str, code: str, names: tuple[str, ...], alone: bool) -> str:
    """A source in one of the ways in which people write it."""
    if code == "en" and rng.random() < 0.35:
        for full, short in SHORTER:
            if text.startswith(full) or full.startswith(" "):
                text = text.replace(full, short, 1)
    if code == "en" and not names and alone and rng.random() < 0.05:
        text = text.lower()
    if code == "zh" and names and rng.random() < 0.3:
        for name in names:
            text = text.replace(name, f" {name} ").strip()
    if code == "fr" and rng.random() < 0.1:
        text = re.sub(r" ([?!])", r"\1", text)
    return text


def composed(rng: Random) -> Example:
    """One to three composed sentences, none of them held out."""
    (count,) = rng.choices((1, 2, 3), (0.86, 0.1, 0.04))
    while True:
        parts: list[Sentence] = [pick(sentence, lambda s: s.key, rng, evaluation=False) for _ in range(count)]
        unclear = frozenset[str]().union(*(part.unclear for part in parts))
        if len(unclear) < len(LANGUAGES) and (count == 1 or all(part.en[-1] in ".?" for part in parts)):
            break
    while True:
        source, target = code_pair(rng, tuple(COMPOSED))
        if COMPOSED[source] not in unclear:
            break
    copied = tuple(name for part in parts for name in part.names)
    code = COMPOSED[source]
    texts = [as_typed(rng, getattr(part, code), code, part.names, count == 1) for part in parts]
    text, answer = join(texts, source), join([getattr(part, COMPOSED[target]) for part in parts], target)
    if count == 1 and text[-1] in ".?。？" and rng.random() < 0.15:
        text, answer = text.strip(MARKS), answer.strip(MARKS)
    return render(rng, "translation", text, answer, source, target, parts[0].key, copied)


def translation(rng: Random) -> Example:
    """A translation task."""
    return composed(rng) if rng.random() < 0.92 else phrase(rng)
