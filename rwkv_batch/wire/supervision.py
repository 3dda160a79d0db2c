"""The messages of the supervisor, which has a pipe to each of its processes, where they are pickled."""

from typing import Literal

from msgspec import Struct

LoadStage = Literal["reading", "preparing", "draining"]


class ModelDefaults(Struct, frozen=True):
    """What requests of a model mean that do not say it. None: what they mean otherwise."""

    temperature: float | None = None
    top_p: float | None = None
    stop: str | None = None  # of OpenAI routes
    template: str | None = None  # a name of --chat-template


class EngineInfo(Struct, frozen=True):
    """A model that the engine runs."""

    model: str  # its name
    layers: int
    width: int
    parameters: int
    dtype: str
    device: str
    slots: int
    vocabulary: int
    fingerprint: str  # of the weights
    checkpoint: str  # the name of the file or folder, which says how chats were rendered in training
    defaults: ModelDefaults = ModelDefaults()
    weights: str = ""  # the format of its large matrices; "": none in particular
    weight_bytes: int = 0  # that its weights take on the device
    texts: bool = True  # False: its vocabulary is not World's, so that only token ids mean something
    step_seconds: float = 0.0  # that its longest step takes, about


class Loading(Struct, frozen=True):
    """A model that is loaded while others serve."""

    model: str  # its name
    stage: LoadStage  # draining: rows of the model whose place it takes are ending
    progress: float  # of reading, 0 to 1


class Serving(Struct, frozen=True):
    """What the engine runs, to the supervisor and by it to front ends; again whenever that changes."""

    models: list[EngineInfo]  # the first is that of requests which name none
    loading: list[Loading] = []
    engine: int = 0  # which of the host's engines


class Taken(Struct, frozen=True):
    """From a front end, for each `Serving`: it acts by it, and sends requests to that engine."""


class AllServe(Struct, frozen=True):
    """To each front end: all send requests to that engine, so that it is ready."""

    engine: int = 0


class EngineLost(Struct, frozen=True):
    """An engine has died. Its requests have failed, or go to another; it has none until it is ready again."""

    engine: int = 0


class Stalled(Struct, frozen=True):
    """An engine has made no step for so many seconds, though it was asked, or rows wait; 0: it goes on."""

    engine: int
    seconds: float


class ChangeWanted(Struct, frozen=True):
    """A front end waits until no other one changes models or adapters."""

    command: bytes  # LoadModel, RemoveModel, LoadAdapter or RemoveAdapter, as codec.py encodes it


class ChangeGranted(Struct, frozen=True):
    """None does. No engine begins to serve until this one is over."""

    left: bytes = b""  # in place of its own change, that of a front end which has died; see host/finishing.py
    had: list[str] = []  # names of the models that there were before that


class ChangeOver(Struct, frozen=True):
    """The change that was granted is over."""

    made: bool  # by all engines, and one that is started later makes it too; False: nothing has changed


class CatchUp(Struct, frozen=True):
    """Make these changes, which the others have made while this engine started."""

    changes: list[bytes]


class DatabaseNeeded(Struct, frozen=True):
    """An engine of several waits for the process that writes to a database of this path."""

    path: str


class Ping(Struct, frozen=True):
    """An engine answers it between two steps. After a long idle time it asks its device first."""

    waited: float = 0.0  # in the answer: seconds for which rows have waited, and no step has ended


class Restarts(Struct, frozen=True):
    """How many processes have died and were started again."""

    engine: int = 0
    frontend: int = 0
    down: dict[str, int] = {}  # of kinds of front ends: those in whose place none has begun since


class Begun(Struct, frozen=True):
    """A front end listens; the process of batches has opened its folder."""


class Drain(Struct, frozen=True):
    """Take no new requests and exit when none is running, at the latest after `seconds`."""

    seconds: float


class FrontendLost(Struct, frozen=True):
    """A front end has died, and nobody can receive the replies to its requests."""

    name: str


class FrontendBroken(Struct, frozen=True):
    """Nothing can be sent to this front end. Its requests are cancelled."""

    name: str


class Stop(Struct, frozen=True):
    """Commit what is not stored yet and exit."""


class LoadFailure(Struct, frozen=True):
    """A process cannot do its work; one sentence says why. passes: whether that may be otherwise soon."""

    message: str
    passes: bool = False
