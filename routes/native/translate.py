"""POST /translate/v1/batch-translate, as the Immersive Translate plugin calls it."""

import re
import uuid
from typing import Annotated

from pydantic import Field

from routes.chat.templates import language, translation
from routes.http.errors import Json, native_field
from routes.http.generate import Prepared
from routes.http.replies import Reply, merge_in_order
from routes.http.schemas import END_OF_TEXT, Prompts, RequestBody
from routes.native.schemas import Texts
from rwkv_batch.wire.client import Job
from rwkv_batch.wire.protocol import GenerateRequest, RowDelta, Sampling

AUTO = "auto"
MAX_TOKENS = 2048
# Unicode blocks of scripts that (nearly) give a language away: code, name in prompts, letters
SCRIPTS = (
    ("ja", "Japanese", re.compile(r"[\u3041-\u30ff\u31f0-\u31ff]")),
    ("zh-CN", "Chinese", re.compile(r"[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")),
    ("ko", "Korean", re.compile(r"[\u1100-\u11ff\u3130-\u318f\uac00-\ud7af]")),
    ("ru", "Russian", re.compile(r"[\u0400-\u052f]")),
    ("en", "English", re.compile(r"[A-Za-z\u00c0-\u024f]")),
)
LATIN_PER_WORD = 4  # Latin words stand in texts of any script, and take more letters than Chinese ones
KANA_SHARE = 0.1  # Japanese mixes kana with Han letters; a Chinese text may quote a kana


class TranslateFields(RequestBody):
    """The body."""

    source_lang: Annotated[str, Field(min_length=1, max_length=64)] = AUTO
    target_lang: Annotated[str, Field(min_length=1, max_length=64)]
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
    if fields.target_lang == AUTO:
        raise native_field(
            "target_lang", 'must name a language, as in "zh-CN"; only the source can be found out'
        )
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
            stops.add(f"\n\n{language(name)}:")  # the model would go on with the next pair
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


def _source(text: str, source: str, target: str) -> tuple[str, str]:
    """The source language's code for the reply and its name for the prompt."""
    if source != AUTO:
        return source, source
    code, name = guess(text) or ("en", AUTO)  # clients expect "en" where nothing is known
    if code == "en" and language(target) == "English":
        name = AUTO  # Latin letters into English: any language
    return code, name


def guess(text: str) -> tuple[str, str] | None:
    """Code and name of the language whose script most letters of `text` have; None without such letters."""
    counts: dict[str, float] = {code: len(letters.findall(text)) for code, _, letters in SCRIPTS}
    counts["en"] /= LATIN_PER_WORD
    if counts["ja"] >= KANA_SHARE * (counts["ja"] + counts["zh-CN"]):
        counts["ja"] += counts.pop("zh-CN")
    code = max(counts, key=lambda c: counts[c])
    return (code, next(name for c, name, _ in SCRIPTS if c == code)) if counts[code] else None
