"""DeepL's stored glossaries. They are kept beside the sessions, where each front end finds them.

What a glossary is called is one document, and its entries are another: a list of glossaries reads no entries.
"""

import asyncio
import csv
import io
import re
import time
from datetime import UTC, datetime
from functools import lru_cache
from typing import Annotated, Literal
from uuid import uuid4

import msgspec
from pydantic import Field
from robyn import Response

from routes.http.errors import ApiError, Json, native_field
from routes.http.exchange import HttpRequest, empty_response, json_response, text_response
from routes.http.frontend import Frontend
from routes.http.schemas import RequestBody
from routes.translate.keys import allowed_fields, demand_key
from routes.translate.names import DEEPL_SOURCES, deepl_code
from routes.translate.schemas import AUTO, Key, TargetName
from rwkv_batch.chat.languages import find
from rwkv_batch.translation.glossary import MOST_TERMS, NO_GLOSSARY, Glossary, GlossaryError, from_entries
from rwkv_batch.wire.commands import GetDocument, ListDocuments, PutDocument, RemoveDocument

NAMES, ENTRIES = "glossary:", "glossary-entries:"  # what the keys of documents begin with
MOST_GLOSSARIES = 1000
MOST_KEPT = 4  # glossaries that a front end keeps as terms are found, each in at most some 50 MB
ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
PARTING = re.compile(r"[\t\r\n]")  # what entries cannot have in them: they are given back as TSV
TSV = "text/tab-separated-values; charset=utf-8"
CREATED = 201


class GlossaryFields(RequestBody):
    """The body of DeepL's API that stores a glossary."""

    name: Annotated[str, Field(min_length=1, max_length=1024)]
    source_lang: TargetName
    target_lang: TargetName
    entries: str  # a term, a tab or comma, and what it becomes, on each line
    entries_format: Literal["tsv", "csv"]
    auth_key: Key = None


class StoredGlossary(msgspec.Struct, frozen=True):
    """What is stored of a glossary beside its entries."""

    id: str
    name: str
    source: str  # languages, by code
    target: str
    created: float  # seconds since 1970
    count: int  # of entries

    def described(self) -> Json:
        """It as DeepL describes one."""
        created = datetime.fromtimestamp(self.created, UTC)
        return {
            "glossary_id": self.id,
            "ready": True,
            "name": self.name,
            "source_lang": self.source,
            "target_lang": self.target,
            "creation_time": created.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "entry_count": self.count,
        }


Entries = list[tuple[str, str]]


async def collection(front: Frontend, http: HttpRequest) -> Response:
    """GET and POST /v2/glossaries: all that are stored, or one more. Raises ApiError."""
    if http.method != "POST":
        allowed_fields(front, http, always=True)
        found = await asyncio.gather(*(_glossary(front, key) for key in await _keys(front)))
        newest_last = sorted(filter(None, found), key=lambda each: each.created)
        return json_response(http, {"glossaries": [each.described() for each in newest_last]})
    fields = GlossaryFields.from_json(allowed_fields(front, http, required=True, always=True))
    entries = await asyncio.to_thread(read_entries, fields.entries, fields.entries_format)
    if len(await _keys(front)) >= MOST_GLOSSARIES:
        raise ApiError(
            400,
            f"There are {MOST_GLOSSARIES} glossaries, and no more are stored; delete one.",
        )
    source, target = (deepl_code(code).lower() for code in (fields.source_lang, fields.target_lang))
    glossary = StoredGlossary(str(uuid4()), fields.name, source, target, time.time(), len(entries))
    for kind, data in ((ENTRIES, entries), (NAMES, glossary)):  # the name last: it is what is found
        await front.ask(PutDocument(uuid4().hex, kind + glossary.id, msgspec.json.encode(data)))
    return json_response(http, glossary.described(), CREATED)


async def one(front: Frontend, http: HttpRequest) -> Response:
    """GET and DELETE /v2/glossaries/{id}. Raises ApiError."""
    allowed_fields(front, http, always=True)
    glossary = await _stored(front, _id_of(http))
    if http.method != "DELETE":
        return json_response(http, glossary.described())
    for kind in (NAMES, ENTRIES):
        async for _ in front.ask_each(RemoveDocument("", kind + glossary.id)):
            pass
    return empty_response(http)


