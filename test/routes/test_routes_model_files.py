"""/loadmodel and /removemodel over HTTP: their fields, what may be loaded, and by whom."""

import httpx
import msgspec
import pytest
from fake_engine import INFO
from frontend_process import FrontendProcess
from native_calls import CHAT, COMPLETIONS, V1

from routes.http.admin import is_loopback
from rwkv_batch.wire.commands import LoadModel
from rwkv_batch.wire.supervision import Loading, ModelDefaults, Serving

LOAD, REMOVE = "/loadmodel", "/removemodel"
FILES = ("a.pth", "b.pth", "bad.pth", "slow.pth", "adapter.pth")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("root")
    models = root / "models"
    for name in FILES:
        (models / name).parent.mkdir(exist_ok=True)
        (models / name).write_bytes(name.encode())
    (models / "hf").mkdir()
    (models / "hf" / "model.safetensors").write_bytes(b"weights")
    (root / "secret.pth").write_bytes(b"weights")
    (models / "link.pth").symlink_to(root / "secret.pth")
    (models / "sly").mkdir()
    (models / "sly" / "model.safetensors").symlink_to(root / "secret.pth")
    (models / "within.pth").symlink_to(models / "a.pth")
    return models


@pytest.fixture(scope="module")
def server(folder):
    with FrontendProcess(models=str(folder)) as process:
        yield process


@pytest.fixture
def http(server) -> httpx.Client:
    """Of the server with its first model only."""
    server.engine.infos = [INFO]
    server.control.send(Serving([INFO]))
    server.until(lambda _: [m["id"] for m in server.http.get("/models").json()] == [INFO.model])
    server.engine.commands.clear()
    return server.http


def sent(server) -> list[LoadModel]:
    return [command for command in server.engine.commands if isinstance(command, LoadModel)]


def test_a_model_is_loaded_with_all_its_fields(http, server, folder):
    fields = {
        "model_filename": "a.pth",
        "model_viewname": "My model 1.5B",
        "model_strategy": "fp6",
        "adapter_filename": "adapter.pth",
        "adapter_mode": "lora",
        "adapter_scaling": "2.0",
        "default_temperature": "0.4",
        "default_top_p": "0.25",
        "template": "world",
        "endtoken": "\\n\\n",
    }
    reply = http.post(LOAD, json=fields)
    assert (reply.status_code, reply.json()) == (200, {"status": "success"})
    (command,) = sent(server)
    defaults = ModelDefaults(0.4, 0.25, "\n\n", "world")
    wanted = LoadModel(
        command.id,
        path=str(folder / "a.pth"),
        name="My model 1.5B",
        adapter=str(folder / "adapter.pth"),
        adapter_scaling=2.0,
        defaults=defaults,
        weights="fp6",
    )
    assert command == wanted
    chat = {"messages": [{"role": "user", "content": "hello"}], "model": "My model 1.5B"}
    assert http.post(CHAT, json=chat).status_code == 200
    request = server.engine.requests[-1]
    assert (request.sampling.temperature, request.sampling.top_p) == (0.4, 0.25)
    assert "\n\n" in request.late_stops.strings if request.late_stops else request.stop_strings
    assert request.prompts[0].endswith("Assistant:"), "world models are given no thought"
    http.post(COMPLETIONS, json={"prompt": "x", "model": "My model 1.5B", "temperature": 1, "stop": "!"})
    request = server.engine.requests[-1]
    assert (request.sampling.temperature, request.stop_strings) == (1.0, ["!"])


def test_fields_that_mean_nothing_for_these_models_are_taken(http, server):
    fields = {
        "model_filename": "a.pth",
        "rope_theta": "1000000.0",
        "rms_norm_eps": 1e-6,
        "adapter_scaling": "2.0",
    }
    assert http.post(LOAD, json=fields).json() == {"status": "success"}
    assert sent(server)[-1].adapter_scaling is None, "there is no adapter"


