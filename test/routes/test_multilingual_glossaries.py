"""DeepL's glossaries of several pairs of languages, as its library asks. The engine echoes prompts."""

from datetime import datetime

import pytest
from frontend_process import PASSWORD
from msgspec.structs import replace

from routes.translate.glossary_store import ENTRIES, MOST_KEPT
from rwkv_batch.wire.commands import Command, GetDocument, ListDocuments, PutDocument, RemoveDocument
from rwkv_batch.wire.protocol import Event, Failed

GERMAN = {
    "source_lang": "EN",
    "target_lang": "DE",
    "entries": "world\tErdball\nbig dog|big dogs\tHofhund",
    "entries_format": "tsv",
}
FRENCH = {"source_lang": "en", "target_lang": "fr", "entries": "world,globe", "entries_format": "csv"}
BOTH = {"name": "ours", "dictionaries": [GERMAN, FRENCH]}
ASKED = {"text": ["Hello world"], "source_lang": "EN", "target_lang": "DE"}
TO_FRENCH = {"source_lang": "EN", "target_lang": "FR"}


@pytest.fixture
def stored(server):
    """A glossary of two pairs of languages while the test runs."""
    found = server.http.post("/v3/glossaries", json=BOTH)
    assert found.status_code == 201, found.text
    yield found.json()
    server.http.delete(f"/v3/glossaries/{found.json()['glossary_id']}")


def place(glossary: dict) -> str:
    return f"/v3/glossaries/{glossary['glossary_id']}"


def count(source: str, target: str, entries: int) -> dict:
    return {"source_lang": source, "target_lang": target, "entry_count": entries}


