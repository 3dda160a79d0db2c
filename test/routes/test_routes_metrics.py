"""/metrics, /stats and /: what front ends make of the counts, against a fake engine."""

import re
from collections.abc import Iterator

import httpx
import pytest
from fake_engine import INFO
from frontend_process import FrontendProcess
from native_calls import V1
from prometheus_client.parser import text_string_to_metric_families

from routes.table import ROUTES
from rwkv_batch.wire.metrics import ENGINE, FAMILIES, PREFIX, Series
from rwkv_batch.wire.supervision import Drain, EngineLost, Restarts, Serving

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]  # by name and labels


def parsed(answer: httpx.Response) -> Samples:
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    families = list(text_string_to_metric_families(answer.text))
    assert len({family.name for family in families}) == len(families), "each family is there once"
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def answered(samples: Samples) -> dict[tuple[str, str, str], float]:
    """Requests by route, method and status."""
    found = {tuple(v for _, v in labels): n for (name, labels), n in samples.items() if "http_req" in name}
    return {key: n for key, n in found.items() if key[0] not in ("/health", "/metrics")}


@pytest.fixture
def server() -> Iterator[FrontendProcess]:
    with FrontendProcess() as process:
        yield process


def test_every_series_of_the_engine_is_rendered(server):
    labels = {"model_name": "m", "outcome": "accepted", "finished_reason": "stop", "kind": "decode"}
    for name, family in ENGINE.items():
        numbers = [2.0, *range(len(family.bounds)), 99.5] if family.kind == "histogram" else [7.0]
        values = [labels.get(label, "x") for label in family.labels]
        server.engine.metrics.append(Series(name, values, [float(number) for number in numbers]))
    samples = parsed(server.http.get("/metrics"))
    for name, family in ENGINE.items():
        its = {
            (sample, dict(of).get("le")): value
            for (sample, of), value in samples.items()
            if sample.startswith(PREFIX + name)
        }
        if family.kind == "histogram":
            count = 2 + sum(range(len(family.bounds)))
            assert its[f"{PREFIX}{name}_sum", None] == 99.5 and its[f"{PREFIX}{name}_count", None] == count
            buckets = [v for (n, le), v in its.items() if n.endswith("_bucket") and le]
            assert buckets == sorted(buckets) and buckets[0] == 2 and buckets[-1] == count
            assert len(buckets) == len(family.bounds) + 1
        else:
            suffix = "_total" if family.kind == "counter" else ""
            assert its[f"{PREFIX}{name}{suffix}", None] == 7
    given = {label for _, labels in samples for label, _ in labels}
    families = [family for name, family in FAMILIES.items() if not name.startswith("key_")]  # with --keys
    assert given == {label for family in families for label in family.labels} | {"le"}


def test_requests_are_counted_by_route_and_status(server):
    def post(prompt: str, **fields) -> int:
        return server.http.post(V1, json={"contents": [prompt]} | fields).status_code

    assert [post("a"), post("a", stream=True), post("late"), post("overloaded"), post("fail")] == [
        200,
        200,
        200,
        429,
        500,
    ]
    for path in ("/nowhere", "/v1/state/secret-id", "/v1/models/fake-rwkv", "/v1/models/another/"):
        server.http.get(path)
    server.http.get(V1)
    server.http.options(V1)
    server.http.request("TRACE", "/x")
    server.http.head("/v1/models")
    assert answered(parsed(server.http.get("/metrics"))) == {
        (V1, "POST", "200"): 3,
        (V1, "POST", "429"): 1,
        (V1, "POST", "500"): 1,
        (V1, "GET", "405"): 1,
        (V1, "OPTIONS", "204"): 1,
        ("other", "GET", "404"): 2,
        ("other", "other", "404"): 1,
        ("/v1/models/:id", "GET", "200"): 1,
        ("/v1/models/:id", "GET", "404"): 1,
        ("/v1/models", "HEAD", "200"): 1,
    }


def test_one_answer_for_all_front_ends_also_for_one_that_has_died(server):
    with FrontendProcess(engine=server.engine, name="second") as other:
        for process in (server, other, other):
            assert process.http.post(V1, json={"contents": ["a"]}).status_code == 200
        asked = [answered(parsed(process.http.get("/metrics"))) for process in (server, other)]
        assert asked == [{(V1, "POST", "200"): 3}] * 2
        other.process.kill()
        other.process.join()
    assert answered(parsed(server.http.get("/metrics"))) == {(V1, "POST", "200"): 3}


def test_it_answers_while_there_is_no_engine(server):
    server.engine.metrics = [Series("models_loaded", [], [1.0])]
    up, loaded = (f"{PREFIX}engine_up", ()), (f"{PREFIX}models_loaded", ())
    samples = parsed(server.http.get("/metrics"))
    assert (samples[up], samples[loaded]) == (1, 1)
    server.control.send(EngineLost())
    server.control.send(Restarts(engine=1, frontend=2))
    server.until(lambda health: health.status_code == 503)
    samples = parsed(server.http.get("/metrics"))
    assert samples[up] == 0 and loaded not in samples
    assert samples[f"{PREFIX}restarts_total", (("process", "engine"),)] == 1
    assert samples[f"{PREFIX}restarts_total", (("process", "frontend"),)] == 2
    assert server.http.get("/stats").status_code == 503
    server.serve(Serving([INFO]))
    server.until(lambda health: health.status_code == 200)
    assert parsed(server.http.get("/metrics"))[up] == 1


