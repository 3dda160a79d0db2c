"""Start states over HTTP: upload, list, delete, RWKV-Infer's routes, and which one a request begins in."""

import json
from pathlib import Path

import pytest
from fake_engine import INFO
from frontend_process import FrontendProcess
from session_calls import STATE, TREE

UPLOAD, LIST, DELETE = "/v1/state/upload", "/v1/state/list", "/v1/state/delete"
LOAD, REMOVE = "/loadstatemodel", "/removestatemodel"
MAX_STATE = 1 << 18
MODEL = INFO.model
CHAT = {"messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def server(folder):
    with FrontendProcess(models=str(folder), max_state=MAX_STATE) as process:
        yield process


@pytest.fixture
def http(server):
    """Of the server, without start states."""
    server.engine.start_states.clear()
    return server.http


def upload(http, name="pirate.pth", data=b"state", **form):
    return http.post(UPLOAD, files={"file": (name, data)}, data=form)


def test_an_uploaded_state_is_listed_until_it_is_deleted(http, server):
    reply = upload(http)
    assert reply.status_code == 200, reply.text
    info = {
        "state_id": "pirate",
        "filename": "pirate.pth",
        "original_filename": "pirate.pth",
        "size_bytes": 5,
        "tensor_count": 2,
        "layers": 2,
        "heads": 1,
        "head_size": 64,
        "created": 1769479200,
        "created_ms": 1769479200500,
        "uploaded_at": "2026-01-27T02:00:00Z",
        "default_temperature": None,
        "default_think_type": None,
        "default_chat_template_kwargs": None,
        "default_top_p": None,
    }
    assert reply.json() == {"object": "rwkv.state"} | info
    assert server.engine.start_states["pirate"][:2] == ("vk", b"state")
    for listed in (http.get(LIST), http.post(LIST), http.post(LIST, json={})):
        assert listed.json() == {"object": "list", "data": [info]}
    ids = [model["id"] for model in http.get("/v1/models").json()["data"]]
    assert ids == [MODEL, f"{MODEL} pirate"]
    assert http.get("/models").json() == [{"object": "models", "id": id_} for id_ in ids]
    assert http.get(f"/v1/models/{MODEL} pirate").json()["id"] == f"{MODEL} pirate"
    assert http.request("DELETE", DELETE, json={"state_id": "pirate"}).json() == {
        "state_id": "pirate",
        "deleted": True,
    }
    missing = http.post(DELETE, params={"state_id": "pirate"})
    assert (missing.status_code, missing.json()) == (404, {"state_id": "pirate", "deleted": False})
    assert http.get(LIST).json()["data"] == []


def test_the_form_may_name_the_state_and_its_layout(http, server):
    assert upload(http, "C:\\files\\a.pth", state_id="räuber 1", state_layout="kv").status_code == 200
    assert server.engine.start_states["räuber 1"][0] == "kv"


@pytest.mark.parametrize(
    ("files", "form", "status", "named"),
    [
        ({"file": ("a.pth", b"bad")}, {}, 400, "a.pth holds no state"),
        ({"file": ("a.pth", bytes(MAX_STATE + 1))}, {}, 413, str(MAX_STATE)),
        ({"a": ("a.pth", b"1"), "b": ("b.pth", b"2")}, {}, 400, "one file"),
        ({"file": ("a.pth", b"x")}, {"state_layout": "kk"}, 400, "state_layout"),
        ({"file": ("a.pth", b"x")}, {"default_temperature": "warm"}, 400, "default_temperature"),
        ({"file": ("a.pth", b"x")}, {"state_id": "a\x01b"}, 400, "state_id"),
        ({"file": ("there.pth", b"x")}, {}, 409, "there already"),
    ],
)
def test_what_cannot_be_uploaded(http, server, files, form, status, named):
    upload(http, "there.pth")
    reply = http.post(UPLOAD, files=files, data=form)
    assert (reply.status_code, named in reply.json()["error"]) == (status, True), reply.text
    assert list(server.engine.start_states) == ["there"]


def test_a_body_that_is_no_form(http):
    assert http.post(UPLOAD, json={"file": "x"}).status_code == 400
    assert http.post(UPLOAD).status_code == 400


def generated(server, path, body, **options):
    reply = server.http.post(path, json=body, **options)
    assert reply.status_code == 200, reply.text
    return server.engine.requests[-1]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"contents": ["a"]}),
        ("/v1/chat/completions", CHAT),
        ("/v2/chat/completions", {"contents": ["a"]}),
        ("/v3/chat/completions", {"contents": ["a"]}),
        ("/big_batch/completions", {"contents": ["a"], "stream": False}),
        ("/FIM/v1/batch-FIM", {"prefix": ["a"], "suffix": ["b"]}),
        ("/translate/v1/batch-translate", {"source_lang": "en", "target_lang": "de", "text_list": ["a"]}),
        (STATE, {"contents": ["a"], "session_id": "s"}),
        (TREE, {"contents": ["a"], "session_id": "s", "dialogue_idx": 0}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/responses", {"input": "a"}),
    ],
)
def test_every_route_that_generates_can_begin_in_one(http, server, path, body):
    upload(http)
    assert generated(server, path, body).start_state == ""
    assert generated(server, path, body | {"model": MODEL}).start_state == ""
    by_header = generated(server, path, body, headers={"X-RWKV-State-Id": "pirate"})
    by_model = generated(server, path, body | {"model": f"{MODEL} pirate"})
    assert by_header.start_state == by_model.start_state == "pirate"
    if path != "/v1/responses":
        assert generated(server, path, body | {"state_id": "pirate"}).start_state == "pirate"


