"""A front end's frozen configuration, and what the supervisor tells it. Imports nothing heavy."""
from dataclasses import dataclass


@dataclass(frozen=True)
class FrontendSettings:
    """One HTTP process. Several share the port; `name` tells them apart."""

    engine_address: str
    host: str = "127.0.0.1"
    port: int = 8000
    name: str = "frontend-1"
    password: str | None = None
    protect_translate: bool = False
    max_body: int = 16 * 1024 * 1024  # bytes
    max_streams: int = 1024           # replies under way at once; past it 503
    log_level: str = "INFO"


@dataclass(frozen=True)
class EngineLost:
    """The engine has died and is being started again: whatever is under way has failed."""


@dataclass(frozen=True)
class Drain:
    """Take no new requests, let those under way end, at most this long, then exit."""

    seconds: float
