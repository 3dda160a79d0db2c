"""Where stored glossaries are kept: beside the sessions, where each front end finds them.

A glossary is a document for its name, and one for the terms of each pair of languages. The key of that says
how many terms it has, so a list of glossaries reads none. A key has a number, too: terms that are changed
are written under the next number, and the highest one counts. So a change is there at once or not at all, and
no terms are left without a name, which is written first and removed last. A further name is written under a
number too: the document of the first one is written once, so a glossary that is deleted meanwhile stays so.
"""

import asyncio
import contextlib
import time
from collections.abc import Iterable, Mapping
from typing import NamedTuple
from uuid import uuid4

import msgspec

from routes.http.errors import ApiError
from routes.http.frontend import Frontend
from rwkv_batch.wire.commands import GetDocument, ListDocuments, PutDocument, RemoveDocument

# What the keys of documents begin with: of the first name, of those in its place, and of terms.
NAMES, RENAMES, ENTRIES = "glossary:", "glossary-name:", "glossary-entries:"
MOST_KEPT = 1000  # glossaries, and pairs of languages of all of them
MOST_AT_ONCE = 64  # names that are read for a list

Entries = list[tuple[str, str]]  # terms, and what they become


class Pair(NamedTuple):
    """Languages by code, in lower case."""

    source: str
    target: str


class StoredTerms(NamedTuple):
    """The terms of a glossary for one pair of languages, as their key tells."""

    glossary: str  # id
    pair: Pair
    number: int
    size: int  # terms

    @property
    def key(self) -> str:
        return f"{ENTRIES}{self.glossary}:{':'.join(self.pair)}:{self.number}:{self.size}"

    @classmethod
    def from_key(cls, key: str) -> "StoredTerms":
        glossary, source, target, number, size = key.removeprefix(ENTRIES).split(":")
        return cls(glossary, Pair(source, target), int(number), int(size))


class NameAndTime(msgspec.Struct, frozen=True):
    """The document of a name."""

    name: str
    created: float  # seconds since 1970


class StoredGlossary(NamedTuple):
    """What is known of a glossary without its terms."""

    id: str
    name: str
    created: float
    terms: dict[Pair, StoredTerms]


async def all_glossaries(front: Frontend) -> list[StoredGlossary]:
    """In the order in which they were stored. Raises ApiError."""
    terms = _by_glossary(await _keys(front, ENTRIES))
    newest: dict[str, int] = {}
    for key in await _keys(front, RENAMES):
        glossary, number = _renamed(key)
        newest[glossary] = max(number, newest.get(glossary, 0))
    ids = [key.removeprefix(NAMES) for key in await _keys(front, NAMES)]
    turn = asyncio.Semaphore(MOST_AT_ONCE)
    named = await asyncio.gather(*(_name(front, each, newest.get(each, 0), turn) for each in ids))
    found = [
        StoredGlossary(each, name.name, name.created, terms.get(each, {}))
        for each, name in zip(ids, named, strict=True)
        if name
    ]
    return sorted(found, key=lambda each: each.created)


async def one_glossary(front: Frontend, glossary_id: str) -> StoredGlossary:
    """Raises ApiError 404."""
    if ":" in glossary_id:
        raise missing(glossary_id)
    keys, number = await asyncio.gather(
        _keys(front, f"{ENTRIES}{glossary_id}:"), _newest_name(front, glossary_id)
    )
    name = await _name(front, glossary_id, number)
    if name is None:
        raise missing(glossary_id)
    terms = _by_glossary(keys)
    return StoredGlossary(glossary_id, name.name, name.created, terms.get(glossary_id, {}))


async def entries_of(front: Frontend, terms: StoredTerms) -> bytes:
    """`Entries` as JSON. Raises ApiError 404: they may have been deleted a moment ago."""
    found = await _document(front, terms.key)
    if not found:
        raise missing(terms.glossary)
    return found


async def create(front: Frontend, name: str, entries: Mapping[Pair, Entries]) -> StoredGlossary:
    """Store a glossary. If that fails, nothing of it stays. Raises ApiError."""
    await _demand_room(front, len(entries), glossaries=1)
    glossary = StoredGlossary(str(uuid4()), name, time.time(), {})
    await _put_name(front, NAMES + glossary.id, glossary)
    try:
        for pair, each in entries.items():
            glossary.terms[pair] = await _put(front, StoredTerms(glossary.id, pair, 1, len(each)), each)
    except ApiError:
        with contextlib.suppress(ApiError):
            await remove(front, glossary.id)
        raise
    return glossary


async def rename(front: Frontend, glossary: StoredGlossary, name: str) -> StoredGlossary:
    """Raises ApiError, 404 if it has been deleted meanwhile."""
    renamed = glossary._replace(name=name)
    number = await _newest_name(front, glossary.id) + 1
    await _put_name(front, f"{RENAMES}{glossary.id}:{number}", renamed)
    await _demand_stored(front, glossary.id)
    with contextlib.suppress(ApiError):  # which count no more
        keys = await _keys(front, f"{RENAMES}{glossary.id}:")
        await _remove_all(front, [key for key in keys if _renamed(key)[1] < number])
    return renamed