@pytest.mark.parametrize("place", [{"raw": True}, {"suffix": "b"}])
def test_a_prompt_of_ollamas_that_is_no_chat_begins_in_one(http, server, place):
    upload(http)
    body = {"prompt": "a", "model": f"{MODEL} pirate", "stream": False} | place
    assert generated(server, "/api/generate", body).start_state == "pirate"


def test_a_chat_in_a_state_has_no_thought_unless_it_is_asked_for(http, server):
    upload(http)
    for path in ("/openai/v1/chat/completions", "/v3/chat/completions"):
        plain = generated(server, path, CHAT | {"state_id": "pirate"})
        assert plain.prompts[0].rstrip() == "User: hello\n\nAssistant:"
        for fields in ({"think_type": "free"}, {"enable_think": True}):
            thinking = generated(server, path, CHAT | {"state_id": "pirate"} | fields)
            assert thinking.prompts[0].endswith("Assistant: <think")
    messages = CHAT | {"max_tokens": 5, "thinking": {"type": "enabled"}, "state_id": "pirate"}
    assert generated(server, "/v1/messages", messages).prompts[0].endswith("Assistant: <think")


def test_by_its_id_a_state_takes_the_place_of_the_sessions(http, server):
    upload(http)
    body = {"contents": ["a"], "session_id": "s"}
    assert generated(server, STATE, body | {"model": f"{MODEL} pirate"}).turn.source == "s"
    turn = generated(server, STATE, body | {"state_id": "pirate"}).turn
    assert (turn.source, turn.target) == (None, "s")


@pytest.mark.parametrize("path", ["/v2/chat/completions", "/openai/v1/chat/completions"])
def test_what_cannot_be_meant(http, path):
    upload(http)
    body = CHAT | {"contents": ["a"]} if path.startswith("/v2") else CHAT

    def refused(fields, **headers):
        reply = http.post(path, json=body | fields, headers=headers)
        error = reply.json()["error"]
        return reply.status_code, error if isinstance(error, str) else error["message"]

    assert refused({"state_id": "nobody"}) == (
        404,
        "There is no start state nobody; /v1/state/list lists them.",
    )
    assert refused({"model": f"{MODEL} nobody"})[0] == 404
    assert refused({"state_id": 5})[0] == 400
    assert refused({"state_id": "pirate"}, **{"X-RWKV-State-Id": "other"})[0] == 400
    assert refused({"state_id": "pirate", "model": f"{MODEL} other"})[0] == 400