@pytest.mark.parametrize("mode", ["", "hybrid", "lora", "Bone-Hybrid", "disha", "pissa", "auto"])
def test_each_mode_of_clients_is_taken(http, server, folder, mode):
    fields = {"model_filename": "a.pth", "adapter_filename": "adapter.pth", "adapter_mode": mode}
    assert http.post(LOAD, json=fields).json() == {"status": "success"}
    assert sent(server)[-1].adapter == str(folder / "adapter.pth")


def test_pissa_and_mole_have_fields(http, server, folder):
    fields = {
        "model_filename": "a.pth",
        "adapter_filename": "adapter.pth",
        "adapter_init_filename": "b.pth",
        "adapter_alpha": "16",
        "mole_router": "shared",
    }
    assert http.post(LOAD, json=fields).status_code == 200
    command = sent(server)[-1]
    assert command.adapter_init == str(folder / "b.pth")
    assert (command.adapter_alpha, command.mole_router) == (16.0, "shared")


@pytest.mark.parametrize("name", ["hf", "within.pth", "./b.pth"])
def test_the_file_is_the_name_unless_one_is_given(http, server, name):
    assert http.post(LOAD, json={"model_filename": name}).json() == {"status": "success"}
    assert sent(server)[-1].name == "" and sent(server)[-1].defaults == ModelDefaults()


def test_what_clients_may_have_noticed_is_said(http):
    reply = http.post(LOAD, json={"model_filename": "slow.pth"}).json()
    assert reply == {"status": "success", "message": "It took long."}


def test_a_loaded_model_is_there_for_the_next_request_and_a_removed_one_is_not(http, server):
    http.post(LOAD, json={"model_filename": "b.pth"})
    assert [m["id"] for m in http.get("/v1/models").json()["data"]] == [INFO.model, "b"]
    assert http.post(V1, json={"contents": ["x"], "model": "b"}).status_code == 200
    assert server.engine.requests[-1].to_model == "b"
    assert http.post(REMOVE, json={"model_viewname": "b"}).json() == {"status": "success"}
    assert [m["id"] for m in http.get("/v1/models").json()["data"]] == [INFO.model]
    assert http.post(CHAT, json={"messages": [], "model": "b"}).status_code == 404


@pytest.mark.parametrize("strategy", ["fp16", "bf16", "int8", "fp8", "int4", "nf4"])
def test_a_strategy_that_means_something_else_elsewhere_says_so(http, server, folder, strategy):
    reply = http.post(LOAD, json={"model_filename": "a.pth", "model_strategy": strategy})
    assert reply.status_code == 200 and reply.json()["message"].startswith(f"{strategy}: ")
    assert "RWKV-Infer" in reply.json()["message"]
    assert sent(server)[-1].weights == strategy


def test_a_model_that_another_front_end_has_loaded_is_found(http, server):
    server.engine.infos = [INFO, msgspec.structs.replace(INFO, model="theirs")]
    assert http.post(V1, json={"contents": ["x"], "model": "theirs"}).status_code == 200
    assert server.engine.requests[-1].to_model == "theirs"


def test_progress_is_visible(http, server):
    server.control.send(Serving([INFO], [Loading("b", "reading", 0.25)]))
    health = server.until(lambda health: "loading" in health.json())
    assert health.json()["loading"] == [{"model": "b", "stage": "reading", "progress": 0.25}]
    server.control.send(Serving([INFO]))
    server.until(lambda health: "loading" not in health.json())


