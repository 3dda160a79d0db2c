"""/metrics for Prometheus, /stats for people and for clients of the Benchmarking API.

Both are one answer for all processes, whichever front end gives it: the engine's counts come over the wire,
those of all front ends from their files (routes/http/counts.py), those of the supervisor with its messages.
"""

import asyncio
import math
from collections.abc import Iterable, Iterator
from itertools import accumulate, zip_longest
from uuid import uuid4

from prometheus_client import Metric, generate_latest
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString
from robyn import Response

from routes.http.access import demand_operator, demand_password
from routes.http.exchange import HttpRequest, json_response, text_response
from routes.http.frontend import Frontend
from routes.http.schemas import RequestBody
from routes.native.shapes import ServerStats
from rwkv_batch import __version__
from rwkv_batch.config import MetricNames
from rwkv_batch.wire.client import RequestFailed, RequestRejected
from rwkv_batch.wire.commands import GetMetrics
from rwkv_batch.wire.host.merging import TIERS, name_of
from rwkv_batch.wire.metrics import ENGINE, FAMILIES, KNOWN, LABEL, PREFIX, Series

ANSWERED_SOON = 5.0  # seconds; Prometheus waits for ten
# Families that vLLM has with the same meaning.
LIKE_VLLM = (
    "num_requests_running",
    "num_requests_waiting",
    "num_preemptions",
    "prompt_tokens",
    "generation_tokens",
    "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "request_success",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "iteration_tokens_total",
    "lora_requests_info",
)
USAGE = "Share of the slots that rows have, in the place of vLLM's cache. 1 is all."
MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"  # what every version of Prometheus reads


class MetricsQuery(RequestBody):
    """The URL parameters of /metrics."""

    names: MetricNames = "rwkv"  # vllm: those of vLLM, where the meaning is the same


async def metrics(front: Frontend, http: HttpRequest) -> Response:
    """GET /metrics: always 200 for those who may read it, also while there is no engine. Raises ApiError."""
    _authorize(front, http)
    names = MetricsQuery.from_json({"names": http.parameter("names") or front.settings.metric_names}).names
    series: list[Series] = []
    if front.models:
        try:
            asked = front.client.ask(GetMetrics(uuid4().hex))
            series = (await asyncio.wait_for(asked, ANSWERED_SOON)).metrics
        except (RequestRejected, RequestFailed, TimeoutError):
            series = []
    if names == "vllm":
        slots = {name: info.slots / front.client.count for name, info in front.models.items()}
        found = _Collected([*as_vllm(series, slots)])
        return text_response(http, generate_latest(found).decode(), MEDIA_TYPE)
    up = _up(series, front.client.count)
    counted = _Collected([*_of_server(front, up), *_of_engine(series)])
    return text_response(http, generate_latest(counted).decode(), MEDIA_TYPE)


async def stats(front: Frontend, http: HttpRequest) -> Response:
    """GET /stats: some of it as JSON, with the Benchmarking API's names. Raises ApiError."""
    _authorize(front, http)
    engine = front.ready_engine()
    found = (await front.ask(GetMetrics(uuid4().hex), ANSWERED_SOON)).metrics
    values = _of_host(found)

    def of(family: str, name: str, *labels: str) -> int:
        return int(sum(engine[0] for engine in values.get((family, name, *labels), [])))

    def sessions(name: str) -> dict[str, int]:
        """Each engine says how many there are in all, and how many states it holds itself."""
        l1, l2 = of("sessions", name, "L1"), of("sessions", name, "L2")
        tiers = zip_longest(*(values.get(("sessions", name, tier), []) for tier in TIERS), fillvalue=[0.0])
        most = max((int(sum(engine[0] for engine in each)) for each in tiers), default=0)
        return {"L1": l1, "L2": l2, "L3": max(0, most - l1 - l2)}

    batches, rows = _steps(s.values for s in found if s.family == "batch_size")
    shares = {labels[0]: each for (family, *labels), each in values.items() if family == "device_idle_ratio"}
    idle = [engine[0] for engines in shares.values() for engine in engines] or [1.0]
    body: ServerStats = {
        "status": "running",
        "version": __version__,
        "model": engine.model,
        "num_gpus": sum(device.startswith("cuda") for device in shares),
        "batch_mode": "dynamic",
        "dynamic_batching": {
            "enabled": True,
            "stats": {
                "total_requests": sum(of("request_rows", name) for name in front.models),
                "total_batches": batches,
                "avg_batch_size": round(rows / batches, 2) if batches else 0.0,
            },
            "pending_requests": sum(of("num_requests_waiting", name) for name in front.models),
        },
        "device_idle_ratio": round(sum(idle) / len(idle), 3),
        "models": [
            {
                "model": name,
                "device": info.device,
                "rows": info.slots,
                "running": of("num_requests_running", name),
                "waiting": of("num_requests_waiting", name),
                "prompt_tokens": of("prompt_tokens", name),
                "generation_tokens": of("generation_tokens", name),
                "sessions": sessions(name),
            }
            for name, info in front.models.items()
        ],
    }
    return json_response(http, body)