def load(http, name="own.pth", **fields):
    return http.post(LOAD, json={"state_filename": name, "state_viewname": "own"} | fields)


def test_a_file_of_the_models_folder_is_loaded_with_its_sampling(http, server, folder):
    (folder / "sub").mkdir(exist_ok=True)
    (folder / "sub" / "own.pth").write_bytes(b"first")
    reply = load(http, "sub/own.pth", default_temperature="0.5", default_top_p="0.25", state_layout="kv")
    assert reply.json() == {"status": "success"}, reply.text
    assert server.engine.start_states["own"][:2] == ("kv", b"first")
    request = generated(server, "/openai/v1/chat/completions", CHAT | {"model": f"{MODEL} own"})
    assert (request.sampling.temperature, request.sampling.top_p) == (0.5, 0.25)
    own = generated(server, "/openai/v1/chat/completions", CHAT | {"state_id": "own", "temperature": 0.75})
    assert (own.sampling.temperature, own.sampling.top_p) == (0.75, 0.25)
    (folder / "sub" / "own.pth").write_bytes(b"second")
    assert load(http, "sub/own.pth").status_code == 200, "it takes the place of the older one"
    assert server.engine.start_states["own"][1] == b"second"


def test_an_uploaded_state_has_its_sampling_too(http, server):
    template = json.dumps({"rwkv_generation_prompt": "fake_think"})
    reply = upload(http, "own.pth", default_temperature="0.5", default_chat_template_kwargs=template)
    assert reply.status_code == 200 and reply.json()["default_temperature"] == 0.5, reply.text
    request = generated(server, "/openai/v1/chat/completions", CHAT | {"state_id": "own"})
    assert request.sampling.temperature == 0.5
    assert request.prompts[0].endswith("<think>\n</think>\n")


def test_a_template_of_an_upload_that_is_nested_too_deeply_is_refused(http):
    reply = upload(http, "own.pth", default_chat_template_kwargs='{"a":' * 9999)
    assert reply.status_code == 400 and "default_chat_template_kwargs" in reply.text


def test_chats_are_rendered_as_their_state_says_unless_they_say_otherwise(http, server, folder):
    (folder / "own.pth").write_bytes(b"x")

    def prompt(**fields):
        return generated(server, "/openai/v1/chat/completions", CHAT | {"state_id": "own"} | fields).prompts[
            0
        ]

    load(http)
    plain = prompt()
    load(http, default_chat_template_kwargs={"rwkv_prompt_template": "bot"})
    assert (
        prompt() == prompt(think_type="none", chat_template_kwargs={"rwkv_prompt_template": "bot"}) != plain
    )
    assert prompt(think_type="none") == plain
    load(http, default_think_type="free")
    assert prompt() == prompt(think_type="free") != plain
    load(http, default_chat_template_kwargs={"rwkv_generation_prompt": "open_think"})
    assert prompt() == prompt(think_type="free")
    assert prompt(enable_think=False) == prompt(think_type="fast")


@pytest.mark.parametrize("path", ["/v1/completions", "/infill"])
def test_what_a_state_says_of_chats_is_nothing_to_a_text_that_is_none(http, server, folder, path):
    (folder / "own.pth").write_bytes(b"x")
    load(http, default_think_type="free")
    body = {"prompt": "a", "input_prefix": "a", "input_suffix": "b", "state_id": "own"}
    assert "think" not in generated(server, path, body).prompts[0]


@pytest.mark.parametrize(("raw", "thinks"), [(False, True), ("false", True), (None, True), ("true", False)])
def test_a_prompt_of_ollamas_is_a_chat_to_its_state_as_it_is_to_the_route(http, server, folder, raw, thinks):
    (folder / "own.pth").write_bytes(b"x")
    load(http, default_think_type="free")
    body = {"prompt": "a", "model": f"{MODEL} own", "stream": False, "raw": raw}
    assert generated(server, "/api/generate", body).prompts[0].endswith("<think") == thinks


