"""Keys over HTTP: who is let in, what each may use, and that nothing of one is seen by another.

The last is tried on every route of the table, by requests that name what the other key has stored.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from fake_engine import INFO
from frontend_process import PASSWORD, FrontendProcess
from msgspec.structs import replace
from native_calls import CHAT, V1
from openapi_calls import TEXTS

from routes.openapi.document import document
from routes.table import ROUTES, TRANSLATIONS
from routes.translate.errors import deepl_shape
from rwkv_batch.keys import records
from rwkv_batch.keys.records import Key
from rwkv_batch.wire.protocol import AdapterInfo

OTHER = replace(INFO, model="other")
SESSION, REQUEST = "tell-tale-session", "tell-tale-request"
TURN = "/state/chat/completions"


class Keys(NamedTuple):
    """The file, and a client for each key."""

    process: FrontendProcess
    file: Path
    clients: dict[str, httpx.Client]

    def add(self, name: str, **limits: object) -> httpx.Client:
        secret = records.add(self.file, Key(name, "", 0, 0.0, **limits))
        client = self.clients[name] = self.process.client()
        client.headers["authorization"] = f"Bearer {secret}"
        return client


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keys]:
    file = tmp_path_factory.mktemp("keys") / "keys.json"
    alice = records.add(file, Key("alice", "", 0, 0.0))
    bob = records.add(file, Key("bob", "", 0, 0.0))
    admin = records.add(file, Key("root", "", 0, 0.0, admin=True))
    secrets = {"alice": alice, "bob": bob, "root": admin, "password": PASSWORD}
    with FrontendProcess(infos=[INFO, OTHER], keys=str(file), password=PASSWORD) as process:
        clients = {name: process.client() for name in secrets}
        for name, client in clients.items():
            client.headers["authorization"] = f"Bearer {secrets[name]}"
        yield Keys(process, file, clients)
        for client in clients.values():
            client.close()


def new_key(keys: Keys, name: str, **limits: object) -> httpx.Client:
    """A client with a key that the front end takes by now."""
    client = keys.add(name, **limits)
    keys.process.until(lambda _: client.get("/v1/models").status_code != 401)
    return client


def turn(client: httpx.Client, session: str, prompt: str = "Hello") -> httpx.Response:
    return client.post(TURN, json={"session_id": session, "contents": [prompt], "max_tokens": 50})


def test_without_a_key_nothing_but_what_is_open_is_answered(keys):
    documented = document(ROUTES, guarded=True)["paths"]
    for route in ROUTES:
        path = "/".join(f"{{{p[1:]}}}" if p.startswith(":") else p for p in route.path.split("/"))
        for method in route.methods.split():
            is_open = {} in documented[path][method.lower()]["security"]
            answer = keys.process.http.request(method, route.path.replace(":", ""), json={})
            refused = 403 if route.shape is deepl_shape else 401
            assert is_open or answer.status_code == refused, (method, route.path)
            assert "sk-rwkv" not in answer.text


@pytest.mark.parametrize(
    ("path", "body", "where"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, ("error", "code")),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5},
            ("error", "type"),
        ),
        ("/api/chat", {"messages": [{"role": "user", "content": "a"}]}, ("error",)),
        (V1, {"contents": ["a"]}, ("error",)),
    ],
)
def test_401_and_403_in_the_shape_of_each_family(keys, path, body, where):
    limited = keys.clients.get("one-model") or new_key(keys, "one-model", models=["other"])
    wrong = keys.process.http.post(path, json=body, headers={"x-api-key": "sk-rwkv-wrong"})
    assert wrong.status_code == 401
    found = wrong.json()
    for name in where:
        found = found[name]
    assert found in ("invalid_api_key", "authentication_error", "Unauthorized: invalid or missing key")
    refused = limited.post(path, json=body | {"model": "fake-rwkv"})
    assert refused.status_code == 403 and "may not use the model fake-rwkv" in refused.text
    assert limited.post(path, json=body | {"model": "other"}).status_code == 200


def test_each_protocol_has_its_place_for_the_key(keys):
    secret = keys.clients["alice"].headers["authorization"].removeprefix("Bearer ")
    http = keys.process.http
    for header in ("x-api-key", "api-key", "API-Key"):
        assert http.get("/v1/models", headers={header: secret}).status_code == 200
        assert http.get("/v1/models", headers={header: "sk-rwkv-wrong"}).status_code == 401
    assert http.get("/v1/models", params={"password": secret}).status_code == 200
    assert http.post(V1, json={"contents": ["a"], "password": secret}).status_code == 200


def test_a_key_sees_the_models_that_it_may_use(keys):
    limited = keys.clients.get("one-model") or new_key(keys, "one-model", models=["other"])
    listed = [each["id"] for each in limited.get("/v1/models").json()["data"]]
    assert listed == ["other"]
    answer = limited.post(CHAT, json={"messages": [{"role": "user", "content": "a"}]})
    assert answer.json()["model"] == "other"  # its default one is the first that it may use


def test_a_key_without_sessions_stores_nothing(keys):
    plain = new_key(keys, "plain", sessions=False)
    assert plain.post(V1, json={"contents": ["a"]}).status_code == 200
    assert turn(plain, "s").status_code == 403
    assert plain.post("/state/status", json={}).status_code == 403
    assert plain.post("/v1/responses", json={"input": "a"}).status_code == 403
    assert plain.post("/v1/responses", json={"input": "a", "store": False}).status_code == 200
    pauses = plain.post("/v1/server/pause", json={"request_id": "x"})
    assert pauses.status_code == 403 and "pause requests" in pauses.text
    assert plain.post("/v1/server/stop", json={"request_id": "x"}).status_code == 200


def test_a_key_whose_last_day_is_over_is_403(keys):
    old = new_key(keys, "old", ends="2020-02-02")
    answer = old.post(CHAT, json={"messages": [{"role": "user", "content": "a"}]})
    assert answer.status_code == 403 and "until 2020-02-02" in answer.text
    assert old.get("/health").status_code == 200


def test_an_adapter_that_the_key_may_not_use_is_403(keys):
    engine = keys.process.engine
    engine.adapters |= {name: AdapterInfo(name, "5eed" * 8, 4, 0.0, "") for name in ("capitals", "rivers")}
    limited = new_key(keys, "no-rivers", adapters=["capitals"])
    assert limited.post(V1, json={"contents": ["a"], "adapter": "capitals"}).status_code == 200
    refused = limited.post(V1, json={"contents": ["a"], "adapter": "rivers"})
    assert refused.status_code == 403 and "may not use the adapter rivers" in refused.text
    named = [each["id"] for each in limited.get("/v1/models").json()["data"]]
    assert "fake-rwkv:capitals" in named and "fake-rwkv:rivers" not in named
    listed = limited.get("/v1/adapters").json()["data"]
    assert "rivers" not in str(listed) and "capitals" in str(listed)
    missing = limited.post(V1, json={"contents": ["a"], "adapter": "lakes"})
    assert missing.status_code == 404 and "rivers" not in missing.text and "capitals" in missing.text


def test_what_all_use_is_changed_by_the_operator_only(keys):
    file = {"file": ("pirate.pth", b"state")}
    for name, status in (("alice", 403), ("root", 200)):
        answer = keys.clients[name].post("/v1/state/upload", files=file, data={"state_id": "pirate"})
        assert answer.status_code == status, answer.text
    for name, status in (("alice", 403), ("password", 200)):
        answer = keys.clients[name].request("DELETE", "/v1/state/delete", json={"state_id": "pirate"})
        assert answer.status_code == status
    assert keys.clients["alice"].get("/metrics").status_code == 403
    assert keys.clients["root"].get("/metrics").status_code == 200
    loads = {"lora_name": "capitals", "lora_path": "there.pth"}
    assert keys.clients["alice"].post("/v1/load_lora_adapter", json=loads).status_code == 403


def test_two_keys_have_sessions_of_one_name(keys):
    alice, bob = keys.clients["alice"], keys.clients["bob"]
    assert turn(alice, "mine", "I am Alice.").status_code == 200
    assert turn(bob, "mine", "I am Bob.").status_code == 200
    for client, text in ((alice, "I am Alice."), (bob, "I am Bob.")):
        found = client.get("/v1/state/history", params={"session_id": "mine"}).json()
        assert [each["prompt"] for each in found["turns"]] == [text]
        listed = client.post("/state/status", json={}).json()
        assert "mine" in [each["session_id"] for each in listed["sessions"]]
        assert listed["total_sessions"] == len(listed["sessions"])
        assert "owner" not in listed["sessions"][0]


def test_lists_of_a_key_have_pages(keys):
    carol = new_key(keys, "carol")
    for number in range(5):
        turn(carol, f"s{number}")
    page = carol.post("/state/status", json={"limit": 2, "after": "s1"}).json()
    assert [each["session_id"] for each in page["sessions"]] == ["s2", "s3"] and page["total_sessions"] == 5


def test_rows_of_a_batch_key_wait_for_others(keys):
    nightly = new_key(keys, "nightly", priority="batch")
    assert nightly.post(V1, json={"contents": ["at night"]}).status_code == 200
    assert keys.process.engine.request("at night").batch
    assert keys.clients["alice"].post(V1, json={"contents": ["by day"]}).status_code == 200
    assert not keys.process.engine.request("by day").batch


def test_an_idempotency_key_is_another_one_for_each_key(keys):
    ids = []
    for name in ("alice", "bob", "password"):
        body = {"session_id": "same", "contents": [f"once by {name}"]}
        answer = keys.clients[name].post(TURN, json=body, headers={"idempotency-key": "one"})
        assert answer.status_code == 200
        ids.append(keys.process.engine.request(f"once by {name}").turn.request)
    assert len(set(ids)) == 3


def test_the_operator_sees_all_and_asks_in_the_name_of_a_key(keys):
    turn(keys.clients["alice"], "of-alice")
    for name in ("password", "root"):
        operator = keys.clients[name]
        listed = operator.post("/state/status", json={}).json()["sessions"]
        assert {"session_id": "of-alice", "owner": "alice"}.items() <= next(
            each for each in listed if each["session_id"] == "of-alice"
        ).items()
        where = {"params": {"session_id": "of-alice"}}
        assert operator.get("/v1/state/history", **where).status_code == 404
        named = operator.get("/v1/state/history", **where, headers={"x-rwkv-owner": "alice"})
        assert named.status_code == 200
        for page in ({"limit": 1000}, {"limit": 1000, "after": "a"}):
            listed = operator.post("/state/status", json=page).json()["sessions"]
            assert "owner" not in "".join(map(str, listed))  # pages are of one owner: names stand in order
            ids = [each["session_id"] for each in listed]
            assert ids == sorted(ids) and "of-alice" not in ids
        used = operator.get("/v1/usage", headers={"x-rwkv-owner": "alice"}).json()
        assert used["key"] == "alice" and {each["key"] for each in used["data"]} <= {"alice"}
    denied = keys.clients["bob"].get("/v1/state/history", **where, headers={"x-rwkv-owner": "alice"})
    assert denied.status_code == 403


def test_what_the_server_had_before_belongs_to_the_password(keys):
    keys.process.engine.sessions["from before"] = "old"
    keys.process.engine.turns["from before"] = ["old"]
    where = {"params": {"session_id": "from before"}}
    assert keys.clients["password"].get("/v1/state/history", **where).status_code == 200
    assert keys.clients["alice"].get("/v1/state/history", **where).status_code == 404


def test_a_node_of_a_tree_says_its_own_session(keys):
    body = {"session_id": "tree", "dialogue_idx": None, "contents": ["Hi"], "stream": True}
    text = keys.clients["alice"].post("/multi_state/chat/completions", json=body).text
    (node,) = [json.loads(line[6:]) for line in text.splitlines() if "multi_state.dialogue_idx" in line]
    assert node["session_id"] == "tree:1"
    again = keys.clients["alice"].post(
        "/multi_state/chat/completions", json=body | {"dialogue_idx": 1, "stream": False}
    )
    assert again.json()["dialogue_idx"] == 2
    assert "\x1e" not in text and "\\u001e" not in text


# What names something stored, wherever it may stand in a request; all of it is in every request below.
def naming(response: str) -> dict[str, object]:
    return {
        "session_id": SESSION,
        "new_session_id": SESSION + "-copy",
        "request_id": REQUEST,
        "previous_response_id": response,
        "dialogue_idx": 1,
        "turn": 0,
    }


@pytest.fixture(scope="module")
def secret(keys: Keys) -> Iterator[str]:
    """What alice has stored and has running, whose words are in no request of bob. The id of a response."""
    alice = keys.clients["alice"]
    for session in (SESSION, f"{SESSION}:1"):
        assert turn(alice, session, "alice's diary").status_code == 200
    made = alice.post("/v1/responses", json={"input": "alice's diary"}).json()
    endless = {"contents": ["hang alice's diary"], "stream": True}
    with alice.stream("POST", V1, json=endless, headers={"x-request-id": REQUEST}) as running:
        assert running.status_code == 200
        yield made["id"]


def of_alice(keys: Keys) -> list[object]:
    """All that she has."""
    sessions, alice = keys.process.engine.sessions, keys.clients["alice"]
    running = alice.get("/v1/server/status").json()["active_requests"]
    return [{key: text for key, text in sessions.items() if "alice" in key}, running]


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.methods} {route.path}".replace("/", "."))
def test_no_route_shows_or_changes_what_belongs_to_another_key(keys, secret, route):
    """A new route is tried without being named here, with every name under which it could ask."""
    bob, before = keys.clients["bob"], of_alice(keys)
    assert len(before[0]) >= 3 and [each["request_id"] for each in before[1]] == [REQUEST]
    for method in route.methods.split():
        path = route.path.replace(":id", secret).replace(":file", "app.js")
        for extra in TEXTS.get(route.path, [{}]):
            query = {"session_id": SESSION, "request_id": REQUEST}
            headers = {"x-rwkv-session-id": SESSION, "x-request-id": REQUEST}
            named = {"contents": ["Hi"]} | extra | naming(secret)
            for body in (named, {name: named[name] for name in named if name != "previous_response_id"}):
                answer = bob.request(method, path, params=query, json=body, headers=headers)
                assert answer.status_code < 500, answer.text
                assert "diary" not in answer.text
                assert "\x1e" not in answer.text and "\\u001e" not in answer.text
                if ":id" in route.path:
                    assert answer.status_code == 404, answer.text
        bob.request(method, path, params=query, content=b"\xffSTATE of bob")
    assert of_alice(keys) == before
    alice = keys.clients["alice"]
    assert alice.get(f"/v1/responses/{secret}").status_code == 200


def test_each_key_has_its_own_glossaries(keys):
    body = {"name": "hers", "source_lang": "en", "target_lang": "de", "entries_format": "tsv"}
    alice, bob = keys.clients["alice"], keys.clients["bob"]
    stored = alice.post("/v2/glossaries", json=body | {"entries": "dog\tRüde"}).json()
    assert alice.get("/v2/glossaries").json() == {"glossaries": [stored]}
    assert bob.get("/v2/glossaries").json() == {"glossaries": []}
    place = f"/v2/glossaries/{stored['glossary_id']}"
    asked = {"text": "a dog", "source_lang": "EN", "target_lang": "DE", "glossary_id": stored["glossary_id"]}
    for client, status in ((alice, 200), (bob, 404), (keys.process.http, 403)):
        assert client.get(place).status_code == client.get(f"{place}/entries").status_code == status
        assert client.post("/v2/translate", json=asked).status_code == status
    limited = keys.clients.get("one-model") or new_key(keys, "one-model", models=["other"])
    own = limited.post("/v2/glossaries", json=body | {"entries": "dog\tRüde"}).json()
    assert limited.get("/v2/glossaries").json() == {"glossaries": [own]}
    assert bob.delete(place).status_code == 404 and alice.delete(place).status_code == 204


def test_the_translations_are_open_as_before(keys):
    assert TRANSLATIONS
    body = {"text": "hello", "target_lang": "DE"}
    assert keys.process.http.post("/translate", json=body).status_code != 401
