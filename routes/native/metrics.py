"""/metrics for Prometheus, /stats for people and for clients of the Benchmarking API.

Both are one answer for all processes, whichever front end gives it: the engine's counts come over the wire,
those of all front ends from their files (routes/http/counts.py), those of the supervisor with its messages.
"""

import asyncio
from collections.abc import Iterable, Iterator
from itertools import accumulate
from uuid import uuid4

from prometheus_client import Metric, generate_latest
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString
from robyn import Response

from routes.http.exchange import HttpRequest, demand_password, json_response, text_response
from routes.http.frontend import Frontend
from routes.native.shapes import ServerStats
from rwkv_batch import __version__
from rwkv_batch.wire.client import RequestFailed, RequestRejected
from rwkv_batch.wire.commands import GetMetrics
from rwkv_batch.wire.metrics import ENGINE, FAMILIES, PREFIX, Series

ANSWERED_SOON = 5.0  # seconds; Prometheus waits for ten
MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"  # what every version of Prometheus reads


async def metrics(front: Frontend, http: HttpRequest) -> Response:
    """GET /metrics: always 200 for those who may read it, also while there is no engine. Raises ApiError."""
    _authorize(front, http)
    series: list[Series] = []
    if front.models:
        try:
            asked = front.client.ask(GetMetrics(uuid4().hex))
            series = (await asyncio.wait_for(asked, ANSWERED_SOON)).metrics
        except (RequestRejected, RequestFailed, TimeoutError):
            series = []
    counted = _Collected([*_of_server(front, bool(series)), *_of_engine(series)])
    return text_response(http, generate_latest(counted).decode(), MEDIA_TYPE)


async def stats(front: Frontend, http: HttpRequest) -> Response:
    """GET /stats: some of it as JSON, with the Benchmarking API's names. Raises ApiError."""
    _authorize(front, http)
    engine = front.ready_engine()
    found = (await front.ask(GetMetrics(uuid4().hex), ANSWERED_SOON)).metrics
    values = {(s.family, *s.labels): s.values for s in found}

    def of(family: str, name: str, *labels: str) -> int:
        return int(values.get((family, name, *labels), [0])[0])

    batches, rows = _steps(s.values for s in found if s.family == "batch_size")
    body: ServerStats = {
        "status": "running",
        "version": __version__,
        "model": engine.model,
        "num_gpus": int(engine.device.startswith("cuda")),
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
        "device_idle_ratio": round(values.get(("device_idle_ratio",), [1.0])[0], 3),
        "models": [
            {
                "model": name,
                "device": info.device,
                "rows": info.slots,
                "running": of("num_requests_running", name),
                "waiting": of("num_requests_waiting", name),
                "prompt_tokens": of("prompt_tokens", name),
                "generation_tokens": of("generation_tokens", name),
                "sessions": {tier: of("sessions", name, tier) for tier in ("L1", "L2", "L3")},
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
    """--metrics-password if there is one, else --password. Raises ApiError 401."""
    if (own := front.settings.metrics_password) is None:
        demand_password(front.settings.password, http)
    else:
        demand_password(own, http, flag="--metrics-password")


def _of_server(front: Frontend, engine_up: bool) -> Iterator[Metric]:
    yield from front.answered.of_all()
    restarts, up = _metric("restarts"), _metric("engine_up")
    _add(restarts, Series("restarts", ["engine"], [front.restarts.engine]))
    _add(restarts, Series("restarts", ["frontend"], [front.restarts.frontend]))
    _add(up, Series("engine_up", [], [int(engine_up)]))
    yield from (restarts, up)


def _of_engine(series: list[Series]) -> Iterator[Metric]:
    """In the order of the table, each family once."""
    for name in ENGINE:
        if its := [each for each in series if each.family == name]:
            metric = _metric(name)
            for each in its:
                _add(metric, each)
            yield metric


def _metric(name: str) -> Metric:
    """Without samples."""
    return Metric(PREFIX + name, FAMILIES[name].help, FAMILIES[name].kind)


def _add(metric: Metric, series: Series) -> None:
    """The samples of a series. Those of a histogram add up from bucket to bucket."""
    family = FAMILIES[series.family]
    labels = dict(zip(family.labels, series.labels, strict=True))
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