@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({}, 400, "model_filename"),
        ({"model_filename": 7}, 400, "model_filename"),
        ({"model_filename": ""}, 400, "model_filename"),
        ({"model_filename": "nothing.pth"}, 404, "nothing.pth"),
        ({"model_filename": "../secret.pth"}, 400, "not inside"),
        ({"model_filename": "/etc/passwd"}, 400, "not inside"),
        ({"model_filename": "link.pth"}, 400, "not inside"),
        ({"model_filename": "sly"}, 400, "not inside"),
        ({"model_filename": "."}, 404, "no file"),
        ({"model_filename": "a\0b"}, 400, "not inside"),
        ({"model_filename": "a" * 5000}, 400, "aaa"),
        ({"model_filename": "bad.pth"}, 400, "cannot be served"),
        ({"model_filename": "a.pth", "model_viewname": "../x"}, 400, "model_viewname"),
        ({"model_filename": "a.pth", "model_viewname": "é" * 65}, 400, "at most 128 bytes"),
        ({"model_filename": "a.pth", "model_strategy": "int3"}, 400, "int4"),
        ({"model_filename": "a.pth", "adapter_filename": "../secret.pth"}, 400, "not inside"),
        ({"model_filename": "a.pth", "adapter_scaling": "much"}, 400, "adapter_scaling"),
        ({"model_filename": "a.pth", "default_top_p": "2"}, 400, "default_top_p"),
        ({"model_filename": "a.pth", "template": "chatml"}, 400, "template"),
        ({"model_filename": "a.pth", "rope_theta": "big"}, 400, "rope_theta"),
        ({"model_filename": "a.pth", "adapter_mode": "ia3"}, 400, "adapter_mode"),
        ({"model_filename": "a.pth", "mole_router": "top2"}, 400, "mole_router"),
        ({"model_filename": "a.pth", "adapter_init_filename": "../secret.pth"}, 400, "not inside"),
        ({"model_filename": "a.pth", "adapter_file": "adapter.pth"}, 400, "adapter_file"),
    ],
)
def test_bad_fields_are_one_sentence_and_change_nothing(http, server, fields, status, words):
    reply = http.post(LOAD, json=fields)
    message = reply.json()["error"]
    assert reply.status_code == status and words in message and message.endswith("."), reply.text
    assert server.engine.infos == [INFO]
    assert http.post(V1, json={"contents": ["x"]}).status_code == 200


def test_without_a_folder_nothing_is_loaded():
    with FrontendProcess() as process:
        reply = process.http.post(LOAD, json={"model_filename": "a.pth"})
        assert reply.status_code == 403 and "--models" in reply.json()["error"]


@pytest.mark.parametrize(("path", "fields"), [(LOAD, {"model_filename": "a.pth"}), (REMOVE, {})])
def test_both_are_for_the_one_who_runs_the_server(folder, server, path, fields):
    proxied = server.http.post(path, json=fields, headers={"x-forwarded-for": "10.0.0.1"})
    assert proxied.status_code == 403 and "--admin-password" in proxied.json()["error"]
    for origin in ("http://evil.example", "null", "http://[", "http://127.0.0.1.evil.example:8000"):
        page = server.http.post(path, json=fields, headers={"origin": origin})
        assert page.status_code == 403, "a browser on this machine shows a page of anybody's"
    with FrontendProcess(models=str(folder), password="all", admin_password="root") as process:
        refused = process.http.post(path, json=fields | {"password": "all"})
        assert refused.status_code == 401 and "--admin-password" in refused.json()["error"]
        assert process.http.post(path, json=fields | {"password": "root"}).status_code == 200


@pytest.mark.parametrize("origin", ["http://localhost:3000", "http://127.0.0.1:8000", "http://[::1]:8000"])
def test_pages_of_this_machine_may_load_files(folder, http, origin):
    (folder / "a.pth").write_bytes(b"x")
    reply = http.post(LOAD, json={"model_filename": "a.pth"}, headers={"origin": origin})
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize("host", ["::", "0.0.0.0"])
def test_a_client_of_ipv4_at_a_socket_for_all_networks_is_this_machine(folder, host):
    (folder / "a.pth").write_bytes(b"x")
    fields = {"model_filename": "a.pth"}
    with FrontendProcess(models=str(folder), host=host) as process:
        page = process.http.post(LOAD, json=fields, headers={"origin": "http://[::ffff:10.0.0.1]"})
        assert page.status_code == 403
        reply = process.http.post(LOAD, json=fields)
        assert reply.status_code == 200, reply.text


@pytest.mark.parametrize(
    ("address", "here"),
    [
        ("127.8.9.1", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("::ffff:10.0.0.1", False),
        ("::ffff:0:127.0.0.1", False),
        ("10.0.0.1", False),
        ("", False),
    ],
)
def test_this_machine_is_an_address_of_loopback_also_when_it_is_mapped(address: str, here: bool):
    assert is_loopback(address) is here
