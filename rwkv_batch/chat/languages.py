"""Finds the language that a request names by a code, or by its English, Chinese or own name.

Codes are read as BCP 47 (RFC 5646) says: language, then script, region and variants, in any case. Where a
script or region means another text, as in zh-TW, the name in the prompt says so.
"""

import re
import unicodedata
from functools import cache, lru_cache
from typing import NamedTuple

from rwkv_batch.chat.chinese_names import CHINESE_NAMES
from rwkv_batch.chat.language_names import LANGUAGES, PLAIN, SCRIPT_OF_REGION, SCRIPTS, TAGS, VARIANTS

EXTENDED = ("ar", "kok", "lv", "ms", "sw", "uz", "zh")  # which may stand before a language's own code: zh-yue
TAG = re.compile(r"[a-z]{2,3}(-[a-z0-9]{1,8})*")
IN_SCRIPT = re.compile(r"(.+?)\s*[(（](.+)[)）]")  # "Serbian (Latin)"


class Language(NamedTuple):
    """A language, maybe one of its varieties."""

    code: str  # of the language alone
    name: str  # in prompts


class _Index(NamedTuple):
    """The tables of language_names, by what is looked up in them. Tags are in lower case."""

    codes: dict[str, str]  # each code -> the first one of the language
    names: dict[str, str]  # first code -> name in prompts
    scripts: dict[str, str]  # first code -> in which it is written
    varieties: dict[str, str]  # tag -> name in prompts
    region_scripts: dict[str, str]  # tag -> script
    called: dict[str, Language]  # by folded names


@lru_cache(1024)  # a request names the same for each of its texts
def find(text: str) -> Language | None:
    """The language that `text` names; None if that is none."""
    text = text.strip()
    tag = text.lower().replace("_", "-")
    return _by_tag(tag) or _index().called.get(_fold(text)) or _by_script(text)


def name_of(language: str) -> str:
    """The name by which a model knows a language; what names none stands for itself."""
    found = find(language)
    return found.name if found else language


def languages() -> list[str]:
    """The codes of all languages and varieties, each in one form."""
    return sorted([*_index().names, *VARIANTS])


def _by_tag(tag: str) -> Language | None:
    codes, tag = _index().codes, TAGS.get(tag, tag)
    if tag in codes:
        return _variety(codes[tag], [])
    if not TAG.fullmatch(tag):
        return None
    first, *rest = tag.split("-")
    if first in EXTENDED and rest and len(rest[0]) == 3 and rest[0] in codes:
        first, *rest = rest
    return _variety(codes[first], rest) if first in codes else None


def _variety(code: str, subtags: list[str]) -> Language | None:
    """The language of that code with the subtags behind it. None if one of them cannot be one."""
    index, script, name = _index(), "", ""
    for subtag in subtags:
        if len(subtag) == 1:  # what follows is an extension, which means no other text
            break
        if len(subtag) == 4 and subtag.isalpha():
            script = subtag.title()
        elif len(subtag) < 4 and (len(subtag) == 2) != subtag.isalpha():
            return None  # no region
        tag = f"{code}-{subtag}"
        name = name or index.varieties.get(tag, "")
        script = script or index.region_scripts.get(tag, "")
    if script and script not in SCRIPTS:
        return None
    return Language(code, name or _written(code, script))


def _written(code: str, script: str) -> str:
    index = _index()
    if script in ("", index.scripts[code]):
        return index.names[code]
    return index.varieties.get(f"{code}-{script.lower()}") or f"{index.names[code]} ({SCRIPTS[script]})"


def _by_script(text: str) -> Language | None:
    index = _index()
    if match := IN_SCRIPT.fullmatch(text):
        language = index.called.get(_fold(match[1]))
        named = _fold(match[2])
        script = next((code for code, name in SCRIPTS.items() if _fold(name) == named), None)
        if language and script:
            return Language(language.code, _written(language.code, script))
    return None


@cache
def _index() -> _Index:
    index = _Index({}, {}, {}, {}, {}, {})
    for line in LANGUAGES.strip().splitlines():
        codes, script, english, own = line.split("|")
        first, *_ = codes.split()
        index.codes.update(dict.fromkeys(codes.split(), first))
        index.names[first], *_ = english.split("/")
        index.scripts[first] = script or "Latn"
        _call(index, f"{english}/{own}", Language(first, index.names[first]))
    for code, names in PLAIN.items():
        _call(index, names, Language(code, index.names[code]))
    for tag, names in VARIANTS.items():
        index.varieties[tag.lower()], *_ = names.split("/")
        _call(index, names, Language(tag.split("-")[0], index.varieties[tag.lower()]))
    for script, tags in SCRIPT_OF_REGION.items():
        index.region_scripts.update(dict.fromkeys(map(str.lower, tags), script))
    for code, names in CHINESE_NAMES.items():
        found = Language("zh", index.varieties["zh-hant"]) if code == "zh-TW" else None
        _call(index, names, found or Language(index.codes[code], index.names[index.codes[code]]))
    return index


def _call(index: _Index, names: str, language: Language) -> None:
    for name in filter(None, names.split("/")):
        index.called.setdefault(_fold(name), language)


def _fold(name: str) -> str:
    """A name without case, accents, marks and blanks."""
    letters = unicodedata.normalize("NFKD", name).casefold()
    return "".join(c for c in letters if c.isalnum() and unicodedata.category(c) != "Lm")
