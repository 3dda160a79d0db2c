"""Several models over HTTP: which one a request chooses, and what is listed of them."""

import msgspec
import pytest
from fake_engine import INFO
from frontend_process import FrontendProcess
from native_calls import CHAT, COMPLETIONS, FIM, TRANSLATE, V1

OTHER = msgspec.structs.replace(INFO, model="big", checkpoint="rwkv7-g1c-7.2b", fingerprint="f" * 16)
HELLO = [{"role": "user", "content": "hello"}]
GENERATING = [
    (V1, {"contents": ["hello"]}),
    ("/v2/chat/completions", {"contents": ["hello"]}),
    ("/v3/chat/completions", {"contents": ["hello"]}),
    ("/big_batch/completions", {"contents": ["hello"], "stream": False}),
    ("/state/chat/completions", {"contents": ["hello"], "session_id": "s"}),
    ("/multi_state/chat/completions", {"contents": ["hello"], "session_id": "s", "dialogue_idx": 0}),
    (FIM, {"prefix": ["a"], "suffix": ["b"]}),
    (TRANSLATE, {"text_list": ["hello"], "target_lang": "fr"}),
    (V1, {"messages": HELLO}),
    (CHAT, {"messages": HELLO}),
    (COMPLETIONS, {"prompt": "hello"}),
    ("/v1/responses", {"input": "hello"}),
]
NATIVE = [call for call in GENERATING[:8]]
SESSIONS = [
    ("POST", "/state/status", {}),
    ("POST", "/state/delete", {"session_id": "s", "delete_prefix": True}),
    ("POST", "/v1/state/rewind", {"session_id": "s", "turn": 0}),
    ("POST", "/v1/state/fork", {"session_id": "s", "new_session_id": "t", "overwrite": True}),
    ("POST", "/v1/state/export", {"session_id": "s"}),
    ("POST", "/v1/state/list", {}),
    ("POST", "/v1/state/delete", {"state_id": "nobody"}),
]


@pytest.fixture(scope="module")
def server():
    with FrontendProcess(infos=[INFO, OTHER]) as process:
        process.engine.sessions["s"], process.engine.turns["s"] = "a", ["a"]
        yield process


@pytest.fixture(scope="module")
def single():
    with FrontendProcess() as process:
        yield process


def error_of(reply) -> str:
    error = reply.json()["error"]
    return error if isinstance(error, str) else error["message"]


@pytest.mark.parametrize(("path", "body"), GENERATING)
def test_model_chooses_on_every_route(server, path, body):
    for name, chosen in (("big", "big"), (INFO.model, INFO.model), (None, INFO.model), ("rwkv7", INFO.model)):
        asked = body if name is None else body | {"model": name}
        reply = server.http.post(path, json=asked)
        assert reply.status_code == 200, reply.text
        assert server.engine.requests[-1].to_model == chosen
    reply = server.http.post(path, json=body | {"model": "gpt-4"})
    assert reply.status_code == 404
    assert "gpt-4" in error_of(reply) and "fake-rwkv, big" in error_of(reply)


def test_the_error_has_the_form_of_the_route(server):
    error = server.http.post(CHAT, json={"messages": HELLO, "model": "gpt-4"}).json()["error"]
    assert (error["code"], error["param"], error["type"]) == ("model_not_found", "model", "not_found_error")
    assert isinstance(server.http.post(FIM, json={"model": "gpt-4"}).json()["error"], str)


@pytest.mark.parametrize(("path", "body"), NATIVE)
def test_one_model_alone_answers_native_requests_under_any_name(single, path, body):
    assert single.http.post(path, json=body | {"model": "mine"}).status_code == 200


def test_one_model_alone_is_no_other_for_openai_clients(single):
    for path, body in GENERATING[8:]:
        reply = single.http.post(path, json=body | {"model": "gpt-4"})
        assert reply.status_code == 404 and INFO.model in error_of(reply)
        assert single.http.post(path, json=body | {"model": 7}).status_code == 400


@pytest.mark.parametrize(("method", "path", "body"), SESSIONS)
def test_what_is_stored_is_a_models_own(server, method, path, body):
    for name in ("big", INFO.model):
        server.http.request(method, path, json=body | {"model": name})
        assert server.engine.commands[-1].to_model == name
    assert server.http.request(method, path, json=body | {"model": "gpt-4"}).status_code == 404


@pytest.mark.parametrize("path", ["/v1/state/history", "/v1/state/export"])
def test_a_url_may_name_the_model(server, path):
    server.http.get(path, params={"session_id": "s", "model": "big"})
    assert server.engine.commands[-1].to_model == "big"


def test_all_models_are_listed(server):
    for path in ("/v1/models", "/openai/v1/models"):
        listed = server.http.get(path).json()["data"]
        assert [model["id"] for model in listed] == ["fake-rwkv", "big"]
    assert [each["id"] for each in server.http.get("/models").json()] == ["fake-rwkv", "big"]
    assert server.http.get("/v1/models/big").json()["id"] == "big"
    assert server.http.get("/v1/models/gpt-4").status_code == 404
    assert server.http.get("/v1/server/status").json()["models"] == ["fake-rwkv", "big"]


def test_chats_are_rendered_as_the_models_checkpoint_was_trained(server):
    server.http.post(CHAT, json={"messages": HELLO, "model": "big"})
    assert server.engine.requests[-1].prefix_ids == [0]
    assert server.engine.requests[-1].prompts[0].endswith("<think></think")


def test_a_start_state_stands_behind_the_name_of_its_model(server):
    put = server.http.post(
        "/v1/state/upload", files={"file": ("pirate.pth", b"state")}, data={"model": "big"}
    )
    assert put.status_code == 200 and server.engine.commands[-1].to_model == "big"
    server.http.post(V1, json={"contents": ["hello"], "model": "big pirate"})
    request = server.engine.requests[-1]
    assert (request.to_model, request.start_state) == ("big", "pirate")


def test_a_response_is_found_in_the_model_that_made_it(server):
    made = server.http.post("/v1/responses", json={"input": "hello", "model": "big"}).json()
    assert made["model"] == "big"
    assert server.http.get(f"/v1/responses/{made['id']}").json()["id"] == made["id"]
    server.http.post(
        "/v1/responses", json={"input": "and?", "model": "big", "previous_response_id": made["id"]}
    )
    assert server.engine.requests[-1].to_model == "big"


@pytest.mark.parametrize("gone", ["fake-rwkv", "big"])
def test_a_model_that_is_being_removed_is_left_out(server, gone):
    """It is known here until the engine says that it has gone."""
    (left,) = {"fake-rwkv", "big"} - {gone}
    made = server.http.post("/v1/responses", json={"input": "hello", "model": left}).json()
    server.engine.start_states.clear()
    server.engine.gone.add(gone)
    try:
        assert [model["id"] for model in server.http.get("/v1/models").json()["data"]] == [left]
        assert [model["name"] for model in server.http.get("/api/tags").json()["models"]] == [left, "rwkv7"]
        assert server.http.get("/v1/server/status").status_code == 200
        assert server.http.post("/v1/server/stop", json={"request_id": "r"}).json()["stopped"] is False
        assert server.http.post("/v1/server/pause", json={"request_id": "r"}).json()["paused"] is False
        assert server.http.delete(f"/v1/responses/{made['id']}").status_code == 200
    finally:
        server.engine.gone.clear()