async def replace_terms(front: Frontend, glossary: StoredGlossary, entries: Mapping[Pair, Entries]) -> None:
    """These are the terms for pairs of languages from now on, for new ones too. Raises ApiError.

    If that fails, the terms of all of them are what they were.
    """
    numbers = {pair: glossary.terms[pair].number + 1 if pair in glossary.terms else 1 for pair in entries}
    if more := sum(number == 1 for number in numbers.values()):
        await _demand_room(front, more)
    new = {pair: StoredTerms(glossary.id, pair, numbers[pair], len(each)) for pair, each in entries.items()}
    try:
        for pair, terms in new.items():
            await _put(front, terms, entries[pair])
    except ApiError:
        with contextlib.suppress(ApiError):
            await _remove_all(front, [terms.key for terms in new.values()])
        raise
    glossary.terms.update(new)
    await _demand_stored(front, glossary.id)
    with contextlib.suppress(ApiError):  # which are older, and count no more
        for pair, number in numbers.items():
            await _remove_terms(front, glossary.id, pair, before=number)


async def remove_pair(front: Frontend, glossary: StoredGlossary, pair: Pair) -> None:
    """Raises ApiError."""
    await _remove_terms(front, glossary.id, pair)


async def remove(front: Frontend, glossary_id: str) -> None:
    """Raises ApiError."""
    await _remove_all(front, await _keys(front, f"{ENTRIES}{glossary_id}:"))
    await _remove_all(front, [NAMES + glossary_id])
    # What was being written meanwhile: who writes sees from now on that there is no glossary.
    await _remove_rest(front, glossary_id)


def decoded(entries: bytes) -> Entries:
    """What `entries_of` gives."""
    return msgspec.json.decode(entries, type=Entries)


def missing(glossary_id: str) -> ApiError:
    return ApiError(404, f"There is no glossary {glossary_id[:60]}: it was deleted, or never stored.")


def _by_glossary(keys: Iterable[str]) -> dict[str, dict[Pair, StoredTerms]]:
    """By glossary and pair of languages those with the highest number."""
    found: dict[str, dict[Pair, StoredTerms]] = {}
    for each in sorted(map(StoredTerms.from_key, keys)):
        found.setdefault(each.glossary, {})[each.pair] = each
    return found


async def _demand_room(front: Frontend, pairs: int, glossaries: int = 0) -> None:
    """Raises ApiError 400."""
    names, terms = len(await _keys(front, NAMES)), len(await _keys(front, ENTRIES))
    if names + glossaries > MOST_KEPT:
        raise ApiError(400, f"There are {names} glossaries, and at most {MOST_KEPT} are kept; delete one.")
    if terms + pairs > MOST_KEPT:
        raise ApiError(
            400,
            f"{terms} pairs of languages are stored in glossaries, and at most {MOST_KEPT} are; delete some.",
        )


async def _demand_stored(front: Frontend, glossary_id: str) -> None:
    """What has been written of a glossary stays only if it is still there. Raises ApiError 404."""
    if not await _document(front, NAMES + glossary_id):
        with contextlib.suppress(ApiError):
            await _remove_rest(front, glossary_id)
        raise missing(glossary_id)


async def _put_name(front: Frontend, key: str, glossary: StoredGlossary) -> None:
    data = msgspec.json.encode(NameAndTime(glossary.name, glossary.created))
    await front.ask(PutDocument(uuid4().hex, key, data))


async def _put(front: Frontend, terms: StoredTerms, entries: Entries) -> StoredTerms:
    await front.ask(PutDocument(uuid4().hex, terms.key, msgspec.json.encode(entries)))
    return terms


async def _remove_terms(front: Frontend, glossary_id: str, pair: Pair, before: int | None = None) -> None:
    """Those of a pair of languages whose number is smaller."""
    keys = await _keys(front, f"{ENTRIES}{glossary_id}:{':'.join(pair)}:")
    await _remove_all(
        front, [key for key in keys if before is None or StoredTerms.from_key(key).number < before]
    )


async def _remove_rest(front: Frontend, glossary_id: str) -> None:
    """All that is stored of a glossary but its first name."""
    for kind in (ENTRIES, RENAMES):
        await _remove_all(front, await _keys(front, f"{kind}{glossary_id}:"))


async def _remove_all(front: Frontend, keys: Iterable[str]) -> None:
    """Of all models' databases."""
    for key in keys:
        async for _ in front.ask_each(RemoveDocument("", key)):
            pass


async def _keys(front: Frontend, prefix: str) -> list[str]:
    """Of all models' databases, each once."""
    found = [reply.keys async for _, reply in front.ask_each(ListDocuments("", prefix))]
    return sorted({key for keys in found for key in keys})


async def _document(front: Frontend, key: str) -> bytes:
    """Its bytes; none if there is no such document."""
    found = [reply.data async for _, reply in front.ask_each(GetDocument("", key))]
    return next(filter(None, found), b"")


def _renamed(key: str) -> tuple[str, int]:
    """The glossary of which that is the key of a further name, and the number of that."""
    glossary, number = key.removeprefix(RENAMES).split(":")
    return glossary, int(number)


async def _newest_name(front: Frontend, glossary_id: str) -> int:
    """Its number; 0 is the first name's."""
    return max((_renamed(key)[1] for key in await _keys(front, f"{RENAMES}{glossary_id}:")), default=0)


async def _name(
    front: Frontend, glossary_id: str, number: int, turn: asyncio.Semaphore | None = None
) -> NameAndTime | None:
    """The name of that number, or a newer one; None if there is no such glossary."""
    async with turn or contextlib.nullcontext():
        data = first = await _document(front, NAMES + glossary_id)
        while first and number:
            if data := await _document(front, f"{RENAMES}{glossary_id}:{number}"):
                break
            number = await _newest_name(front, glossary_id)  # it has been replaced, or all is being deleted
            data = first = await _document(front, NAMES + glossary_id)
    return msgspec.json.decode(data, type=NameAndTime) if data else None
