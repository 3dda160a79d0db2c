"""Adapters over HTTP: vLLM's routes, those of rwkv_lightning_cuda, and which adapter a request runs with."""

import pytest
from fake_engine import INFO
from frontend_process import FrontendProcess
from session_calls import STATE, TREE

LOAD, UNLOAD, ADAPTERS = "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/adapters"
MODEL, DIGEST = INFO.model, "5eed" * 8
CHAT = {"messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    (folder / "capitals.pth").write_bytes(b"numbers")
    (folder / "bad.pth").write_bytes(b"bad")
    (folder / "miss").mkdir()
    (folder / "miss" / "adapter.pth").write_bytes(b"numbers")
    (folder / "linked").mkdir()
    (folder / "linked" / "adapter.pth").symlink_to("/etc/passwd")
    return folder


@pytest.fixture(scope="module")
def server(folder):
    with FrontendProcess(models=str(folder)) as process:
        yield process


@pytest.fixture
def http(server):
    """Of the server, without adapters and start states."""
    server.engine.adapters.clear()
    server.engine.start_states.clear()
    return server.http


def load(http, name="capitals", path="capitals.pth", **fields):
    return http.post(LOAD, json={"lora_name": name, "lora_path": path} | fields)


def test_a_file_on_a_slow_disk_is_waited_for(folder):
    """Else the client would hear of a failure, and the adapter be there a moment later."""
    with FrontendProcess(models=str(folder), patches={"routes.http.frontend.ANSWERED_WITHIN": 0.4}) as slow:
        assert load(slow.http, "late").status_code == 200
        form = {"state_id": "late"}
        state = slow.http.post("/v1/state/upload", files={"file": ("a.pth", b"state")}, data=form)
        assert state.status_code == 200 and state.json()["state_id"] == "late"


def test_what_vllms_clients_do(http, server, folder):
    reply = load(http, adapter_alpha="32")
    assert (reply.status_code, reply.text) == (200, "Success: LoRA adapter 'capitals' added successfully.")
    command = server.engine.commands[-1]
    assert (command.path, command.alpha, command.scaling) == (str(folder / "capitals.pth"), 32.0, None)
    listed = http.get("/v1/models").json()["data"]
    assert [(each["id"], each.get("parent")) for each in listed] == [
        (MODEL, None),
        (f"{MODEL}:capitals", MODEL),
    ]
    for name in (f"{MODEL}:capitals", "capitals"):
        assert http.get(f"/v1/models/{name}").json() == listed[1]
    again = load(http)
    assert (again.status_code, "capitals is loaded already" in again.json()["error"]["message"]) == (
        400,
        True,
    )
    reply = http.post(UNLOAD, json={"lora_name": "capitals"})
    assert (reply.status_code, reply.text) == (200, "Success: LoRA adapter 'capitals' removed successfully.")
    gone = http.post(UNLOAD, json={"lora_name": "capitals"})
    assert (gone.status_code, gone.json()["error"]["type"]) == (404, "not_found_error")


def test_what_rwkv_lightnings_clients_do(http, server, folder):
    reply = http.post(ADAPTERS, json={"adapter_id": "miss", "path": "miss"})
    assert (reply.status_code, reply.json()["version"]) == (200, DIGEST)
    assert server.engine.commands[-1].path == str(folder / "miss"), "a folder with adapter.json"
    (listed,) = http.get(ADAPTERS).json()["data"]
    assert (listed["adapter_id"], listed["version"], listed["rank"]) == ("miss", DIGEST, 4)
    assert http.post(ADAPTERS, json={"adapter_id": "miss", "path": "miss"}).status_code == 409
    other = http.request("DELETE", ADAPTERS, json={"adapter_id": "miss", "adapter_version": "0"})
    assert other.status_code == 409 and list(server.engine.adapters) == ["miss"]
    gone = http.request("DELETE", ADAPTERS, json={"adapter_id": "miss", "adapter_version": DIGEST})
    assert gone.json() == {"adapter_id": "miss", "deleted": True}
    again = http.request("DELETE", ADAPTERS, json={"adapter_id": "miss"})
    assert (again.status_code, again.json()["deleted"]) == (404, False)


def generated(server, path, body):
    reply = server.http.post(path, json=body)
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
def test_every_route_that_generates_can_run_with_one(http, server, path, body):
    load(http)
    assert generated(server, path, body).adapter == ""
    request = generated(server, path, body | {"model": f"{MODEL}:capitals"})
    assert (request.adapter, request.adapter_digest) == ("capitals", DIGEST)
    http.post("/v1/state/upload", files={"file": ("pirate.pth", b"state")})
    both = generated(server, path, body | {"model": f"{MODEL}:capitals pirate"})
    assert (both.adapter, both.start_state) == ("capitals", "pirate")
    if path != "/v1/responses":
        for field in ("adapter", "adapter_id"):
            assert generated(server, path, body | {field: "capitals"}).adapter == "capitals"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_its_name_alone_is_a_model_of_openais_routes(http, server, path):
    """vLLM has it so, after the same call has loaded the adapter."""
    load(http)
    body = {"/v1/completions": {"prompt": "a"}, "/v1/responses": {"input": "a"}}.get(path, CHAT)
    assert generated(server, path, body | {"model": "capitals"}).adapter == "capitals"
    assert http.post(path, json=body | {"model": "capital"}).status_code == 404


def test_a_reply_says_which_weights_made_it(http, server):
    load(http)
    reply = http.post("/openai/v1/chat/completions", json=CHAT | {"model": f"{MODEL}:capitals"})
    assert reply.headers["x-model-fingerprint"] == f"{INFO.fingerprint}+{DIGEST}"
    assert reply.json()["system_fingerprint"].endswith(f"{INFO.fingerprint}+{DIGEST}")
    plain = http.post("/openai/v1/chat/completions", json=CHAT | {"model": MODEL})
    assert plain.headers["x-model-fingerprint"] == INFO.fingerprint


@pytest.mark.parametrize(
    ("fields", "status", "named"),
    [
        ({"adapter": "nobody"}, 404, "loaded are capitals."),
        ({"model": f"{MODEL}:nobody"}, 404, "loaded are capitals."),
        ({"adapter": 5}, 400, "`adapter`"),
        ({"adapter": {}}, 400, "`adapter`"),
        ({"adapter": "capitals", "model": f"{MODEL}:other"}, 400, "capitals and other"),
        (
            {"adapter_id": "capitals", "adapter_scale": 101},
            400,
            "`adapter_scale`: must be a number from -100",
        ),
        ({"adapter_id": "capitals", "adapter_scale": "half"}, 400, "`adapter_scale`"),
        ({"adapter_id": "capitals", "adapter_scale": True}, 400, "`adapter_scale`"),
        ({"adapter_scale": 0.5}, 400, "`adapter_scale`: the request names no adapter"),
        ({"adapter_id": "capitals", "adapter_version": "0"}, 409, DIGEST),
    ],
)
@pytest.mark.parametrize("path", ["/v2/chat/completions", "/openai/v1/chat/completions"])
def test_what_cannot_be_meant(http, path, fields, status, named):
    load(http)
    body = CHAT | {"contents": ["a"]} if path.startswith("/v2") else CHAT
    reply = http.post(path, json=body | fields)
    error = reply.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    assert (reply.status_code, named in message) == (status, True), message


def test_the_version_that_is_loaded_may_be_named(http, server):
    load(http)
    body = CHAT | {"adapter_id": "capitals", "adapter_version": DIGEST, "adapter_scale": 1.0}
    assert generated(server, "/openai/v1/chat/completions", body).adapter == "capitals"


@pytest.mark.parametrize(("given", "scale"), [(0.5, 0.5), (0, 0.0), (-2, -2.0), (None, 1.0)])
@pytest.mark.parametrize("path", ["/v2/chat/completions", "/openai/v1/chat/completions"])
def test_a_request_may_scale_its_adapter(http, server, path, given, scale):
    load(http)
    body = (CHAT | {"contents": ["a"]} if path.startswith("/v2") else CHAT) | {"adapter_id": "capitals"}
    request = generated(server, path, body | {"adapter_scale": given})
    assert (request.adapter, request.adapter_scale) == ("capitals", scale)


@pytest.mark.parametrize(
    ("fields", "status", "named"),
    [
        ({"lora_path": "../secret.pth"}, 400, "not inside"),
        ({"lora_path": "/etc/passwd"}, 400, "not inside"),
        ({"lora_path": "linked"}, 400, "not inside"),
        ({"lora_path": "none.pth"}, 404, "no file none.pth"),
        ({"lora_path": "bad.pth"}, 400, "is no adapter"),
        ({"lora_name": "a b"}, 400, "lora_name"),
        ({"lora_name": "a:b"}, 400, "lora_name"),
        ({"lora_name": ""}, 400, "lora_name"),
        ({"adapter_alpha": "much"}, 400, "adapter_alpha"),
        ({"adapter_scaling": True}, 400, "adapter_scaling"),
        ({"load_inplace": True}, 400, "load_inplace"),
    ],
)
def test_what_cannot_be_loaded(http, server, fields, status, named):
    reply = http.post(LOAD, json={"lora_name": "a", "lora_path": "capitals.pth"} | fields)
    assert (reply.status_code, named in reply.json()["error"]["message"]) == (status, True), reply.text
    assert server.engine.adapters == {}


def test_only_an_admin_loads_and_unloads(folder):
    with FrontendProcess(models=str(folder), password="open", admin_password="key") as server:
        body, calls = {"lora_name": "a", "lora_path": "capitals.pth", "adapter_id": "a", "path": "miss"}, []
        for password in ("open", "key"):
            for method, path in (("POST", LOAD), ("POST", UNLOAD), ("POST", ADAPTERS), ("DELETE", ADAPTERS)):
                reply = server.http.request(method, path, json=body | {"password": password})
                calls.append(reply.status_code)
        assert calls == [401] * 4 + [200] * 4
        assert server.http.get(ADAPTERS).status_code == 401
        assert server.http.get(ADAPTERS, params={"password": "open"}).status_code == 200
