"""POST /translate/v1/batch-translate, as the Immersive Translate plugin calls it."""

import uuid
from bisect import bisect
from collections import Counter
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from routes.http.errors import Json
from routes.http.generate import Prepared
from routes.http.replies import Reply, merge_in_order
from routes.http.schemas import Prompts, RequestBody
from routes.native.schemas import Texts
from rwkv_batch.chat.checkpoints import END_OF_TEXT
from rwkv_batch.chat.languages import find, languages
from rwkv_batch.chat.templates import language, translation
from rwkv_batch.wire.client import Job
from rwkv_batch.wire.protocol import GenerateRequest, RowDelta, Sampling

AUTO = "auto"
MAX_TOKENS = 2048
# Unicode blocks of scripts that (nearly) give a language away: first and last letter, and the code of that
BLOCKS = [
    ("A", "Z", "en"),
    ("a", "z", "en"),
    ("\u00c0", "\u024f", "en"),
    ("\u0370", "\u03ff", "el"),
    ("\u0400", "\u052f", "ru"),
    ("\u0530", "\u058f", "hy"),
    ("\u0590", "\u05ff", "he"),
    ("\u0600", "\u06ff", "ar"),
    ("\u0750", "\u077f", "ar"),
    ("\u0900", "\u097f", "hi"),
    ("\u0980", "\u09ff", "bn"),
    ("\u0a00", "\u0a7f", "pa"),
    ("\u0a80", "\u0aff", "gu"),
    ("\u0b00", "\u0b7f", "or"),
    ("\u0b80", "\u0bff", "ta"),
    ("\u0c00", "\u0c7f", "te"),
    ("\u0c80", "\u0cff", "kn"),
    ("\u0d00", "\u0d7f", "ml"),
    ("\u0d80", "\u0dff", "si"),
    ("\u0e00", "\u0e7f", "th"),
    ("\u0e80", "\u0eff", "lo"),
    ("\u1000", "\u109f", "my"),
    ("\u10a0", "\u10ff", "ka"),
    ("\u1100", "\u11ff", "ko"),
    ("\u1200", "\u137f", "am"),
    ("\u1780", "\u17ff", "km"),
    ("\u1f00", "\u1fff", "el"),
    ("\u3041", "\u30ff", "ja"),
    ("\u3130", "\u318f", "ko"),
    ("\u31f0", "\u31ff", "ja"),
    ("\u3400", "\u4dbf", "zh-CN"),
    ("\u4e00", "\u9fff", "zh-CN"),
    ("\uac00", "\ud7af", "ko"),
    ("\uf900", "\ufaff", "zh-CN"),
    ("\U00020000", "\U0003ffff", "zh-CN"),
]
STARTS = [first for first, _, _ in BLOCKS]
LATIN_PER_WORD = 4  # Latin words stand in texts of any script, and take more letters than Chinese ones
KANA_SHARE = 0.1  # Japanese mixes kana with Han letters; a Chinese text may quote a kana


def _unless_auto(value: object) -> object:
    """None where the language is to be found out."""
    return None if isinstance(value, str) and value.strip().lower() == AUTO else value


def _not_auto(value: object) -> object:
    if _unless_auto(value) is None and value is not None:
        raise ValueError('must name a language, as in "zh-CN"; only the source can be found out')
    return value


def _is_language(text: str) -> str:
    if find(text) is None:
        known = 'send the code or English name of one, as in "fr" or "French"'
        raise ValueError(f'"{text}" is no language that is known here; {known}')
    return text


LanguageName = Annotated[
    str, Field(max_length=64, json_schema_extra={"enum": languages()}), AfterValidator(_is_language)
]


class TranslateFields(RequestBody):
    """The body."""

    source_lang: Annotated[
        LanguageName | None,
        BeforeValidator(_unless_auto, json_schema_input_type=Literal["auto"] | LanguageName | None),
    ] = None
    target_lang: Annotated[LanguageName, BeforeValidator(_not_auto)]
    text_list: Texts
    placeholders: list[str] | None = None  # sent by the plugin; translation does not need them


class Translations(Reply):
    """One translation per text, by position. Blank texts were not run and are returned as they are."""

    def __init__(self, texts: list[str], codes: list[str], rows: list[int | None]) -> None:
        """`codes`: the source language of each text; `rows`: the row of its translation, None if blank."""
        self._texts, self._codes, self._rows = texts, codes, rows

    def whole(self, job: Job, deltas: list[RowDelta]) -> Json:
        done = [row.text.strip() for row in merge_in_order(deltas)]
        return {
            "translations": [
                {"detected_source_lang": code, "text": text if row is None else done[row]}
                for text, code, row in zip(self._texts, self._codes, self._rows, strict=True)
            ]
        }

    def events(self, deltas: list[RowDelta]) -> list[Json]:
        return []  # translations are not streamed


def prepare(body: Json, model_id: str) -> Prepared:
    """No prompts if there is nothing to translate. Raises ApiError."""
    fields = TranslateFields.from_json(body)
    prompts: Prompts = []
    codes: list[str] = []
    rows: list[int | None] = []
    stops: set[str] = set()
    for text in fields.text_list:
        code, name = _source(text, fields.source_lang, fields.target_lang)
        codes.append(code)
        rows.append(len(prompts) if text.strip() else None)
        if text.strip():
            prompts.append(translation(text.strip(), name, fields.target_lang))
            stops.add(f"\n\n{name}:")  # the model would go on with the next pair
    request = GenerateRequest(
        id=uuid.uuid4().hex,
        prompts=prompts,
        max_tokens=MAX_TOKENS,
        sampling=Sampling(temperature=0.0),
        stop_ids=[END_OF_TEXT],
        stop_strings=sorted(stops),
        pausable=False,
    )
    return Prepared(request, False, Translations(fields.text_list, codes, rows))


def _source(text: str, source: str | None, target: str) -> tuple[str, str]:
    """The source language's code for the reply and its name for the prompt."""
    if source is not None:
        return source, language(source)
    code = guess(text)
    if code is None or (code == "en" and _is_english(target)):  # Latin letters into English: any language
        return "en", AUTO  # clients expect "en" where nothing is known
    return code, language(code)


def _is_english(name: str) -> bool:
    found = find(name)
    return found is not None and found.code == "en"


def guess(text: str) -> str | None:
    """The code of the language whose script most letters of `text` have; None without such letters."""
    counts = dict.fromkeys((code for _, _, code in BLOCKS), 0.0)
    for letter, count in Counter(text).items():
        if place := bisect(STARTS, letter):
            _, last, code = BLOCKS[place - 1]
            counts[code] += count * (letter <= last)
    counts["en"] /= LATIN_PER_WORD
    if counts["ja"] >= KANA_SHARE * (counts["ja"] + counts["zh-CN"]):
        counts["ja"] += counts.pop("zh-CN")
    code = max(counts, key=lambda c: counts[c])
    return code if counts[code] else None
