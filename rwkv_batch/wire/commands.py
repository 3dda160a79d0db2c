"""What front ends ask of the engine beside generating: of sessions, states, adapters, models and texts."""

from typing import Literal

from rwkv_batch.wire.protocol import ModelMessage, WireMessage
from rwkv_batch.wire.supervision import ModelDefaults

ExportParts = Literal["both", "tokens", "state"]  # of a session, in an exported file


class KeyedCommand(ModelMessage, frozen=True):
    """A command on one session or document."""

    key: str


class ListSessions(ModelMessage, frozen=True, omit_defaults=True, tag="list_sessions"):
    """Replied to with sessions, once each, and how many there are.

    Without both fields that is every session, those used last at the end of each tier; otherwise at most
    `limit` in the order of their keys, from the one behind `after` on.
    """

    after: str | None = None
    limit: int | None = None


class DeleteSession(KeyedCommand, frozen=True, omit_defaults=True, tag="delete_session"):
    """Delete `key`; the reply says how many sessions were found."""

    prefix: bool = False  # also delete every key that starts with "{key}:"


class ForkSession(KeyedCommand, frozen=True, omit_defaults=True, tag="fork_session"):
    """Let a session `target` go on from the end of `key`, or from the end of its turn of that number."""

    target: str
    turn: int | None = None
    replace: bool = False  # False: reject ("exists") if there is a session `target`


class SessionHistory(KeyedCommand, frozen=True, omit_defaults=True, tag="session_history"):
    """Replied to with the turns of the session behind that of number `after`, at most `limit` (None: all)."""

    after: int = 0
    limit: int | None = None


class RewindSession(KeyedCommand, frozen=True, tag="rewind_session"):
    """Keep the session's turns up to that of number `turn`; 0: none. Replied to with what it has now."""

    turn: int


class ExportSession(KeyedCommand, frozen=True, omit_defaults=True, tag="export_session"):
    """Replied to with the session as a file: its tokens, its state, or its tokens and the nearest state."""

    what: ExportParts = "both"


class FetchState(ModelMessage, frozen=True, tag="fetch_state"):
    """Replied to with the state at the end of that turn, for another server; with none if it is not here."""

    turn: int


class ImportSession(KeyedCommand, frozen=True, tag="import_session"):
    """Store an exported file as the session `key`, in place of any older one."""

    data: bytes


class PutDocument(KeyedCommand, frozen=True, tag="put_document"):
    """Store opaque bytes under `key`, in place of any older ones. Sessions have keys of their own."""

    data: bytes


class GetDocument(KeyedCommand, frozen=True, tag="get_document"):
    """Replied to with the document's bytes; with none if there is no such document."""


class RemoveDocument(KeyedCommand, frozen=True, tag="remove_document"):
    """The reply says how many documents were found: 0 or 1."""


class ListDocuments(ModelMessage, frozen=True, tag="list_documents"):
    """Replied to with the keys of documents that begin with `prefix`, which is not empty, in their order."""

    prefix: str


class PutStartState(KeyedCommand, frozen=True, tag="put_start_state"):
    """Read a tuned state from a file, and store it under the name `key`, in place of any older one.

    Rejected ("invalid") if the file is none for this model. Later requests may name it as `start_state`.
    """

    path: str
    layout: Literal["vk", "kv"]  # of a head's matrix in the file: [value, key] or [key, value]
    description: bytes  # what the front end wants to know of it later


class DescribeStartState(KeyedCommand, frozen=True, tag="describe_start_state"):
    """Give the start state of that name another description; the reply says how many there were."""

    description: bytes


class ListStartStates(ModelMessage, frozen=True, omit_defaults=True, tag="list_start_states"):
    """Replied to with all start states, or with the one of that name, if it is there."""

    name: str | None = None


class RemoveStartStates(ModelMessage, frozen=True, omit_defaults=True, tag="remove_start_states"):
    """Forget the start state of that name, None: all. The reply says how many there were.

    Sessions that began in it go on.
    """

    name: str | None = None


class LoadAdapter(KeyedCommand, frozen=True, omit_defaults=True, tag="load_adapter"):
    """Read an adapter from a file, or a folder with adapter.json, under the name `key`.

    Rejected ("exists") if there is one of that name, ("invalid") if it is none for requests of this model.
    Later requests may name it as `adapter`. It is forgotten when the engine ends.
    """

    path: str
    alpha: float | None = None  # of its training; divided by the rank it is the scaling
    scaling: float | None = None  # in place of alpha


