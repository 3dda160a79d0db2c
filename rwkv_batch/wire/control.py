"""The messages between the supervisor and its processes, pickled over a pipe to each.

The supervisor sends `EngineInfo` (the engine is ready), `EngineLost` and `Drain` to the front ends, and
`FrontendLost` and `Stop` to the engine. The engine answers with `EngineInfo` or `LoadFailure`.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineLost:
    """The engine has died: its requests have failed, and none can begin until it is ready again."""


@dataclass(frozen=True)
class Drain:
    """Take no new requests and exit when none is running, at the latest after `seconds`."""

    seconds: float


@dataclass(frozen=True)
class FrontendLost:
    """A front end has died, and nobody can receive the replies to its requests."""

    name: str


@dataclass(frozen=True)
class Stop:
    """Commit what is not stored yet and exit."""


@dataclass(frozen=True)
class LoadFailure:
    """The model cannot be served; one sentence says why."""

    message: str
