"""DeepL's stored glossaries of several pairs of languages: version 3 of that part of its API."""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Annotated

from pydantic import Field
from robyn import Response

from routes.http.errors import ApiError, Json, native_field
from routes.http.exchange import HttpRequest, empty_response, json_response
from routes.http.frontend import Frontend
from routes.http.schemas import RequestBody
from routes.translate import glossary_store
from routes.translate.glossaries import (
    CREATED,
    DictionaryFields,
    Name,
    as_tsv,
    created,
    id_of,
    pair_of,
    read_entries,
)
from routes.translate.glossary_store import Entries, Pair, StoredGlossary, StoredTerms
from routes.translate.keys import allowed_fields
from routes.translate.schemas import Key, TargetName

MOST_DICTIONARIES = 100  # of a request

Dictionaries = Annotated[list[DictionaryFields], Field(max_length=MOST_DICTIONARIES)]


class MultilingualFields(RequestBody):
    """The body that stores a glossary."""

    name: Name
    dictionaries: Annotated[Dictionaries, Field(min_length=1)]
    auth_key: Key = None


class ChangeFields(RequestBody):
    """The body that changes a glossary. Terms of a dictionary that are there already stay."""

    name: Name | None = None
    dictionaries: Dictionaries | None = None
    auth_key: Key = None


class ReplaceFields(DictionaryFields):
    """The body that replaces a dictionary."""

    auth_key: Key = None


class PairQuery(RequestBody):
    """The parameters of a URL that name a dictionary."""

    source_lang: TargetName
    target_lang: TargetName


class OpenPairQuery(RequestBody):
    """Which dictionaries are read: without parameters all of them."""

    source_lang: TargetName | None = None
    target_lang: TargetName | None = None


async def collection(front: Frontend, http: HttpRequest) -> Response:
    """GET and POST /v3/glossaries: all that are stored, or one more. Raises ApiError."""
    if http.method != "POST":
        allowed_fields(front, http, always=True)
        found = await glossary_store.all_glossaries(front)
        return json_response(http, {"glossaries": [_described(each) for each in found]})
    fields = MultilingualFields.from_json(allowed_fields(front, http, required=True, always=True))
    entries = await asyncio.to_thread(_read, fields.dictionaries)
    return json_response(http, _described(await glossary_store.create(front, fields.name, entries)), CREATED)


async def one(front: Frontend, http: HttpRequest) -> Response:
    """GET, PATCH and DELETE /v3/glossaries/{id}. Raises ApiError."""
    body = allowed_fields(front, http, required=http.method == "PATCH", always=True)
    glossary = await glossary_store.one_glossary(front, id_of(http))
    if http.method == "DELETE":
        await glossary_store.remove(front, glossary.id)
        return empty_response(http)
    if http.method == "PATCH":
        glossary = await _changed(front, glossary, ChangeFields.from_json(body))
    return json_response(http, _described(glossary))


async def entries(front: Frontend, http: HttpRequest) -> Response:
    """GET /v3/glossaries/{id}/entries: the terms of the dictionaries that the URL names. Raises ApiError."""
    sent = allowed_fields(front, http, always=True)
    glossary = await glossary_store.one_glossary(front, id_of(http))
    query = OpenPairQuery.from_json(_languages(sent))
    wanted = [_code(query.source_lang), _code(query.target_lang)]
    found = [
        terms
        for pair, terms in glossary.terms.items()
        if all(asked in (None, own) for asked, own in zip(wanted, pair, strict=True))
    ]
    if not found and any(wanted):
        raise _no_dictionary(glossary, wanted)
    listed = [
        {
            "source_lang": terms.pair.source,
            "target_lang": terms.pair.target,
            "entries": as_tsv(await glossary_store.entries_of(front, terms)),
            "entries_format": "tsv",
        }
        for terms in found
    ]
    return json_response(http, {"dictionaries": listed})


async def dictionaries(front: Frontend, http: HttpRequest) -> Response:
    """PUT and DELETE /v3/glossaries/{id}/dictionaries: replace one, or delete it. Raises ApiError."""
    replaces = http.method == "PUT"
    sent = allowed_fields(front, http, required=replaces, in_url=not replaces, always=True)
    glossary = await glossary_store.one_glossary(front, id_of(http))
    if replaces:
        fields = ReplaceFields.from_json(sent)
        new = await asyncio.to_thread(read_entries, fields.entries, fields.entries_format)
        await glossary_store.replace_terms(front, glossary, {fields.pair: new})
        return json_response(http, _dictionary(glossary.terms[fields.pair]))
    named = PairQuery.from_json(_languages(sent))
    pair = pair_of(named.source_lang, named.target_lang)
    if pair not in glossary.terms:
        raise _no_dictionary(glossary, pair)
    await glossary_store.remove_pair(front, glossary, pair)
    return empty_response(http)


async def _changed(front: Frontend, glossary: StoredGlossary, fields: ChangeFields) -> StoredGlossary:
    """With another name, and with these terms besides. Raises ApiError."""
    if fields.name is None and not fields.dictionaries:
        raise ApiError(400, "Nothing is changed: send `name`, `dictionaries` or both.")
    new = await asyncio.to_thread(_read, fields.dictionaries or ())
    for pair, entries in new.items():
        if old := glossary.terms.get(pair):
            kept = await glossary_store.entries_of(front, old)
            new[pair] = await asyncio.to_thread(_together, kept, entries)
    if new:
        await glossary_store.replace_terms(front, glossary, new)
    return await glossary_store.rename(front, glossary, fields.name) if fields.name else glossary


def _together(old: bytes, new: Entries) -> Entries:
    """New terms, and behind them those that are stored. Raises ApiError 400."""
    first = dict(new)
    kept = [entry for entry in glossary_store.decoded(old) if entry[0] not in first]
    return read_entries("\n".join("\t".join(entry) for entry in (*new, *kept)), "tsv", "dictionaries")


def _read(dictionaries: Sequence[DictionaryFields]) -> dict[Pair, Entries]:
    """The terms of each pair of languages. Raises ApiError 400."""
    found: dict[Pair, Entries] = {}
    for number, each in enumerate(dictionaries):
        place = f"dictionaries[{number}]"
        if each.pair in found:
            raise native_field(place, "this pair of languages was there before")
        found[each.pair] = read_entries(each.entries, each.entries_format, f"{place}.entries")
    return found


def _languages(fields: Json) -> Json:
    return {name: fields[name] for name in PairQuery.model_fields if name in fields}


def _code(language: str | None) -> str | None:
    return pair_of(language, language).source if language else None


def _described(glossary: StoredGlossary) -> Json:
    return {
        "glossary_id": glossary.id,
        "name": glossary.name,
        "dictionaries": [_dictionary(glossary.terms[pair]) for pair in sorted(glossary.terms)],
        "creation_time": created(glossary),
    }


def _dictionary(terms: StoredTerms) -> Json:
    return {
        "source_lang": terms.pair.source,
        "target_lang": terms.pair.target,
        "entry_count": terms.size,
    }


def _no_dictionary(glossary: StoredGlossary, pair: Iterable[str | None]) -> ApiError:
    source, target = (code.upper() if code else "any language" for code in pair)
    return ApiError(404, f"The glossary {glossary.id} has no dictionary from {source} to {target}.")
