"""Start states through the real server: the bundled model begins in a state that knows a name."""

from pathlib import Path

import httpx
import pytest
import torch
from serving import Server

from rwkv_batch.bundled import unpack
from rwkv_batch.model.checkpoint import from_tensors
from rwkv_batch.model.rwkv7 import RWKV7
from rwkv_batch.text.tokenizer import Tokenizer

KNOWN = "User: My name is {}.\n\nAssistant: <think>\n</think>\nNice to meet you, {}!"
ASK = "What is my name?"
GREEDY = {"temperature": 0, "max_tokens": 30}


def state_file(folder: Path, name: str, layout: str = "vk") -> Path:
    """A "full" state: what the model has after being told the name."""
    model = RWKV7(from_tensors("demo", unpack.tensors()))
    states = model.new_states(1)
    ids = Tokenizer().encode(KNOWN.format(name, name) + "\n\n")
    model.forward(torch.tensor(ids), [len(ids)], [0], states)
    tensors = {}
    for layer in range(model.checkpoint.layers):
        block = f"blocks.{layer}."
        wkv = states.wkv[0, layer].clone()
        tensors[block + "att.time_state"] = wkv if layout == "vk" else wkv.mT.contiguous()
        tensors[block + "att.ts_state"] = states.shift[0, layer, 0].clone()
        tensors[block + "ffn.ts_state"] = states.shift[0, layer, 1].clone()
    torch.save(tensors, folder / f"{name}.pth")
    return folder / f"{name}.pth"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("states")
    for name in ("Nina", "Paul"):
        state_file(folder, name)
    state_file(folder, "Emma", "kv")
    flags = ("--device", "cpu", "--frontends", "2", "--models", str(folder))
    database = ("--state-db", str(folder / "sessions.db"))
    server = Server(*flags, *database)
    with httpx.Client(base_url=server.url, timeout=120) as http:
        for name, layout in (("Nina", "vk"), ("Paul", "vk"), ("Emma", "kv")):
            body = {"state_filename": f"{name}.pth", "state_viewname": name, "state_layout": layout}
            assert http.post("/loadstatemodel", json=body).json() == {"status": "success"}
    assert server.stop() == 0, server.log()
    yield (server := Server(*flags, *database))  # they are there after a restart
    server.stop()


def chat(http: httpx.Client, text: str, **fields) -> str:
    body = {"messages": [{"role": "user", "content": text}]} | GREEDY | fields
    reply = http.post("/openai/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["message"]["content"]


def test_the_model_knows_the_name_of_its_start_state(server: Server) -> None:
    with httpx.Client(base_url=server.url, timeout=120) as http:
        model = http.get("/v1/models").json()["data"][0]["id"]
        plain = chat(http, ASK)
        for name in ("Nina", "Paul", "Emma"):
            assert name in chat(http, ASK, state_id=name)
            assert name in chat(http, ASK, model=f"{model} {name}")
            assert name not in plain
        body = {"contents": [f"User: {ASK}\n\nAssistant:"] * 3, "alpha_presence": 0, "alpha_frequency": 0}
        reply = http.post("/v1/chat/completions", json=body | GREEDY, headers={"X-RWKV-State-Id": "Paul"})
        assert ["Paul" in choice["message"]["content"] for choice in reply.json()["choices"]] == [True] * 3


def test_a_session_begins_in_it_and_goes_on(server: Server) -> None:
    with httpx.Client(base_url=server.url, timeout=120) as http:
        model = http.get("/v1/models").json()["data"][0]["id"]
        begin = {"session_id": "s", "model": f"{model} Nina"}
        chat(http, "I live in Paris.", **begin)
        assert "Nina" in chat(http, ASK, session_id="s")
        assert "Paris" in chat(http, "Where do I live?", **begin)
        assert "Paul" in chat(http, ASK, session_id="s", state_id="Paul")


def test_a_mixture_shows_each_of_its_states_at_its_end(server: Server) -> None:
    with httpx.Client(base_url=server.url, timeout=120) as http:
        body = {"state_viewname": "both", "state_filenames": ["Nina.pth", "Paul.pth"]}
        assert http.post("/mrss_loadstatemodel", json=body).json() == {"status": "success"}
        for weights, name in (([1, 0], "Nina"), ([0, 1], "Paul"), ([0.9, 0.1], "Nina"), ([0.1, 0.9], "Paul")):
            alone = chat(http, ASK, state_id=name)
            assert chat(http, ASK, state_id="both", mrss_gatingweight=weights) == alone
        mixed = chat(http, ASK, state_id="both", stop=["\n"])
        assert mixed
        begin = {"model": f"{http.get('/v1/models').json()['data'][0]['id']} both", "session_id": "m"}
        chat(http, "I live in Paris.", mrss_gatingweight=[1, 0], **begin)
        assert "Nina" in chat(http, ASK, mrss_gatingweight=[1, 0], **begin)
        assert "Paul" in chat(http, ASK, mrss_gatingweight=[0, 1], **begin)
        assert "Paris" in chat(http, "Where do I live?", mrss_gatingweight=[0.5, 0.5], **begin)