def test_it_answers_while_the_server_drains(server):
    with server.http.stream("POST", V1, json={"contents": ["hang"], "stream": True}) as live:
        next(live.iter_raw())
        server.control.send(Drain(30))
        server.until(lambda health: health.json()["status"] == "draining")
        with server.client() as http:
            assert parsed(http.get("/metrics"))[f"{PREFIX}engine_up", ()] == 0, "the fake one has no counts"


def test_a_password_of_their_own():
    with FrontendProcess(password="all", metrics_password="figures") as process:
        for path in ("/metrics", "/stats"):
            codes = [
                process.http.get(path, headers={"authorization": f"Bearer {word}"}).status_code
                for word in ("figures", "all", "none")
            ]
            assert codes == [200, 401, 401]
            assert process.http.get(f"{path}?password=figures").status_code == 200
        assert process.http.get("/v1/models?password=figures").status_code == 401


def test_without_it_the_usual_one():
    with FrontendProcess(password="all") as process:
        for path in ("/metrics", "/stats"):
            assert process.http.get(path).status_code == 401
            assert process.http.get(f"{path}?password=all").status_code == 200


def test_stats_have_the_benchmarking_apis_names(server):
    sizes = [0.0] * (len(ENGINE["batch_size"].bounds) + 1)
    sizes[0], sizes[2] = 3.0, 1.0
    server.engine.metrics = [
        Series("request_rows", [INFO.model], [41.0]),
        Series("num_requests_waiting", [INFO.model], [5.0]),
        Series("num_requests_running", [INFO.model], [6.0]),
        Series("generation_tokens", [INFO.model], [77.0]),
        Series("sessions", [INFO.model, "L2"], [8.0]),
        Series("batch_size", [INFO.model], [*sizes, 7.0]),
        Series("device_idle_ratio", ["cuda:0"], [0.4]),
        Series("device_idle_ratio", ["cuda:1"], [0.1]),
    ]
    body = server.http.get("/stats").json()
    assert {key: body[key] for key in ("status", "model", "num_gpus", "batch_mode")} == {
        "status": "running",
        "model": "fake-rwkv",
        "num_gpus": 2,
        "batch_mode": "dynamic",
    }
    assert body["dynamic_batching"] == {
        "enabled": True,
        "stats": {"total_requests": 41, "total_batches": 4, "avg_batch_size": 1.75},
        "pending_requests": 5,
    }
    (model,) = body["models"]
    assert (model["running"], model["waiting"], model["generation_tokens"]) == (6, 5, 77)
    assert model["sessions"] == {"L1": 0, "L2": 8, "L3": 0} and body["device_idle_ratio"] == 0.25


def test_the_root_lists_the_routes(server):
    body = server.http.get("/").json()
    assert (body["name"], body["status"], body["models"]) == ("rwkv-batch", "ready", ["fake-rwkv"])
    assert re.fullmatch(r"\d+\.\d+\.\d+", body["version"])
    assert set(body["endpoints"]) == {route.path for route in ROUTES}
    assert sorted(body["endpoints"]["/v1/adapters"]) == ["DELETE", "GET", "POST"]


def test_the_root_names_models_to_those_who_may_use_them():
    with FrontendProcess(password="all") as process:
        assert "models" not in process.http.get("/").json()
        assert process.http.get("/?password=all").json()["models"] == ["fake-rwkv"]


def test_names_of_vllm_where_the_meaning_is_the_same(server):
    """--metric-names gives those, too, that no client can ask for by themselves."""
    put = server.engine.metrics.append
    put(Series("num_requests_running", ["fake-rwkv"], [2.0]))
    put(Series("request_success", ["fake-rwkv", "stop"], [5.0]))
    put(Series("iteration_tokens_total", ["fake-rwkv"], [1.0, *[0.0] * 15, 3.0]))
    put(Series("lora_requests_info", ["fake-rwkv", "a,b", "", "4"], [99.0]))
    put(Series("sessions", ["fake-rwkv", "L1"], [1.0]))
    put(Series("spec_decode_num_draft_tokens", ["fake-rwkv"], [9.0]))
    put(Series("spec_decode_num_accepted_tokens", ["fake-rwkv"], [7.0]))
    samples = parsed(server.http.get("/metrics", params={"names": "vllm"}))
    model = (("engine", "0"), ("model_name", "fake-rwkv"))
    assert samples["vllm:num_requests_running", model] == 2
    assert samples["vllm:kv_cache_usage_perc", model] == 2 / INFO.slots
    assert samples["vllm:iteration_tokens_total_sum", model] == 3
    drafts = [samples[f"vllm:spec_decode_num_{kind}_tokens_total", model] for kind in ("draft", "accepted")]
    assert drafts == [9, 7]
    assert samples["vllm:request_success_total", (model[0], ("finished_reason", "stop"), model[1])] == 5
    assert any("a,b" in dict(labels).values() for name, labels in samples if "lora_requests" in name)
    assert all(name.startswith("vllm:") and "sessions" not in name for name, _ in samples)
    assert not any("lora" in name for name, _ in parsed(server.http.get("/metrics")))
    assert server.http.get("/metrics", params={"names": "tgi"}).status_code == 400


def test_a_server_can_have_the_names_of_vllm_by_default():
    with FrontendProcess(metric_names="vllm") as process:
        process.engine.metrics.append(Series("num_requests_waiting", ["fake-rwkv", "engine-1"], [3.0]))
        samples = parsed(process.http.get("/metrics"))
        assert samples == {("vllm:num_requests_waiting", (("engine", "1"), ("model_name", "fake-rwkv"))): 3}
        assert "rwkv:restarts_total" in process.http.get("/metrics?names=rwkv").text
