"""What the engines of a process have counted, as the series of metrics that front ends ask for."""

from collections.abc import Iterable, Mapping
from time import time

import torch

from rwkv_batch.engine.engine import Engine
from rwkv_batch.engine.metrics.device_time import DeviceTime
from rwkv_batch.engine.metrics.histogram import Histogram
from rwkv_batch.engine.scheduling.row import Row
from rwkv_batch.ops import device as devices
from rwkv_batch.state.entries import Status
from rwkv_batch.wire.metrics import KNOWN, Series

OUTCOMES = ("accepted", "overloaded", "invalid", "not_found", "failed")  # of requests
REASONS = ("stop", "length", "abort", "error", "paused")  # that end rows


class Figures:
    """Series that are added up where they have the same labels, as of a model that takes another's place."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, ...], list[float]] = {}  # by family and labels

    @property
    def series(self) -> list[Series]:
        return [Series(family, labels, values) for (family, *labels), values in self._values.items()]

    def put(self, family: str, *labels: str, value: float | Histogram) -> None:
        """Add a number, or a histogram, to the series of these labels."""
        values = value.values if isinstance(value, Histogram) else [value]
        before = self._values.setdefault((family, *labels), [0] * len(values))
        self._values[family, *labels] = [a + b for a, b in zip(before, values, strict=True)]

    def merge(self, other: "Figures") -> None:
        """Add all of another's."""
        for key, values in other._values.items():
            before = self._values.setdefault(key, [0] * len(values))
            self._values[key] = [a + b for a, b in zip(before, values, strict=True)]

    def counters(self) -> "Figures":
        """Without gauges: what stays when an engine ends."""
        kept = Figures()
        kept._values = {key: v for key, v in self._values.items() if KNOWN[key[0]].kind != "gauge"}
        return kept


def of_process(times: Mapping[torch.device, DeviceTime], models: int) -> Figures:
    """What all models have in common. `times`: of the devices that they run on."""
    figures = Figures()
    figures.put("models_loaded", value=models)
    for device, steps in times.items():
        name, (free, total) = str(device), devices.memory(device)
        figures.put("device_busy_seconds", name, value=steps.busy)
        figures.put("device_idle_ratio", name, value=steps.idle_share)
        figures.put("device_free_bytes", name, value=free)
        figures.put("device_total_bytes", name, value=total)
    return figures


def of_engine(name: str, engine: Engine) -> Figures:
    """What an engine has counted, under a model's name, and what it holds; but for its sessions."""
    figures, counts = Figures(), engine.counts
    put = figures.put
    running = _rows(engine.scheduler.running.values())
    numbers: dict[str, float | Histogram] = {
        "num_requests_running": running,
        "num_requests_waiting": _rows(engine.scheduler.rows()) - running,
        "request_rows": counts.rows,
        "num_preemptions": counts.waits.preemptions,
        "corrupted_requests": counts.corrupted,
        "prompt_tokens": counts.prompt_tokens,
        "prompt_tokens_cached": counts.cached_tokens,
        "prefill_tokens": counts.prefill_tokens,
        "generation_tokens": counts.generation_tokens,
        "spec_decode_num_draft_tokens": counts.steps.drafted,
        "spec_decode_num_accepted_tokens": counts.steps.accepted,
        "prefix_cache_queries": counts.cache_queries,
        "prefix_cache_hits": counts.cache_hits,
        "time_to_first_token_seconds": counts.waits.first_token,
        "inter_token_latency_seconds": counts.waits.between_tokens,
        "e2e_request_latency_seconds": counts.waits.whole,
        "request_queue_time_seconds": counts.waits.queued,
        "batch_size": counts.steps.rows,
        "iteration_tokens_total": counts.steps.tokens,
        "adapters_loaded": len(engine.adapters.infos(None)),
    }
    for family, value in numbers.items():
        put(family, name, value=value)
    if engine.adapters.most:
        waiting = (row for row in engine.scheduler.rows() if row.slot is None)
        names = _adapters(engine.scheduler.running.values()), _adapters(waiting)
        put("lora_requests_info", name, names[0], names[1], str(engine.adapters.most), value=time())
    for outcome in OUTCOMES:
        put("requests", name, outcome, value=counts.requests[outcome])
    for reason in REASONS:
        put("request_success", name, reason, value=counts.finished[reason])
    for kind, times in counts.steps.times.items():
        put("step_time_seconds", name, kind, value=times)
    pool = engine.pool.counted
    put("session_commits", name, value=pool["turns"])
    put("commit_transactions", name, value=pool["transactions"])
    for direction in ("to_host", "to_device"):
        put("state_copies", name, direction, value=pool[direction])
    put("state_copies", name, "on_device", value=engine.runner.states.copied)
    for purpose, size in _memory(engine).items():
        put("device_memory_bytes", name, purpose, value=size)
    return figures


def of_sessions(name: str, status: Status) -> Figures:
    """How many sessions there are in each tier."""
    figures = Figures()
    deeper = max(status.total - status.l1 - status.l2, 0)
    for tier, count in (("L1", status.l1), ("L2", status.l2), ("L3", deeper)):
        figures.put("sessions", name, tier, value=count)
    return figures


def _adapters(rows: Iterable[Row]) -> str:
    """The names of their adapters, separated by commas."""
    return ",".join(sorted({row.request.adapter for row in rows if row.request.adapter}))


def _rows(rows: Iterable[Row]) -> int:
    return sum(1 for row in rows if row.leads)


def _memory(engine: Engine) -> dict[str, int]:
    """Bytes of the device by purpose."""
    states, rows = engine.runner.states, engine.scheduler.max_rows
    slot = states.shape.nbytes
    return {
        "weights": engine.weight_bytes,
        "states": rows * slot,
        "sessions": (len(states) - rows) * slot,
        "steps": engine.step_bytes,
    }
