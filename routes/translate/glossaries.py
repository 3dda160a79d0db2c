"""DeepL's stored glossaries of one pair of languages, and what a translation takes of any."""

import asyncio
import csv
import io
import re
from datetime import UTC, datetime
from functools import lru_cache
from typing import Annotated, Literal

from pydantic import Field
from robyn import Response

from routes.http.errors import ApiError, Json, native_field
from routes.http.exchange import HttpRequest, empty_response, json_response, text_response
from routes.http.frontend import Frontend
from routes.http.schemas import RequestBody
from routes.translate import glossary_store
from routes.translate.glossary_store import Entries, Pair, StoredGlossary, decoded
from routes.translate.keys import allowed_fields, demand_key
from routes.translate.names import DEEPL_SOURCES, deepl_code
from routes.translate.schemas import AUTO, MOST_GLOSSARIES, Key, TargetName
from rwkv_batch.chat.languages import find
from rwkv_batch.translation.glossary import MOST_TERMS, NO_GLOSSARY, Glossary, GlossaryError, from_entries

MOST_KEPT = 4  # glossaries that a front end keeps as terms are found, each in at most some 50 MB
MOST_NAMED = 5  # pairs of languages in a sentence
PARTING = re.compile(r"[\t\r\n]")  # what entries cannot have in them: they are given back as TSV
TSV = "text/tab-separated-values; charset=utf-8"
CREATED = 201

Name = Annotated[str, Field(min_length=1, max_length=1024)]


class DictionaryFields(RequestBody):
    """Terms for one pair of languages, as DeepL's API takes them."""

    source_lang: TargetName
    target_lang: TargetName
    entries: str  # a term, a tab or comma, and what it becomes, on each line
    entries_format: Literal["tsv", "csv"]

    @property
    def pair(self) -> Pair:
        return pair_of(self.source_lang, self.target_lang)


class GlossaryFields(DictionaryFields):
    """The body of DeepL's API, version 2, that stores a glossary."""

    name: Name
    auth_key: Key = None


async def collection(front: Frontend, http: HttpRequest) -> Response:
    """GET and POST /v2/glossaries: those of one pair of languages, or one more. Raises ApiError."""
    if http.method != "POST":
        allowed_fields(front, http, always=True)
        found = [each for each in await glossary_store.all_glossaries(front) if len(each.terms) == 1]
        return json_response(http, {"glossaries": [_described(each) for each in found]})
    fields = GlossaryFields.from_json(allowed_fields(front, http, required=True, always=True))
    entries = await asyncio.to_thread(read_entries, fields.entries, fields.entries_format)
    glossary = await glossary_store.create(front, fields.name, {fields.pair: entries})
    return json_response(http, _described(glossary), CREATED)


async def one(front: Frontend, http: HttpRequest) -> Response:
    """GET and DELETE /v2/glossaries/{id}. Raises ApiError."""
    allowed_fields(front, http, always=True)
    glossary = await glossary_store.one_glossary(front, id_of(http))
    if http.method != "DELETE":
        return json_response(http, _described(glossary))
    await glossary_store.remove(front, glossary.id)
    return empty_response(http)


async def entries(front: Frontend, http: HttpRequest) -> Response:
    """GET /v2/glossaries/{id}/entries: a term, a tab and what it becomes on each line. Raises ApiError."""
    allowed_fields(front, http, always=True)
    glossary = await glossary_store.one_glossary(front, id_of(http))
    found = await glossary_store.entries_of(front, glossary.terms[_only_pair(glossary)])
    return text_response(http, as_tsv(found), TSV)


async def pairs(front: Frontend, http: HttpRequest) -> Response:
    """GET /v2/glossary-language-pairs: any two of the languages that are listed. Raises ApiError."""
    allowed_fields(front, http)
    codes = [code.lower() for code in DEEPL_SOURCES]
    supported = [{"source_lang": a, "target_lang": b} for a in codes for b in codes if a != b]
    return json_response(http, {"supported_languages": supported})


async def stored_glossary(front: Frontend, http: HttpRequest, fields: Json) -> Glossary:
    """What `glossary_id` or `glossary_ids` of a translation name; that needs a key. Raises ApiError."""
    field, ids = _named(fields)
    if not ids:
        return NO_GLOSSARY
    demand_key(front, http, fields, always=True)
    source, target = (fields.get(name) for name in ("source_lang", "target_lang"))
    if not isinstance(source, str) or source.strip().lower() in ("", AUTO):
        raise native_field("source_lang", "a stored glossary is for texts in one language; name it")
    if not isinstance(target, str) or not find(source) or not find(target):
        return NO_GLOSSARY  # which the schema refuses
    made, asked = NO_GLOSSARY, pair_of(source, target)
    for each in ids:
        glossary = await glossary_store.one_glossary(front, each)
        if asked not in glossary.terms:
            raise native_field(field, f"this glossary {_is_for(glossary)}")
        found = await glossary_store.entries_of(front, glossary.terms[asked])
        try:
            made = made.before(await asyncio.to_thread(_terms, asked, found))
        except GlossaryError as error:  # it was stored when more was taken
            raise native_field(field, f"this glossary cannot be used, {error}; store it anew") from None
    return made