def translated(server, body: dict) -> str:
    answer = server.http.post("/v2/translate", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["translations"][0]["text"]


def entries(server, glossary: dict, **languages: str) -> dict[tuple[str, str], str]:
    found = server.http.get(f"{place(glossary)}/entries", params=languages)
    assert found.status_code == 200, found.text
    return {
        (each["source_lang"], each["target_lang"]): each["entries"] for each in found.json()["dictionaries"]
    }


def documents(server) -> list[str]:
    """What the engine keeps of glossaries."""
    return server.engine.reply_to(ListDocuments("x", "glossary")).keys


def test_a_glossary_is_stored_listed_used_and_deleted(server, stored):
    assert (stored["name"], stored["dictionaries"]) == ("ours", [count("en", "de", 2), count("en", "fr", 1)])
    assert datetime.strptime(stored["creation_time"], "%Y-%m-%dT%H:%M:%S.%f%z")
    assert server.http.get("/v3/glossaries").json() == {"glossaries": [stored]}
    assert server.http.get(place(stored)).json() == stored
    assert entries(server, stored) == {("en", "de"): GERMAN["entries"], ("en", "fr"): "world\tglobe"}
    assert entries(server, stored, **TO_FRENCH) == {("en", "fr"): "world\tglobe"}
    named = {"glossary_id": stored["glossary_id"]}
    assert "Hello Erdball" in translated(server, ASKED | named)
    assert "Hello globe" in translated(server, ASKED | named | {"target_lang": "FR"})
    assert "Hello globe" in translated(
        server, ASKED | named | {"target_lang": "fr-FR", "source_lang": "en-GB"}
    )
    gone = server.http.delete(place(stored))
    assert (gone.status_code, gone.text) == (204, "")
    for answer in (
        server.http.get(place(stored)),
        server.http.get(f"{place(stored)}/entries"),
        server.http.patch(place(stored), json={"name": "theirs"}),
        server.http.put(f"{place(stored)}/dictionaries", json=FRENCH),
        server.http.delete(f"{place(stored)}/dictionaries", params=TO_FRENCH),
        server.http.delete(place(stored)),
        server.http.post("/v2/translate", json=ASKED | named),
    ):
        assert answer.status_code == 404 and "There is no glossary" in answer.json()["message"]
    assert server.http.get("/v3/glossaries").json() == {"glossaries": []} and documents(server) == []


def test_a_glossary_is_changed(server, stored):
    more = FRENCH | {"entries": "moon,lune\nworld,monde"}
    spanish = FRENCH | {"target_lang": "ES", "entries": "world,mundo"}
    changed = server.http.patch(
        place(stored), json={"name": "theirs", "dictionaries": [more, spanish]}
    ).json()
    assert changed["name"] == "theirs" and changed == server.http.get(place(stored)).json()
    assert changed["dictionaries"] == [count("en", "de", 2), count("en", "es", 1), count("en", "fr", 2)]
    assert entries(server, stored, **TO_FRENCH) == {("en", "fr"): "moon\tlune\nworld\tmonde"}
    named = ASKED | {"glossary_id": stored["glossary_id"], "target_lang": "FR"}
    assert "Hello monde" in translated(server, named)
    new = FRENCH | {"entries": "world,univers"}
    replaced = server.http.put(f"{place(stored)}/dictionaries", json=new)
    assert (replaced.status_code, replaced.json()) == (200, count("en", "fr", 1))
    assert entries(server, stored, **TO_FRENCH) == {("en", "fr"): "world\tunivers"}, "no other terms are left"
    assert "Hello univers" in translated(server, named)
    gone = server.http.delete(f"{place(stored)}/dictionaries", params=TO_FRENCH)
    assert (gone.status_code, gone.text) == (204, "")
    again = server.http.delete(f"{place(stored)}/dictionaries", params=TO_FRENCH)
    assert again.status_code == 404 and "no dictionary from EN to FR" in again.json()["message"]
    answer = server.http.get(f"{place(stored)}/entries", params=TO_FRENCH)
    assert answer.status_code == 404
    assert list(entries(server, stored)) == [("en", "de"), ("en", "es")]
    answer = server.http.post("/v2/translate", json=named)
    assert answer.status_code == 400 and "from EN to DE, EN to ES" in answer.json()["message"]


def test_a_new_term_counts_before_those_that_are_stored(server, stored):
    named = ASKED | {"text": ["Hello big dogs"], "glossary_id": stored["glossary_id"]}
    assert "Hello Hofhund" in translated(server, named)
    new = GERMAN | {"entries": "big dogs\tDoggen"}
    changed = server.http.patch(place(stored), json={"dictionaries": [new]}).json()
    assert changed["dictionaries"][0] == count("en", "de", 3), "the others stay"
    assert "Hello Doggen" in translated(server, named)


def test_a_change_of_which_a_part_does_not_fit_changes_nothing(server, stored):
    fits = GERMAN | {"entries": "world\tWelt"}
    too_much = FRENCH | {"entries": "\n".join(f"{number},x" for number in range(25_000))}  # with one stored
    answer = server.http.patch(place(stored), json={"dictionaries": [fits, too_much]})
    assert answer.status_code == 400 and "50002 forms" in answer.json()["message"]
    assert entries(server, stored)["en", "de"] == GERMAN["entries"]


def test_both_versions_of_the_api_know_a_glossary_of_one_pair(server, stored):
    body = GERMAN | {"name": "small"}
    one = server.http.post("/v2/glossaries", json=body).json()
    assert server.http.get("/v2/glossaries").json() == {"glossaries": [one]}, "and none of several pairs"
    assert server.http.get(place(one)).json()["dictionaries"] == [count("en", "de", 2)]
    answer = server.http.get(f"/v2/glossaries/{stored['glossary_id']}")
    assert answer.status_code == 400 and place(stored) in answer.json()["message"]
    assert server.http.get(f"/v2/glossaries/{stored['glossary_id']}/entries").status_code == 400
    assert server.http.delete(place(one)).status_code == 204
    assert server.http.get(f"/v2/glossaries/{one['glossary_id']}").status_code == 404


@pytest.mark.parametrize("as_form", [False, True])
def test_several_glossaries_of_a_translation_count_in_their_order(server, stored, as_form):
    other = {"name": "more", "dictionaries": [GERMAN | {"entries": "world\tWelt\nhello\tServus"}]}
    second = server.http.post("/v3/glossaries", json=other).json()
    ids = [stored["glossary_id"], second["glossary_id"]]
    for order, wanted in ((ids, "Servus Erdball"), (ids[::-1], "Servus Welt")):
        body = ASKED | {"glossary_ids": ",".join(order) if as_form else order}
        answer = server.http.post("/v2/translate", **{"data" if as_form else "json": body})
        assert wanted in answer.json()["translations"][0]["text"]
    server.http.delete(place(second))
    for change, why in (
        ({"glossary_ids": ids, "glossary_id": ids[0]}, "and not both"),
        ({"glossary_ids": ids * 3}, "at most 5"),
        ({"glossary_ids": [5]}, "`glossary_ids[0]`"),
    ):
        answer = server.http.post("/v2/translate", json=ASKED | change)
        assert answer.status_code == 400 and why in answer.json()["message"]
    assert server.http.post("/v2/translate", json=ASKED | {"glossary_ids": ids}).status_code == 404


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"name": ""}, "`name`"),
        ({"dictionaries": []}, "`dictionaries`"),
        ({"dictionaries": [GERMAN, FRENCH, GERMAN | {"target_lang": "de-AT"}]}, "`dictionaries[2]`"),
        ({"dictionaries": [GERMAN | {"source_lang": "xx"}]}, '"xx" is no language'),
        ({"dictionaries": [GERMAN | {"target_lang": "auto"}]}, "`dictionaries[0].target_lang`"),
        ({"dictionaries": [FRENCH, GERMAN | {"entries": "a"}]}, "`dictionaries[1].entries`: line 1"),
        ({"dictionaries": [GERMAN | {"entries_format": "xlsx"}]}, "entries_format"),
    ],
)
def test_what_is_refused(server, stored, change, why):
    for method, path, body in (("POST", "/v3/glossaries", BOTH | change), ("PATCH", place(stored), change)):
        if method == "PATCH" and change == {"dictionaries": []}:
            why = "Nothing is changed"
        answer = server.http.request(method, path, json=body)
        assert answer.status_code == 400 and why in answer.json()["message"]
    assert server.http.get("/v3/glossaries").json() == {"glossaries": [stored]}


