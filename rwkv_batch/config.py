"""The engine process's frozen configuration, and what it and the supervisor say to each other. Imports
nothing heavy.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineSettings:
    """None means: what suits the device and the model."""

    address: str  # where front ends reach the engine: ipc://... or tcp://...
    model_path: str | None = None  # None: the bundled model
    device: str = "auto"
    max_rows: int | None = None
    prefill_tokens: int | None = None
    max_waiting: int = 4096
    wkv: str | None = None
    prefix_cache_mb: int = 512
    state_db: str | None = None  # None: sessions end with the process
    l1: int = 16
    l2: int = 32
    l3_bytes: int | None = None  # None: no limit
    durable: bool = True
    log_level: str = "INFO"


@dataclass(frozen=True)
class LoadFailure:
    """The model cannot be served; one sentence says why."""

    message: str


@dataclass(frozen=True)
class FrontendGone:
    """A front end has died; whatever it asked for is of no use any more."""

    name: str
