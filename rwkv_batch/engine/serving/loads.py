"""How much an engine of several has to do, which it reports to the front ends: these place requests."""

import math
import time

from rwkv_batch.engine.scheduling.row import Outbox
from rwkv_batch.engine.serving.models import Models
from rwkv_batch.wire.protocol import EngineLoad, RequestKey

EVERY = 0.02  # seconds between two reports, at least


class LoadReports:
    """For the front ends that have asked for them; none do where there is one engine."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._readers: dict[bytes, RequestKey] = {}  # by front end
        self._latest, self._at = (-1, -1), -math.inf  # the last report, and when the rows were last counted

    def add(self, key: RequestKey) -> None:
        """Of a front end that wants them from now on."""
        self._readers[key[0]] = key
        self._latest = (-1, -1)

    @property
    def wanted(self) -> bool:
        """Whether any front end has asked."""
        return bool(self._readers)

    def forget(self, frontend: bytes) -> None:
        self._readers.pop(frontend, None)

    def due(self, wait: float | None) -> float | None:
        """For how many seconds the loop may wait, if it may without reports; None: for any time."""
        if not self._readers or self._latest == self._models.load:
            return wait
        left = max(0.0, self._at + EVERY - time.monotonic())
        return left if wait is None else min(wait, left)

    def take(self) -> Outbox:
        """The reports that are due."""
        now = time.monotonic()
        if now < self._at + EVERY:
            return []
        self._at, load = now, self._models.load
        if self._latest == load:
            return []
        self._latest = load
        return [(key, EngineLoad(key[1], *load)) for key in self._readers.values()]
