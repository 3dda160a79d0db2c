"""The shapes of replies that are no stream. They document."""

from typing import Literal, NotRequired

from typing_extensions import TypedDict

from routes.http.errors import Json


class NativeMessage(TypedDict):
    role: Literal["assistant"]
    content: str
    reasoning_content: NotRequired[str]  # a thought that nobody asked for


class NativeChoice(TypedDict):
    index: int
    message: NativeMessage
    finish_reason: Literal["stop", "length", "paused", "error"]
    error: NotRequired[str]  # why the choice has ended, while others went on


class NativeTexts(TypedDict):
    """The text of each prompt, in the order of the prompts."""

    id: str
    object: str
    model: str
    choices: list[NativeChoice]


class TurnTexts(NativeTexts):
    """The text of a turn, and the number of its node in the tree."""

    dialogue_idx: int


class Owner(TypedDict):
    """Of what belongs to a key, where the password or an admin's key asks."""

    owner: NotRequired[str]


def owner_of(name: str) -> Owner:
    return {"owner": name} if name else {}


class ListedSession(Owner):
    session_id: str
    cache_level: str
    timestamp: float
    tokens: int
    last_updated: str


class UsedEntry(TypedDict):
    """What a key has used of a model on a day (UTC)."""

    key: str
    model: str
    day: str
    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class KeyLimits(TypedDict):
    """What the key of the request may use; null: as much as there is."""

    requests_per_minute: int | None
    tokens_per_minute: int | None
    tokens_per_day: int | None
    rows: int | None
    batch_bytes: int | None


class UsageTotal(TypedDict):
    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    total_tokens: int


class KeyUsage(TypedDict):
    object: Literal["usage"]
    key: str | None  # whose usage it is; null: that of all
    limits: KeyLimits | None
    total: UsageTotal
    data: list[UsedEntry]


class StoredSessions(TypedDict):
    status: Literal["success"]
    total_sessions: int
    l1_cache_count: int
    l2_cache_count: int
    database_count: int
    sessions: list[ListedSession]


class Done(TypedDict):
    """It was done; the message says what there is to say."""

    status: Literal["success"]
    message: NotRequired[str]


class DoneSession(TypedDict):
    status: Literal["success"]
    message: str
    session_id: str


class SessionTurnText(TypedDict):
    turn: int
    start: int
    end: int
    prompt: str
    completion: str
    prompt_tokens: list[int]
    completion_tokens: list[int]
    created: float


class SessionTurns(TypedDict):
    object: Literal["session.history"]
    session_id: str
    position: int
    turns: list[SessionTurnText]


class RewoundSession(TypedDict):
    status: Literal["success"]
    session_id: str
    turn: int
    position: int


class ListedState(TypedDict):
    """A start state."""

    state_id: str
    filename: str
    original_filename: str
    size_bytes: int
    tensor_count: int
    layers: int
    heads: int
    head_size: int
    created: int
    created_ms: int
    uploaded_at: str
    default_temperature: float | None
    default_top_p: float | None
    default_think_type: str | None
    default_chat_template_kwargs: Json | None


class UploadedState(ListedState):
    object: Literal["rwkv.state"]


class ListedStates(TypedDict):
    object: Literal["list"]
    data: list[ListedState]


class DeletedState(TypedDict):
    state_id: str
    deleted: bool


class ListedAdapter(TypedDict):
    adapter_id: str
    version: str
    rank: int
    path: str
    created: int


class ListedAdapters(TypedDict):
    object: Literal["list"]
    data: list[ListedAdapter]


class DeletedAdapter(TypedDict):
    adapter_id: str
    deleted: bool


class ListedRequest(Owner):
    request_id: str
    rows: int
    generated_tokens: int
    max_tokens: int
    model: NotRequired[str]


class PausedRequest(Owner):
    request_id: str
    model: str


class NamedModel(TypedDict):
    id: str
    name: str


class ServerCapabilities(TypedDict):
    stop: bool
    pause_resume: bool
    session_cache: bool


class ServerStatus(TypedDict):
    """Those who do not send the password learn only that the server runs."""

    status: Literal["running"]
    models: NotRequired[list[str]]
    model: NotRequired[NamedModel]
    capabilities: NotRequired[ServerCapabilities]
    active_request: NotRequired[ListedRequest | None]
    active_requests: NotRequired[list[ListedRequest]]
    paused_requests: NotRequired[list[PausedRequest]]


class StoppedRequest(TypedDict):
    ok: bool
    stopped: bool
    active_request: ListedRequest | None


class PausedNow(TypedDict):
    ok: bool
    paused: bool
    active_request: ListedRequest | None
    request_id: NotRequired[str]


class BatchStats(TypedDict):
    total_requests: int
    total_batches: int
    avg_batch_size: float


class DynamicBatching(TypedDict):
    enabled: bool
    stats: BatchStats
    pending_requests: int


class ModelStats(TypedDict):
    model: str
    device: str
    rows: int
    running: int
    waiting: int
    prompt_tokens: int
    generation_tokens: int
    sessions: dict[str, int]  # by tier


class ServerStats(TypedDict):
    status: Literal["running"]
    version: str
    model: str
    num_gpus: int
    batch_mode: str
    dynamic_batching: DynamicBatching
    device_idle_ratio: float
    models: list[ModelStats]


class ServerIndex(TypedDict):
    """What the server is, and which routes it has."""

    name: str
    version: str
    status: str
    models: NotRequired[list[str]]
    endpoints: dict[str, list[str]]


class Live(TypedDict):
    status: Literal["live"]


class Ready(TypedDict):
    status: str  # "ready", else "loading", "stalled" or "draining"
    reason: NotRequired[str]
    engines: NotRequired[dict[str, Literal["ready", "stalled", "down"]]]  # by name, of several
    down: NotRequired[dict[str, int]]  # how many front ends, and processes of batches, if any are