def test_a_dictionary_that_is_no_dictionary_is_refused(server, stored):
    for method, path, sent, why in (
        ("PATCH", "", {"json": {}}, "Nothing is changed"),
        ("PUT", "/dictionaries", {"json": FRENCH | {"entries": ""}}, "needs an entry"),
        ("PUT", "/dictionaries", {"json": FRENCH | {"target_lang": "xx"}}, '"xx" is no language'),
        ("DELETE", "/dictionaries", {"params": {"source_lang": "EN"}}, "`target_lang`"),
        ("DELETE", "/dictionaries", {"params": {"source_lang": "xx", "target_lang": "DE"}}, "no language"),
        ("GET", "/entries", {"params": {"source_lang": "xx"}}, '"xx" is no language'),
    ):
        answer = server.http.request(method, place(stored) + path, **sent)
        assert answer.status_code == 400 and why in answer.json()["message"], (method, path)
    assert server.http.get("/v3/glossaries/unknown").status_code == 404
    assert "message" in server.http.get("/v3/glossaries/a/b/c").json(), "in the form of the service"


@pytest.mark.parametrize("failing", ["glossary:", "glossary-entries:"])
@pytest.mark.parametrize("path", ["/v2/glossaries", "/v3/glossaries"])
def test_what_cannot_be_stored_leaves_nothing_behind(server, monkeypatch, failing, path):
    answers, put = server.engine.reply_to, []

    def reply_to(command: Command) -> Event:
        if isinstance(command, PutDocument) and command.key.startswith(failing):
            put.append(command.key)
            if failing == "glossary:" or len(put) == (2 if "v3" in path else 1):
                return Failed(command.id, "The disk is full.")
        return answers(command)

    monkeypatch.setattr(server.engine, "reply_to", reply_to)
    answer = server.http.post(path, json=BOTH if "v3" in path else GERMAN | {"name": "ours"})
    assert answer.status_code == 500 and "disk is full" in answer.json()["message"]
    assert put and documents(server) == []


def test_a_change_that_cannot_be_stored_changes_nothing(server, stored, monkeypatch):
    answers, before = server.engine.reply_to, documents(server)

    def reply_to(command: Command) -> Event:
        full = isinstance(command, PutDocument)
        return Failed(command.id, "The disk is full.") if full else answers(command)

    monkeypatch.setattr(server.engine, "reply_to", reply_to)
    new = FRENCH | {"entries": "world,univers"}
    for answer in (
        server.http.put(f"{place(stored)}/dictionaries", json=new),
        server.http.patch(place(stored), json={"dictionaries": [new]}),
        server.http.patch(place(stored), json={"name": "theirs"}),
    ):
        assert answer.status_code == 500
    assert documents(server) == before and server.http.get(place(stored)).json() == stored
    assert entries(server, stored, **TO_FRENCH) == {("en", "fr"): "world\tglobe"}


def test_a_change_of_which_a_part_cannot_be_stored_changes_nothing(server, stored, monkeypatch):
    reply_to, before = server.engine.reply_to, documents(server)

    def full(command: Command) -> Event:
        fails = isinstance(command, PutDocument) and ":fr:" in command.key
        return Failed(command.id, "The disk is full.") if fails else reply_to(command)

    monkeypatch.setattr(server.engine, "reply_to", full)
    new = [FRENCH | {"target_lang": language} for language in ("DE", "ES", "FR", "IT")]
    answer = server.http.patch(place(stored), json={"name": "theirs", "dictionaries": new})
    assert answer.status_code == 500 and "disk is full" in answer.json()["message"]
    assert documents(server) == before and server.http.get(place(stored)).json() == stored