class ListAdapters(ModelMessage, frozen=True, omit_defaults=True, tag="list_adapters"):
    """Replied to with all adapters that are loaded, or with the one of that name, if it is there."""

    name: str | None = None


class RemoveAdapter(KeyedCommand, frozen=True, tag="remove_adapter"):
    """Forget the adapter of that name; the reply says how many there were. Requests that have it go on."""


class ListRequests(ModelMessage, frozen=True, tag="list_requests"):
    """Replied to with the requests that wait or run, and the names of those that are paused."""


class StopRequest(ModelMessage, frozen=True, tag="stop_request"):
    """End the texts of the request of that name here, or forget it if it is paused.

    Replied to with the request, or with how many paused ones there were. Of a request that has been resumed
    and has not gone on yet the texts end with "paused", and it is not forgotten.
    """

    name: str


class PauseRequest(ModelMessage, frozen=True, omit_defaults=True, tag="pause_request"):
    """Store the request of that name as the document PAUSED + name, and end its texts here ("paused").

    The document is a GenerateRequest, which goes on when it is sent with another id. Replied to with the
    request, if there is one, when it is stored; rejected ("conflict") if it is not `pausable`.
    """

    name: str
    part: str = ""  # of a request that several engines run: stands behind the document's key


class Tokenize(ModelMessage, frozen=True, tag="tokenize"):
    """Replied to with the token ids of the texts, and the bytes of each token."""

    texts: list[str]


class Detokenize(ModelMessage, frozen=True, tag="detokenize"):
    """Replied to with the bytes of these tokens."""

    tokens: list[int]


class ListModels(WireMessage, frozen=True, tag="list_models"):
    """Replied to with the models that are served now."""


class GetMetrics(WireMessage, frozen=True, tag="get_metrics"):
    """Replied to with what the engine has counted, of all models."""


class LoadModel(WireMessage, frozen=True, omit_defaults=True, tag="load_model"):
    """Load a checkpoint and serve it under a name; where one is served under it, it takes its place.

    Replied to when new requests are answered by it. Rejected ("invalid") if it cannot be served, and
    ("conflict") while another model is loaded or removed, or the rows of a replaced one run; then nothing
    has changed.
    """

    path: str
    name: str = ""  # "": that of the file
    adapter: str = ""  # a file that is merged into it
    adapter_scaling: float | None = None  # of its training; None: what RWKV-Infer takes for it
    adapter_alpha: float | None = None  # in place of that
    adapter_init: str = ""  # the file of what PiSSA began with
    mole_router: Literal["topk0", "shared"] | None = None
    defaults: ModelDefaults = ModelDefaults()
    weights: str = ""  # the format of its matrices; "": that of its file, or of --weights


class RemoveModel(WireMessage, frozen=True, tag="remove_model"):
    """Take no more requests for the model of that name, and free it when its rows have ended.

    Replied to then. Rejected ("not_found", "conflict"), and ("invalid") if it is the only one.
    """

    name: str


class MayChangeModels(WireMessage, frozen=True, tag="may_change_models"):
    """Ask whether LoadModel or RemoveModel would be begun now; it is rejected as these are ("conflict")."""


PAUSED = "paused:"  # what the keys of paused requests begin with

# What is done with requests of any front end; the only event that follows is `CommandReply` or `Failed`.
RequestCommand = ListRequests | StopRequest | PauseRequest
# What is done with stored sessions and documents outside of a turn; the only event that follows is
# `CommandReply`, `Rejected` or `Failed`.
SessionCommand = (
    ListSessions
    | DeleteSession
    | ForkSession
    | SessionHistory
    | RewindSession
    | ExportSession
    | FetchState
    | ImportSession
    | PutDocument
    | GetDocument
    | RemoveDocument
    | ListDocuments
)
# What is done with start states; the only event that follows is `CommandReply`, `Rejected` or `Failed`.
StartStateCommand = PutStartState | DescribeStartState | ListStartStates | RemoveStartStates
# What is done with adapters; the only event that follows is `CommandReply`, `Rejected` or `Failed`.
AdapterCommand = LoadAdapter | ListAdapters | RemoveAdapter
# What is asked of the vocabulary; the only event that follows is `CommandReply` or `Rejected`.
TextCommand = Tokenize | Detokenize
# What is done with one model.
EngineCommand = SessionCommand | RequestCommand | StartStateCommand | AdapterCommand | TextCommand
# What is done with the models themselves.
ModelCommand = ListModels | GetMetrics | LoadModel | RemoveModel | MayChangeModels
Command = EngineCommand | ModelCommand
