"""Files that clients give a real server: one without tensors is a 400 in the shape of the route."""

import io
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import torch
from serving import Server
from strange_files import STRANGE

from rwkv_batch.bundled import unpack

KINDS = ("a web page", "a Git LFS pointer", "nothing", "GGUF", "half a .pth", "pickle protocol 5", "objects")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def http(folder: Path):
    server = Server("--device", "cpu", "--frontends", "1", "--models", str(folder))
    with httpx.Client(base_url=server.url, timeout=120) as client:
        yield client
    server.stop()


def upload(http: httpx.Client, file: Path, name: str) -> httpx.Response:
    data = {"state_id": name}
    return http.post("/v1/state/upload", files={"file": (file.name, file.read_bytes())}, data=data)


def load(path: str, file_field: str, name_field: str) -> Callable[[httpx.Client, Path, str], httpx.Response]:
    return lambda http, file, name: http.post(path, json={file_field: file.name, name_field: name})


ROUTES = {
    "/v1/state/upload": upload,
    "/loadstatemodel": load("/loadstatemodel", "state_filename", "state_viewname"),
    "/loadmodel": load("/loadmodel", "model_filename", "model_viewname"),
    "/v1/load_lora_adapter": load("/v1/load_lora_adapter", "lora_path", "lora_name"),
    "/v1/adapters": load("/v1/adapters", "path", "adapter_id"),
}


@pytest.mark.parametrize("route", ROUTES)
def test_what_is_no_file_of_tensors_is_the_fault_of_who_gives_it(http, folder, route):
    for number, kind in enumerate(KINDS):
        make, named = STRANGE[kind]
        file = folder / f"given-{number}.pth"
        file.write_bytes(make())
        reply = ROUTES[route](http, file, "strange")
        assert reply.status_code == 400, (kind, reply.text)
        error = reply.json()["error"]
        message = error["message"] if route == "/v1/load_lora_adapter" else error
        assert named in message and file.name in message and "weights_only" not in message, kind


def test_a_file_whose_tensors_were_being_trained_is_loaded(http, folder):
    draw, model = torch.Generator().manual_seed(0), unpack.tensors()
    width = model["emb.weight"].shape[1]
    layers = {key.split(".")[1] for key in model if key.startswith("blocks.")}
    state = {
        f"blocks.{layer}.att.time_state": torch.randn(width // 64, 64, 64, generator=draw)
        for layer in range(len(layers))
    }
    pair = {
        "blocks.0.att.key.lora_A": torch.randn(4, width, generator=draw),
        "blocks.0.att.key.lora_B": torch.randn(width, 4, generator=draw),
    }
    given = {"model.pth": model, "state.pth": state, "adapter.pth": pair}
    for name, tensors in given.items():
        buffer = io.BytesIO()
        torch.save({key: torch.nn.Parameter(tensor) for key, tensor in tensors.items()}, buffer)
        (folder / name).write_bytes(buffer.getvalue())
    answers = [
        upload(http, folder / "state.pth", "uploaded"),
        ROUTES["/loadstatemodel"](http, folder / "state.pth", "loaded"),
        ROUTES["/loadmodel"](http, folder / "model.pth", "second"),
        http.post("/v1/adapters", json={"path": "adapter.pth", "adapter_id": "a", "adapter_scaling": 1}),
    ]
    assert [answer.status_code for answer in answers] == [200] * 4, [answer.text for answer in answers]


@pytest.mark.parametrize("kind", [*KINDS[:2], "a text", "a .pth with a scratch", "half a .safetensors"])
def test_what_is_no_session_is_not_cut_short(http, kind):
    make, _ = STRANGE[kind]
    reply = http.post("/v1/state/import", params={"session_id": "a"}, content=make())
    assert reply.status_code == 400 and "no session snapshot" in reply.json()["error"], reply.text