@pytest.mark.parametrize("name", ["../secret.pth", "/etc/passwd", "sub/../../secret.pth"])
def test_no_file_outside_of_the_models_folder_is_loaded(http, server, folder, name):
    (folder.parent / "secret.pth").write_bytes(b"secret")
    reply = load(http, name)
    assert (reply.status_code, "not inside" in reply.json()["error"]) == (400, True)
    assert server.engine.start_states == {}


def test_a_link_out_of_the_models_folder_is_not_followed(http, folder):
    (folder.parent / "secret.pth").write_bytes(b"secret")
    link = Path(folder / "link.pth")
    link.unlink(missing_ok=True)
    link.symlink_to(folder.parent / "secret.pth")
    assert load(http, "link.pth").status_code == 400


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"state_filename": "nowhere.pth"}, 404),
        ({"state_filename": ""}, 400),
        ({"state_viewname": ""}, 400),
        ({"default_temperature": "warm"}, 400),
        ({"default_top_p": 2}, 400),
        ({"default_think_type": "deep"}, 400),
        ({"default_chat_template_kwargs": {"template": "bot"}}, 400),
        ({"state_layout": "x"}, 400),
    ],
)
def test_what_cannot_be_loaded(http, folder, fields, status):
    (folder / "own.pth").write_bytes(b"x")
    assert load(http, **fields).status_code == status


def test_states_are_removed_one_by_one_or_all(http, server):
    for name in ("a.pth", "b.pth", "c.pth"):
        upload(http, name)
    assert http.post(REMOVE, json={"state_viewname": "b"}).json() == {"status": "success"}
    assert list(server.engine.start_states) == ["a", "c"]
    assert http.post(REMOVE, json={"state_viewname": "b"}).status_code == 404
    assert http.post(REMOVE, json={"state_id": "a"}).status_code == 400, "which does not mean all"
    assert list(server.engine.start_states) == ["a", "c"]
    assert http.post(REMOVE, json={"state_viewname": "c", "model": MODEL}).status_code == 200
    upload(http, "c.pth")
    assert http.post(REMOVE, json={}).json() == {"status": "success"}
    assert server.engine.start_states == {}
    upload(http, "d.pth")
    for misnamed in ({"dumy": "dummy"}, {"dummy": "dummy", "state_view_name": "d"}, {"name": "d"}):
        assert http.post(REMOVE, json=misnamed).status_code == 400
    assert list(server.engine.start_states) == ["d"]
    sample = {"dummy": "dummy"}  # of RWKV-Infer's README
    assert http.post(REMOVE, json=sample | {"state_viewname": "e"}).status_code == 404, "it names one"
    assert http.post(REMOVE, json=sample).json() == {"status": "success"}
    assert server.engine.start_states == {}


def test_files_are_loaded_only_for_those_who_may(folder):
    (folder / "own.pth").write_bytes(b"x")
    body = {"state_filename": "own.pth", "state_viewname": "own"}
    with FrontendProcess(models=str(folder), password="word", admin_password="admin") as process:
        for word, status in (("word", 401), ("", 401), ("admin", 200)):
            assert process.http.post(LOAD, json=body | {"password": word}).status_code == status
    with FrontendProcess() as process:
        assert process.http.post(LOAD, json=body).status_code == 403
        assert "--models" in process.http.post(LOAD, json=body).json()["error"]
    with FrontendProcess(models=str(folder)) as process:
        far = process.http.post(LOAD, json=body, headers={"X-Forwarded-For": "203.0.113.7"})
        assert (far.status_code, "--admin-password" in far.json()["error"]) == (403, True)
        assert json.loads(process.http.post(LOAD, json=body).text) == {"status": "success"}


def test_the_password_guards_them():
    with FrontendProcess(password="word") as process:
        http = process.http
        paths = [(UPLOAD, "POST"), (LIST, "GET"), (DELETE, "POST"), (LOAD, "POST"), (REMOVE, "POST")]
        for path, method in (*paths, ("/models", "GET"), ("/v1/models", "GET")):
            assert http.request(method, path).status_code == 401, path
        bearer = {"Authorization": "Bearer word"}
        assert http.post(UPLOAD, files={"file": ("a.pth", b"x")}, headers=bearer).status_code == 200
        assert upload(http, "b.pth", password="word").status_code == 200
