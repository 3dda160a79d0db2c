"""Which language a text is in: by its script, and where a script has several, by its words (CLD2)."""

import unicodedata
from collections import Counter
from typing import NamedTuple

import pycld2

from rwkv_batch.translation.language.scripts import main_script, script_of

LOOKED_AT = 4000  # characters of a text; more would tell nothing new
# Scripts of one language, or of one that is nearly always meant.
SOLE = {
    "Grek": "el",
    "Armn": "hy",
    "Thaa": "dv",
    "Guru": "pa",
    "Gujr": "gu",
    "Orya": "or",
    "Taml": "ta",
    "Telu": "te",
    "Knda": "kn",
    "Mlym": "ml",
    "Sinh": "si",
    "Thai": "th",
    "Laoo": "lo",
    "Tibt": "bo",
    "Mymr": "my",
    "Geor": "ka",
    "Hang": "ko",
    "Khmr": "km",
    "Kana": "ja",
}
# What a text of these scripts is in that CLD2 knows no language for.
USUAL = {"Cyrl": "ru", "Arab": "ar", "Deva": "hi", "Hebr": "he", "Beng": "bn", "Ethi": "am"}
CODES = {"iw": "he", "no": "nb", "nn": "nb", "jw": "jv"}  # CLD2's that are others here
UNKNOWN = "un"
CANTONESE = frozenset("嘅係唔喺咗啲嚟冇佢哋咁噉嗰睇攞")
CANTONESE_SHARE = 0.08  # of the letters
SHORT = 12  # letters; a shorter text may be a name or a word of many languages
UNSURE = 0.5  # the most confidence in what neighbours may say better
# Of which short texts are taken to be.
FREQUENT = "en de fr es it pt nl sv da fi pl cs hu ro tr vi id ca ru uk bg sr ar fa ur hi he bn am"
COMMON = frozenset(FREQUENT.split())


class Detected(NamedTuple):
    """What a text seems to be in."""

    code: str | None  # None: there is no telling
    confidence: float  # 0 to 1


NOTHING = Detected(None, 0.0)


def detect(text: str) -> Detected:
    """The language of a text, from what it says itself."""
    text = text[:LOOKED_AT]
    script = main_script(text)
    if not script:
        return NOTHING
    if script in SOLE:
        return Detected(SOLE[script], 1.0)
    if script == "Hani":
        return Detected(_chinese(text), 1.0)
    letters = "".join(_only(script, c) for c in text)
    reliable, _, ((_, code, percent, _), *_) = pycld2.detect(letters, isPlainText=True, bestEffort=True)
    code = CODES.get(code, code)
    short = sum(map(str.isalpha, letters)) < SHORT
    if code == UNKNOWN or (code not in COMMON and short):
        return Detected(USUAL[script], UNSURE) if script in USUAL else NOTHING
    return Detected(code, UNSURE if short or not reliable else percent / 100)


def detect_together(texts: list[str], around: str = "") -> list[Detected]:
    """The language of each text. What leaves it open is in that of the others, and of the text `around`.

    That needs letters of the same script, most of which are in one language.
    """
    texts, around = [text[:LOOKED_AT] for text in texts], around[:LOOKED_AT]
    found = [detect(text) for text in texts]
    sure = Counter[tuple[str, str]]()
    for text, each in zip((*texts, around), (*found, detect(around)), strict=True):
        if each.code and each.confidence > UNSURE:
            sure[main_script(text), each.code] += len(text)
    for i, (text, each) in enumerate(zip(texts, found, strict=True)):
        if each.confidence <= UNSURE and (script := main_script(text)):
            alike = {code: size for (of, code), size in sure.items() if of == script}
            if alike:
                code = max(alike, key=lambda c: alike[c])
                found[i] = Detected(code, UNSURE * alike[code] / sum(alike.values()))
    return found


def _only(script: str, letter: str) -> str:
    """The letter if it is none of another script, and nothing that CLD2 refuses."""
    if letter.isascii():
        return letter if script == "Latn" and letter.isprintable() else letter if letter in " .,'" else " "
    if script_of(letter) in (script, "") and unicodedata.category(letter)[0] not in "CSZ":
        return letter
    return " "


def _chinese(text: str) -> str:
    """The code of a Chinese text, by characters of Cantonese, of GB 2312 alone, and of Big5 alone."""
    counts = Counter(c for c in text if script_of(c) == "Hani")
    if sum(counts[c] for c in CANTONESE) > CANTONESE_SHARE * counts.total():
        return "yue"
    traditional = sum(n for c, n in counts.items() if not _is_in("gb2312", c) and _is_in("big5", c))
    simplified = sum(n for c, n in counts.items() if _is_in("gb2312", c) and not _is_in("big5", c))
    return "zh-TW" if traditional > simplified else "zh-CN"


def _is_in(encoding: str, letter: str) -> bool:
    try:
        return bool(letter.encode(encoding))
    except UnicodeEncodeError:
        return False
