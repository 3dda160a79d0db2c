"""The messages of the supervisor.

It has a pipe to each of its processes, where messages are pickled. It sends `EngineInfo` (the
engine is ready), `EngineLost` and `Drain` to the front ends, and `FrontendLost` and `Stop` to the engine. The
engine answers with `EngineInfo` or `LoadFailure`.
"""

from msgspec import Struct


class EngineInfo(Struct, frozen=True):
    """What the engine is and runs; sent to the supervisor once it is ready."""

    model: str
    layers: int
    width: int
    parameters: int
    dtype: str
    device: str
    slots: int
    vocabulary: int
    fingerprint: str  # of the weights


class EngineLost(Struct, frozen=True):
    """The engine has died: its requests have failed, and none can begin until it is ready again."""


class Drain(Struct, frozen=True):
    """Take no new requests and exit when none is running, at the latest after `seconds`."""

    seconds: float


class FrontendLost(Struct, frozen=True):
    """A front end has died, and nobody can receive the replies to its requests."""

    name: str


class Stop(Struct, frozen=True):
    """Commit what is not stored yet and exit."""


class LoadFailure(Struct, frozen=True):
    """The model cannot be served; one sentence says why."""

    message: str