def _named(fields: Json) -> tuple[str, list[str]]:
    """The field that names glossaries, and their ids. What the schema refuses is left to it."""
    one, several = fields.get("glossary_id"), fields.get("glossary_ids")
    if isinstance(several, str):
        several = several.split(",")
    ids = [each for each in several if each] if isinstance(several, list) else []
    if one and ids:
        raise native_field("glossary_ids", "send these or `glossary_id`, and not both")
    if isinstance(one, str) and one:
        return "glossary_id", [one]
    fit = len(ids) <= MOST_GLOSSARIES and all(isinstance(each, str) for each in ids)
    return "glossary_ids", ids if fit else []


def pair_of(source: str, target: str) -> Pair:
    """Without varieties of languages, which DeepL's glossaries do not tell apart."""
    return Pair(deepl_code(source).lower(), deepl_code(target).lower())


def as_tsv(entries: bytes) -> str:
    """What is stored of a pair of languages: a term, a tab and what it becomes on each line."""
    return "\n".join("\t".join(entry) for entry in decoded(entries))


def created(glossary: StoredGlossary) -> str:
    """When it was stored, as DeepL writes that."""
    when = datetime.fromtimestamp(glossary.created, UTC)
    return when.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def id_of(http: HttpRequest) -> str:
    return http.path.split("/glossaries/", 1)[1].split("/")[0]


def read_entries(text: str, kind: str, field: str = "entries") -> Entries:
    """Terms and what they become; CSV may name their languages, too. Raises ApiError 400 for that field."""
    text = text.removeprefix("\ufeff")
    lines = (
        csv.reader(io.StringIO(text, newline=""), strict=True)
        if kind == "csv"
        else (line.split("\t") for line in io.StringIO(text, newline=None))
    )
    entries: dict[str, str] = {}
    try:
        for number, columns in enumerate(lines, 1):
            if number > MOST_TERMS:
                raise GlossaryError(f"it has more than {MOST_TERMS} lines; store several glossaries")
            cells = [cell.strip() for cell in columns]
            if not any(cells):
                continue
            if len(cells) not in ((2, 3, 4) if kind == "csv" else (2,)):
                raise GlossaryError(f"line {number} has {len(cells)} columns; a term has 2")
            if cells[0] in entries:
                raise GlossaryError(f'line {number}: "{cells[0][:40]}" was there before')
            if any(PARTING.search(cell) for cell in cells):
                raise GlossaryError(f"line {number}: a term has no tab and no line end in it")
            entries[cells[0]] = cells[1]
        from_entries(entries.items())
    except (GlossaryError, csv.Error) as error:
        raise native_field(field, str(error)) from None
    if not entries:
        raise native_field(field, "a glossary needs an entry")
    return list(entries.items())


@lru_cache(MOST_KEPT)
def _terms(pair: Pair, entries: bytes) -> Glossary:
    return from_entries(decoded(entries), *pair)


def _described(glossary: StoredGlossary) -> Json:
    """It as version 2 of DeepL's API describes one. Raises ApiError 400."""
    pair = _only_pair(glossary)
    return {
        "glossary_id": glossary.id,
        "ready": True,
        "name": glossary.name,
        "source_lang": pair.source,
        "target_lang": pair.target,
        "creation_time": created(glossary),
        "entry_count": glossary.terms[pair].size,
    }


def _only_pair(glossary: StoredGlossary) -> Pair:
    """Raises ApiError 400."""
    if len(glossary.terms) != 1:
        raise ApiError(
            400, f"The glossary {glossary.id} {_is_for(glossary)}; ask /v3/glossaries/{glossary.id}."
        )
    return next(iter(glossary.terms))


def _is_for(glossary: StoredGlossary) -> str:
    """For which translations."""
    if not glossary.terms:
        return "has no terms"
    named = [f"{pair.source.upper()} to {pair.target.upper()}" for pair in glossary.terms][:MOST_NAMED]
    more = len(glossary.terms) - len(named)
    others = f" and {more} more pairs of languages" if more else ""
    return f"is for translations from {', '.join(named)}{others}"
