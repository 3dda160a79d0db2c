"""Scripts of texts, by the blocks of Unicode that their letters are in."""

import re
from bisect import bisect
from collections import Counter

# Blocks: first and last letter, and the script's code of ISO 15924.
BLOCKS = [
    ("A", "Z", "Latn"),
    ("a", "z", "Latn"),
    ("\u00c0", "\u024f", "Latn"),
    ("\u0250", "\u02af", "Latn"),
    ("\u0370", "\u03ff", "Grek"),
    ("\u0400", "\u052f", "Cyrl"),
    ("\u0530", "\u058f", "Armn"),
    ("\u0590", "\u05ff", "Hebr"),
    ("\u0600", "\u06ff", "Arab"),
    ("\u0750", "\u077f", "Arab"),
    ("\u0780", "\u07bf", "Thaa"),
    ("\u0900", "\u097f", "Deva"),
    ("\u0980", "\u09ff", "Beng"),
    ("\u0a00", "\u0a7f", "Guru"),
    ("\u0a80", "\u0aff", "Gujr"),
    ("\u0b00", "\u0b7f", "Orya"),
    ("\u0b80", "\u0bff", "Taml"),
    ("\u0c00", "\u0c7f", "Telu"),
    ("\u0c80", "\u0cff", "Knda"),
    ("\u0d00", "\u0d7f", "Mlym"),
    ("\u0d80", "\u0dff", "Sinh"),
    ("\u0e00", "\u0e7f", "Thai"),
    ("\u0e80", "\u0eff", "Laoo"),
    ("\u0f00", "\u0fff", "Tibt"),
    ("\u1000", "\u109f", "Mymr"),
    ("\u10a0", "\u10ff", "Geor"),
    ("\u1100", "\u11ff", "Hang"),
    ("\u1200", "\u137f", "Ethi"),
    ("\u1780", "\u17ff", "Khmr"),
    ("\u1e00", "\u1eff", "Latn"),
    ("\u1f00", "\u1fff", "Grek"),
    ("\u3041", "\u30ff", "Kana"),
    ("\u3130", "\u318f", "Hang"),
    ("\u31f0", "\u31ff", "Kana"),
    ("\u3400", "\u4dbf", "Hani"),
    ("\u4e00", "\u9fff", "Hani"),
    ("\uac00", "\ud7af", "Hang"),
    ("\uf900", "\ufaff", "Hani"),
    ("\U00020000", "\U0003ffff", "Hani"),
]
STARTS = [first for first, _, _ in BLOCKS]
LATIN_PER_WORD = 4  # Latin words stand in texts of any script, and take more letters than Chinese ones
KANA_SHARE = 0.1  # Japanese mixes kana with Han letters; a Chinese text may quote a kana
# Scripts whose words are not parted by spaces, or that write particles behind a word without one.
UNSPACED = frozenset({"Hani", "Kana", "Hang", "Thai", "Laoo", "Khmr", "Mymr", "Tibt"})
_unspaced = "".join(f"{first}-{last}" for first, last, script in BLOCKS if script in UNSPACED)
WORD = re.compile(
    rf"(?:\d|(?![{_unspaced}])[^\W_])+"
)  # letters and digits of scripts that part words by spaces


def script_of(letter: str) -> str:
    """The script of a letter; "" if it is no letter of these."""
    place = bisect(STARTS, letter)
    if not place:
        return ""
    _, last, script = BLOCKS[place - 1]
    return script if letter <= last and letter.isalpha() else ""


def main_script(text: str) -> str:
    """The script of most letters; "Kana" for Japanese, which mixes it with "Hani"; "" without letters."""
    counts: Counter[str] = Counter()
    for letter, count in Counter(text).items():
        if script := script_of(letter):
            counts[script] += count * LATIN_PER_WORD
    counts["Latn"] //= LATIN_PER_WORD
    if counts["Kana"] and counts["Kana"] >= KANA_SHARE * (counts["Kana"] + counts["Hani"]):
        counts["Kana"] += counts.pop("Hani", 0)
    script, count = max(counts.items(), key=lambda item: item[1])
    return script if count else ""


def joins_words(letter: str) -> bool:
    """Whether it is a letter or digit of a script that parts words by spaces."""
    return WORD.match(letter) is not None
