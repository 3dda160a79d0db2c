"""DeepL's stored glossaries, asked for as its clients do. The engine echoes prompts and keeps documents."""

from datetime import datetime

import pytest
from frontend_process import PASSWORD

WORLD = {
    "name": "ours",
    "source_lang": "en",
    "target_lang": "de",
    "entries": "world\tErdball\nbig dog|big dogs\tHofhund",
    "entries_format": "tsv",
}
ASKED = {"text": ["Hello world"], "source_lang": "EN", "target_lang": "DE"}


@pytest.fixture
def stored(server):
    """A glossary while the test runs."""
    found = server.http.post("/v2/glossaries", json=WORLD)
    assert found.status_code == 201
    yield found.json()
    server.http.delete(f"/v2/glossaries/{found.json()['glossary_id']}")


def test_a_glossary_is_stored_listed_used_and_deleted(server, stored):
    place = f"/v2/glossaries/{stored['glossary_id']}"
    assert stored == stored | {"name": "ours", "ready": True, "entry_count": 2, "source_lang": "en"}
    assert datetime.strptime(stored["creation_time"], "%Y-%m-%dT%H:%M:%S.%f%z")
    assert server.http.get("/v2/glossaries").json() == {"glossaries": [stored]}
    assert server.http.get(place).json() == stored
    entries = server.http.get(f"{place}/entries", headers={"Accept": "text/tab-separated-values"})
    assert entries.text == WORLD["entries"]
    assert entries.headers["content-type"].startswith("text/tab-separated-values")
    for body in (
        ASKED | {"glossary_id": stored["glossary_id"]},
        ASKED | {"glossary_id": stored["glossary_id"], "target_lang": "DE", "source_lang": "en-US"},
    ):
        for sent in ({"json": body}, {"data": body}):
            answer = server.http.post("/v2/translate", **sent).json()
            assert "Hello Erdball" in answer["translations"][0]["text"]
    gone = server.http.delete(place)
    assert (gone.status_code, gone.text) == (204, "")
    for answer in (
        server.http.get(place),
        server.http.get(f"{place}/entries"),
        server.http.delete(place),
        server.http.post("/v2/translate", json=ASKED | {"glossary_id": stored["glossary_id"]}),
    ):
        assert answer.status_code == 404 and "There is no glossary" in answer.json()["message"]
    assert server.http.get("/v2/glossaries").json() == {"glossaries": []}


def test_terms_of_the_request_go_before_stored_ones(server, stored):
    body = ASKED | {"glossary_id": stored["glossary_id"], "glossary": {"world": "Welt", "hello": "Servus"}}
    answer = server.http.post("/v2/translate", json=body).json()
    assert "Servus Welt" in answer["translations"][0]["text"]
    answer = server.http.post("/v2/translate", json=body | {"text": ["Hello big dog"]}).json()
    assert "Servus Hofhund" in answer["translations"][0]["text"], "the stored ones count behind them"


def test_a_stored_glossary_is_for_its_languages(server, stored):
    named = ASKED | {"glossary_id": stored["glossary_id"]}
    for change, why in (
        ({"source_lang": None}, "`source_lang`"),
        ({"source_lang": ""}, "`source_lang`"),
        ({"source_lang": "Auto"}, "`source_lang`"),
        ({"source_lang": "FR"}, "from EN to DE"),
        ({"target_lang": "EN"}, "from EN to DE"),
        ({"glossary_id": 5}, "`glossary_id`"),
    ):
        answer = server.http.post("/v2/translate", json=named | change)
        assert answer.status_code == 400 and why in answer.json()["message"]
    assert server.http.post("/v2/translate", json=ASKED | {"glossary_id": ""}).status_code == 200


def test_entries_as_csv(server):
    entries = 'world,"Erd""ball"\r\n"big, dog",Hofhund,en,de\n\n'
    body = WORLD | {"entries": entries, "entries_format": "csv"}
    for sent in ({"json": body}, {"data": body}):
        found = server.http.post("/v2/glossaries", **sent).json()
        place = f"/v2/glossaries/{found['glossary_id']}"
        assert server.http.get(f"{place}/entries").text == 'world\tErd"ball\nbig, dog\tHofhund'
        server.http.delete(place)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"name": ""}, "`name`"),
        ({"source_lang": "xx"}, "`source_lang`"),
        ({"target_lang": None}, "`target_lang`"),
        ({"entries": ""}, "needs an entry"),
        ({"entries": "a"}, "line 1 has 1 columns"),
        ({"entries": "a\tb\nc\t"}, "a term needs a source and a target"),
        ({"entries": "a\tb\na\tc"}, "was there before"),
        ({"entries": 'a,"b', "entries_format": "csv"}, "`entries`"),
        ({"entries": 'a,b\n"c\td",e', "entries_format": "csv"}, "line 2: a term has no tab"),
        ({"entries": 'a,"b\nc"', "entries_format": "csv"}, "no line end"),
        ({"entries": "a\0b\tc"}, "character 0"),
        ({"entries": "\n" * 50_001}, "more than 50000 lines"),
        ({"entries_format": "xlsx"}, "`entries_format`"),
    ],
)
def test_what_is_refused(server, change, why):
    answer = server.http.post("/v2/glossaries", json=WORLD | change)
    assert answer.status_code == 400 and why in answer.json()["message"]
    assert server.http.get("/v2/glossaries").json() == {"glossaries": []}


def test_for_which_languages_glossaries_can_be(server):
    found = server.http.get("/v2/glossary-language-pairs").json()["supported_languages"]
    assert {"source_lang": "en", "target_lang": "de"} in found
    assert {"source_lang": "en", "target_lang": "en"} not in found


def test_glossaries_need_the_password_where_translations_do_not(locked):
    key = {"Authorization": f"DeepL-Auth-Key {PASSWORD}"}
    stored = locked.http.post("/v2/glossaries", json=WORLD, headers=key).json()
    place = f"/v2/glossaries/{stored['glossary_id']}"
    for method, path in (
        ("POST", "/v2/glossaries"),
        ("GET", "/v2/glossaries"),
        ("GET", place),
        ("DELETE", place),
    ):
        refused = locked.http.request(method, path, json=WORLD if method == "POST" else None)
        assert refused.status_code == 403 and "message" in refused.json()
    assert locked.http.get(f"{place}/entries").status_code == 403
    body = ASKED | {"glossary_id": stored["glossary_id"]}
    assert locked.http.post("/v2/translate", json=ASKED).status_code == 200
    assert locked.http.post("/v2/translate", json=body).status_code == 403
    assert "Erdball" in locked.http.post("/v2/translate", json=body, headers=key).text
    assert locked.http.delete(place, headers=key).status_code == 204