class _Collected(Collector):
    """Metrics that are complete."""

    def __init__(self, found: list[Metric]) -> None:
        self._found = found

    def collect(self) -> list[Metric]:
        return self._found


def _authorize(front: Frontend, http: HttpRequest) -> None:
    """--metrics-password if there is one, else --password or an admin's key. Raises ApiError 401, 403."""
    if (own := front.settings.metrics_password) is None:
        demand_operator(front, http)
    else:
        demand_password(own, http, None, "--metrics-password")


def _of_host(found: Iterable[Series]) -> dict[tuple[str, ...], list[list[float]]]:
    """The values of each engine, by family and labels."""
    values: dict[tuple[str, ...], list[list[float]]] = {}
    for series in found:
        labels = series.labels[: len(KNOWN[series.family].labels)]
        values.setdefault((series.family, *labels), []).append(series.values)
    return values


def _up(series: list[Series], engines: int) -> list[Series]:
    """Whether each engine has answered."""
    if engines == 1:
        return [Series("engine_up", [], [int(bool(series))])]
    answered = {each.labels[-1] for each in series}
    names = map(name_of, range(engines))
    return [Series("engine_up", [name], [int(name in answered)]) for name in names]


def _of_server(front: Frontend, engines_up: list[Series]) -> Iterator[Metric]:
    yield from front.shared.answered.of_all()
    restarts, up = _metric("restarts"), _metric("engine_up")
    _add(restarts, Series("restarts", ["engine"], [front.restarts.engine]))
    _add(restarts, Series("restarts", ["frontend"], [front.restarts.frontend]))
    for each in engines_up:
        _add(up, each)
    yield from (restarts, up)


def _of_engine(series: list[Series]) -> Iterator[Metric]:
    """In the order of the table, each family once."""
    for name in ENGINE:
        if its := [each for each in series if each.family == name]:
            metric = _metric(name)
            for each in its:
                _add(metric, each)
            yield metric


def as_vllm(found: Iterable[Series], slots: dict[str, float]) -> Iterator[Metric]:
    """What vLLM counts too, under its names. slots: of each model in an engine."""
    made: dict[str, Metric] = {}
    for series in found:
        if series.family in LIKE_VLLM:
            family = KNOWN[series.family]
            metric = made.setdefault(series.family, Metric(f"vllm:{series.family}", family.help, family.kind))
            _add(metric, series, _vllm_labels(series))
        if series.family == "num_requests_running":
            usage = made.setdefault("usage", Metric("vllm:kv_cache_usage_perc", USAGE, "gauge"))
            share = series.values[0] / slots.get(series.labels[0], math.inf)
            usage.add_sample(usage.name, _vllm_labels(series), share)
    yield from made.values()


def _vllm_labels(series: Series) -> dict[str, str]:
    """There each series has the number of its engine, also where there is one."""
    labels = _labels(series)
    return labels | {LABEL: labels.get(LABEL, "0").rpartition("-")[2]}


def _metric(name: str) -> Metric:
    """Without samples."""
    return Metric(PREFIX + name, FAMILIES[name].help, FAMILIES[name].kind)


def _labels(series: Series) -> dict[str, str]:
    names = (*KNOWN[series.family].labels, LABEL)[: len(series.labels)]
    return dict(zip(names, series.labels, strict=True))


def _add(metric: Metric, series: Series, labels: dict[str, str] | None = None) -> None:
    """The samples of a series. Those of a histogram add up from bucket to bucket."""
    family = KNOWN[series.family]
    labels = _labels(series) if labels is None else labels
    if family.kind != "histogram":
        suffix = "_total" if family.kind == "counter" else ""
        metric.add_sample(metric.name + suffix, labels, series.values[0])
        return
    *counts, total = series.values
    limits = [*map(floatToGoString, family.bounds), "+Inf"]
    for limit, count in zip(limits, accumulate(counts), strict=True):
        metric.add_sample(f"{metric.name}_bucket", labels | {"le": limit}, count)
    metric.add_sample(f"{metric.name}_count", labels, sum(counts))
    metric.add_sample(f"{metric.name}_sum", labels, total)


def _steps(histograms: Iterable[list[float]]) -> tuple[int, int]:
    """How many values there are, and their sum."""
    steps = total = 0
    for *counts, size in histograms:
        steps, total = steps + int(sum(counts)), total + int(size)
    return steps, total
