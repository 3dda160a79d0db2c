"""A front end's frozen configuration. Imports nothing heavy: the supervisor builds it."""
from dataclasses import dataclass


@dataclass(frozen=True)
class FrontendSettings:
    """All of a front end's choices; two front ends of one server differ in `name` only."""

    host: str                        # an IP address or a name of this machine
    port: int
    address: str                     # where the engine listens: ipc://... or tcp://...
    name: str                        # no other front end has it
    password: str | None = None      # None: everything is open
    protect_translate: bool = False  # whether the password guards translation too
    max_body: int = 16 << 20         # bytes; a longer body is answered 413
    max_streams: int = 1024          # generation requests answered at once; more are answered 503
    workers: int = 1                 # HTTP worker threads, see `workers_for`
    log_level: str = "INFO"


def workers_for(max_streams: int, cores: int) -> int:
    """HTTP worker threads that let `max_streams` streams progress together: each worker can wait for 512 // cores of them."""
    return max_streams // max(1, 512 // cores) + 1
