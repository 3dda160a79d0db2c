"""Translation examples: fixed phrases in seven languages, composed sentences in four.

There are up to three in a row.
"""

from random import Random

from demo.conversation import conversation
from demo.example import Example, held_out, pick
from demo.phrases import CODES, PHRASES
from demo.sentences import Sentence, sentence
from routes.chat import templates

COMPOSED = {"en": "en", "zh-CN": "zh", "fr": "fr", "de": "de"}  # code -> field of Sentence
MARKS = ".!?。！？ ¡¿"


def code_pair(rng: Random, codes: tuple[str, ...]) -> tuple[str, str]:
    """Two different codes; English and Chinese come up more often, because readers try them first."""
    weights = [3 if code in ("en", "zh-CN") else 1.5 if code in COMPOSED else 1 for code in codes]
    (source,) = rng.choices(codes, weights)
    while True:
        (target,) = rng.choices(codes, weights)
        if target != source:
            return source, target


def join(sentences: list[str], code: str) -> str:
    return ("" if code in ("zh-CN", "ja") else " ").join(sentences)


def render(
    rng: Random, kind: str, text: str, answer: str, source: str, target: str, key: str = ""
) -> Example:
    """Mostly in the form of the translate route, sometimes asked for in a chat."""
    if rng.random() < 0.08:
        request = rng.choice(("Translate to", "Translate into", "Translate this to"))
        return conversation(
            rng,
            kind,
            [templates.Message("user", f"{request} {templates.language(target)}: {text}")],
            answer,
            key=key,
        )
    shown = "auto" if rng.random() < 0.15 else source
    return Example(kind, templates.translation(text, shown, target), f" {answer}", key)


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


def composed(rng: Random, evaluation: bool) -> Example:
    """One to three composed sentences. For evaluation each of them is held out; for training none is."""
    (count,) = rng.choices((1, 2, 3), (0.8, 0.13, 0.07))
    parts: list[Sentence] = [pick(sentence, lambda s: s.key, rng, evaluation) for _ in range(count)]
    codes = tuple(COMPOSED)
    source, target = code_pair(rng, codes)
    text, answer = (
        join([getattr(part, COMPOSED[code]) for part in parts], code) for code in (source, target)
    )
    if count == 1 and rng.random() < 0.12:
        text, answer = text.strip(MARKS), answer.strip(MARKS)
    return render(
        rng,
        "translation",
        text,
        answer,
        source,
        target,
        next((p.key for p in parts if held_out(p.key)), parts[0].key),
    )


def translation(rng: Random, evaluation: bool) -> Example:
    """A translation task; evaluation draws composed sentences only."""
    return composed(rng, evaluation) if evaluation or rng.random() < 0.85 else phrase(rng)
