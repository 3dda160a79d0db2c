"""A front end's frozen configuration, and what the supervisor tells it. Imports nothing heavy."""

from dataclasses import dataclass


@dataclass(frozen=True)
class FrontendSettings:
    """The front ends of one server differ in `name` only."""

    engine_address: str  # where the engine listens: ipc://... or tcp://...
    host: str  # an IP address or a name of this machine
    port: int
    name: str = "frontend"  # no other front end has it
    password: str | None = None  # None: everything is open
    protect_translate: bool = False  # whether the password guards translation too
    max_body: int = 16 << 20  # bytes; a longer body is answered 413
    max_state: int = 256 << 20  # bytes; a longer file of a session is answered 413
    max_streams: int = 1024  # generation requests answered at once; more are answered 503
    log_level: str = "INFO"


@dataclass(frozen=True)
class EngineLost:
    """The engine has died: what it was doing has failed, and nothing new can begin until it is
    ready again.
    """


@dataclass(frozen=True)
class Drain:
    """Take no new requests and end when none is live, at the latest after `seconds`."""

    seconds: float