def test_a_change_for_which_there_is_no_room_changes_nothing(server, stored, monkeypatch):
    """There is room for one pair of languages more, and for terms of those that are there."""
    reply_to, before = server.engine.reply_to, entries(server, stored)

    def nearly_full(command: Command) -> Event:
        reply = reply_to(command)
        if isinstance(command, ListDocuments) and command.prefix == ENTRIES:
            others = [f"{ENTRIES}other{number}:aa:bb:1:1" for number in range(MOST_KEPT - 1 - len(before))]
            return replace(reply, keys=[*reply.keys, *others])
        return reply

    monkeypatch.setattr(server.engine, "reply_to", nearly_full)
    new = [FRENCH | {"target_lang": language} for language in ("DE", "ES", "IT")]
    answer = server.http.patch(place(stored), json={"dictionaries": new})
    assert answer.status_code == 400 and f"at most {MOST_KEPT}" in answer.json()["message"]
    assert entries(server, stored) == before
    answer = server.http.patch(place(stored), json={"dictionaries": new[:2]})
    assert answer.status_code == 200 and len(entries(server, stored)) == len(before) + 1


def test_what_is_put_when_the_glossary_was_deleted_is_not_kept(server, monkeypatch):
    answers = server.engine.reply_to

    def reply_to(command: Command) -> Event:
        if isinstance(command, PutDocument):  # another front end is faster
            for key in documents(server):
                answers(RemoveDocument("x", key))
        return answers(command)

    for method, path, body in (
        ("PUT", "/dictionaries", FRENCH),
        ("PATCH", "", {"name": "theirs", "dictionaries": [FRENCH]}),
        ("PATCH", "", {"name": "theirs"}),
    ):
        glossary = server.http.post("/v3/glossaries", json=BOTH).json()
        with monkeypatch.context() as meanwhile:
            meanwhile.setattr(server.engine, "reply_to", reply_to)
            answer = server.http.request(method, place(glossary) + path, json=body)
        assert answer.status_code == 404 and "There is no glossary" in answer.json()["message"]
        assert documents(server) == []


def test_a_glossary_is_renamed_again_and_again(server, stored):
    for name in ("theirs", "yours", "ours, too"):
        renamed = server.http.patch(place(stored), json={"name": name})
        assert renamed.status_code == 200 and renamed.json() == stored | {"name": name}
        assert server.http.get(place(stored)).json() == renamed.json()
        assert server.http.get("/v3/glossaries").json() == {"glossaries": [renamed.json()]}
    assert len(documents(server)) == 4, "two dictionaries, the first name and the last"
    assert server.http.delete(place(stored)).status_code == 204
    assert documents(server) == []


def test_a_name_that_is_replaced_while_it_is_read_is_the_next_one(server, stored, monkeypatch):
    answers, key = server.engine.reply_to, f"glossary-name:{stored['glossary_id']}:"
    server.http.patch(place(stored), json={"name": "theirs"})

    def reply_to(command: Command) -> Event:
        if isinstance(command, GetDocument) and command.key == f"{key}1":  # another front end is faster
            first = answers(GetDocument("x", command.key)).data
            answers(PutDocument("x", f"{key}2", first.replace(b"theirs", b"yours")))
            answers(RemoveDocument("x", command.key))
        return answers(command)

    monkeypatch.setattr(server.engine, "reply_to", reply_to)
    assert server.http.get(place(stored)).json() == stored | {"name": "yours"}


@pytest.mark.parametrize("put", ["glossary-entries:{}:en:fr:2:1", "glossary-name:{}:1"])
def test_what_is_put_while_the_glossary_is_deleted_goes_with_it(server, stored, monkeypatch, put):
    answers, name = server.engine.reply_to, f"glossary:{stored['glossary_id']}"
    put = put.format(stored["glossary_id"])

    def reply_to(command: Command) -> Event:
        if isinstance(command, RemoveDocument) and command.key == name:
            answers(PutDocument("x", put, b"[]"))
        return answers(command)

    monkeypatch.setattr(server.engine, "reply_to", reply_to)
    assert server.http.delete(place(stored)).status_code == 204
    assert documents(server) == []


def test_glossaries_need_the_password(locked):
    key = {"Authorization": f"DeepL-Auth-Key {PASSWORD}"}
    stored = locked.http.post("/v3/glossaries", json=BOTH, headers=key).json()
    for method, path, sent in (
        ("POST", "/v3/glossaries", {"json": BOTH}),
        ("GET", "/v3/glossaries", {}),
        ("GET", place(stored), {}),
        ("PATCH", place(stored), {"json": {"name": "a"}}),
        ("DELETE", place(stored), {}),
        ("GET", f"{place(stored)}/entries", {"params": TO_FRENCH}),
        ("PUT", f"{place(stored)}/dictionaries", {"json": FRENCH}),
        ("DELETE", f"{place(stored)}/dictionaries", {"params": TO_FRENCH}),
    ):
        for headers in ({}, {"Authorization": "DeepL-Auth-Key wrong"}):
            refused = locked.http.request(method, path, headers=headers, **sent)
            assert refused.status_code == 403 and refused.json()["message"].startswith("Unauthorized")
    assert locked.http.post("/v2/translate", json=ASKED | {"glossary_ids": ["a"]}).status_code == 403
    assert locked.http.delete(place(stored), headers=key).status_code == 204