async def entries_of(front: Frontend, http: HttpRequest) -> Response:
    """GET /v2/glossaries/{id}/entries: a term, a tab and what it becomes on each line. Raises ApiError."""
    allowed_fields(front, http, always=True)
    glossary = await _stored(front, _id_of(http))
    entries = msgspec.json.decode(await _entries(front, glossary), type=Entries)
    return text_response(http, "\n".join("\t".join(entry) for entry in entries), TSV)


async def pairs(front: Frontend, http: HttpRequest) -> Response:
    """GET /v2/glossary-language-pairs: any two of the languages that are listed. Raises ApiError."""
    allowed_fields(front, http)
    codes = [code.lower() for code in DEEPL_SOURCES]
    supported = [{"source_lang": a, "target_lang": b} for a in codes for b in codes if a != b]
    return json_response(http, {"supported_languages": supported})


async def stored_glossary(front: Frontend, http: HttpRequest, fields: Json) -> Glossary:
    """The one that the field `glossary_id` of a translation names; that needs a key. Raises ApiError."""
    named, source, target = (fields.get(name) for name in ("glossary_id", "source_lang", "target_lang"))
    if not isinstance(named, str) or not named:
        return NO_GLOSSARY
    demand_key(front, http, fields, always=True)
    if not isinstance(source, str) or source.strip().lower() in ("", AUTO):
        raise native_field("source_lang", "a stored glossary is for texts in one language; name it")
    glossary = await _stored(front, named)
    for own, asked in ((glossary.source, source), (glossary.target, target)):
        if isinstance(asked, str) and (language := find(asked)) and deepl_code(language.code).lower() != own:
            languages = f"{glossary.source.upper()} to {glossary.target.upper()}"
            raise native_field("glossary_id", f"this glossary is for translations from {languages}")
    return await asyncio.to_thread(_terms, glossary, await _entries(front, glossary))


def read_entries(text: str, kind: str) -> Entries:
    """Terms and what they become; CSV may name their languages, too. Raises ApiError 400."""
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
        raise native_field("entries", str(error)) from None
    if not entries:
        raise native_field("entries", "a glossary needs an entry")
    return list(entries.items())


@lru_cache(MOST_KEPT)
def _terms(glossary: StoredGlossary, entries: bytes) -> Glossary:
    return from_entries(msgspec.json.decode(entries, type=Entries), glossary.source, glossary.target)


def _id_of(http: HttpRequest) -> str:
    return http.path.split("/glossaries/", 1)[1].split("/")[0]


async def _keys(front: Frontend) -> list[str]:
    """Of all models' databases, each once."""
    found = [reply.keys async for _, reply in front.ask_each(ListDocuments("", NAMES))]
    return sorted({key for keys in found for key in keys})


async def _document(front: Frontend, key: str) -> bytes:
    """Its bytes; none if there is no such document."""
    found = [reply.data async for _, reply in front.ask_each(GetDocument("", key))]
    return next(filter(None, found), b"")


async def _glossary(front: Frontend, key: str) -> StoredGlossary | None:
    data = await _document(front, key)
    return msgspec.json.decode(data, type=StoredGlossary) if data else None


async def _stored(front: Frontend, glossary_id: str) -> StoredGlossary:
    """Raises ApiError 404."""
    found = await _glossary(front, NAMES + glossary_id) if ID.fullmatch(glossary_id) else None
    if found is None:
        raise _missing(glossary_id)
    return found


async def _entries(front: Frontend, glossary: StoredGlossary) -> bytes:
    """Raises ApiError 404: it may have been deleted a moment ago."""
    found = await _document(front, ENTRIES + glossary.id)
    if not found:
        raise _missing(glossary.id)
    return found


def _missing(glossary_id: str) -> ApiError:
    return ApiError(404, f"There is no glossary {glossary_id[:60]}: it was deleted, or never stored.")
