"""Mixtures of start states over HTTP (MRSS)."""

import pytest
from fake_engine import INFO
from frontend_process import FrontendProcess
from session_calls import STATE

from rwkv_batch.wire.protocol import MixturePart

LOAD, WEIGHTS = "/mrss_loadstatemodel", "/mrss_set_gatingweight"
V2 = "/v2/chat/completions"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name in "abc":
        (folder / f"{name}.pth").write_bytes(name.encode())
    (folder / "bad.pth").write_bytes(b"bad")
    with FrontendProcess(models=str(folder)) as process:
        yield process


@pytest.fixture
def http(server):
    server.engine.start_states.clear()
    return server.http


def load(http, files=("a.pth", "b.pth"), **fields):
    return http.post(LOAD, json={"state_viewname": "view", "state_filenames": list(files)} | fields)


def mixture(server, **fields) -> list[tuple[bytes, float]]:
    """The contents of the files in which a request begins, with their weights."""
    reply = server.http.post(V2, json={"contents": ["a"], "state_id": "view"} | fields)
    assert reply.status_code == 200, reply.text
    request = server.engine.requests[-1]
    assert request.start_state == ""
    return [
        (server.engine.start_states[part.start_state][1] if part.start_state else b"", part.weight)
        for part in request.mixture
    ]


def test_a_request_runs_in_the_states_of_a_mixture(http, server):
    assert load(http, contain_originalstate="True").json() == {"status": "success"}
    assert mixture(server) == [(b"a", 1.0), (b"b", 1.0), (b"", 1.0)]
    assert mixture(server, mrss_gatingweight=[0, "0.5", 2]) == [(b"a", 0.0), (b"b", 0.5), (b"", 2.0)]
    assert mixture(server, mrss_gatingweight=[3]) == [(b"a", 3.0), (b"b", 0.0), (b"", 0.0)]
    assert mixture(server, mrss_gatingweight=[1, 2, 3, 4]) == [(b"a", 1.0), (b"b", 2.0), (b"", 3.0)]
    by_model = server.http.post(V2, json={"contents": ["a"], "model": f"{INFO.model} view"})
    assert by_model.status_code == 200 and server.engine.requests[-1].mixture[0] == MixturePart("view", 1.0)


def test_it_is_listed_once(http):
    load(http)
    assert [state["state_id"] for state in http.get("/v1/state/list").json()["data"]] == ["view"]
    assert [m["id"] for m in http.get("/models").json()] == [INFO.model, f"{INFO.model} view"]


@pytest.mark.parametrize("flag", [False, "False", 0, "false"])
def test_the_original_state_is_in_it_only_if_asked_for(http, server, flag):
    load(http, contain_originalstate=flag, state_gatingweight=["0.25", 0.75])
    assert mixture(server) == [(b"a", 0.25), (b"b", 0.75)]


def test_its_weights_can_be_changed(http, server):
    load(http)
    for name in ("view", f"{INFO.model} view"):
        body = {"state_viewname": name, "state_gatingweight": [2, len(name)], "default_temperature": "0.5"}
        assert http.post(WEIGHTS, json=body).json() == {"status": "success"}
        assert mixture(server) == [(b"a", 2.0), (b"b", float(len(name)))]
        assert server.engine.requests[-1].sampling.temperature == 0.5
    missing = http.post(WEIGHTS, json={"state_viewname": "other", "state_gatingweight": [1]})
    assert missing.status_code == 404


def test_loading_replaces_it_and_removing_takes_all_of_it(http, server):
    load(http, ("a.pth", "b.pth", "c.pth"))
    load(http, ("c.pth", "a.pth"))
    assert mixture(server) == [(b"c", 1.0), (b"a", 1.0)]
    assert len(server.engine.start_states) == 2
    assert http.post("/removestatemodel", json={"state_viewname": "view"}).status_code == 200
    assert server.engine.start_states == {}
    load(http)
    body = {"state_filename": "b.pth", "state_viewname": "view"}
    assert http.post("/loadstatemodel", json=body).status_code == 200
    assert list(server.engine.start_states) == ["view"]


def test_a_bad_file_changes_nothing(http, server):
    load(http)
    before = dict(server.engine.start_states)
    for files in (("c.pth", "bad.pth"), ("bad.pth", "c.pth"), ("c.pth", "nowhere.pth")):
        assert load(http, files).status_code in (400, 404)
        assert server.engine.start_states == before


@pytest.mark.parametrize(
    "fields",
    [
        {"state_gatingweight": ["warm", 1]},
        {"state_gatingweight": [0, 0]},
        {"state_gatingweight": [1, -1]},
        {"state_gatingweight": [True, 1]},
        {"state_gatingweight": 5},
        {"state_filenames": []},
        {"state_filenames": ["../x.pth"]},
        {"contain_originalstate": "perhaps"},
        {"state_filenames": ["a.pth"] * (INFO.slots + 1)},
    ],
)
def test_what_cannot_be_mixed(http, server, fields):
    assert load(http, **fields).status_code == 400
    assert server.engine.start_states == {}


@pytest.mark.parametrize("weights", [["warm"], [0, 0], [1, -1], 3, [None], "1,2"])
def test_weights_of_a_request_that_cannot_be(http, weights):
    load(http)
    reply = http.post(V2, json={"contents": ["a"], "state_id": "view", "mrss_gatingweight": weights})
    assert (reply.status_code, "mrss_gatingweight" in reply.json()["error"]) == (400, True)


def test_weights_need_a_mixture(http):
    body = {"state_filename": "a.pth", "state_viewname": "one"}
    http.post("/loadstatemodel", json=body)
    for fields in ({}, {"state_id": "one"}):
        reply = http.post(V2, json={"contents": ["a"], "mrss_gatingweight": [1]} | fields)
        assert (reply.status_code, "mixture" in reply.json()["error"]) == (400, True)


def test_a_turn_names_the_mixture_too(http, server):
    """What the engine makes of it is its own: it refuses one."""
    load(http)
    reply = http.post(STATE, json={"contents": ["a"], "session_id": "s", "state_id": "view"})
    assert reply.status_code == 200 and len(server.engine.requests[-1].mixture) == 2
