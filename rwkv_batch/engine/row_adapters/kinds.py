"""Adapters as the engine holds them, and why a request does not get one."""

import time
from dataclasses import dataclass, field
from pathlib import Path

from rwkv_batch.engine.scheduling.row import RowAdapter
from rwkv_batch.model.adapters.parts import Scaling
from rwkv_batch.ops.low_rank import LowRankAdapter
from rwkv_batch.wire.protocol import AdapterInfo


class AdapterRefused(Exception):
    """An adapter that cannot be loaded. `reason`: as of wire.protocol.Rejected."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(eq=False, kw_only=True)
class WeightedAdapter(RowAdapter):
    """An adapter with what a slot on the device gets of it."""

    weights: LowRankAdapter | None  # None: host memory had no room for it; it is read again when it is needed


@dataclass(eq=False, kw_only=True)
class LoadedAdapter(WeightedAdapter):
    """An adapter that requests may name, or that rows still run with."""

    path: Path
    scaling: Scaling | None
    rank: int
    of: "LoadedAdapter | None" = None  # of which it is, scaled; requests may name that
    scale: float = 1.0
    created: float = field(default_factory=time.time)  # seconds since 1970

    @property
    def info(self) -> AdapterInfo:
        return AdapterInfo(self.name, self.digest, self.rank, self.created, str(self.path))
