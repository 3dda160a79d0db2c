"""The messages between front ends and the engine, msgpack over ZeroMQ.

The engine listens on a ROUTER socket, each front end connects a DEALER whose identity is its name. A front
end sends `ToEngine` messages one by one; the engine sends at most two messages a step to each, lists of
`Event`. The front end chooses the ids of its requests; the engine keys them by (front end, id).
"""

from typing import Literal

from msgspec import Struct, field

from rwkv_batch.wire.metrics import Series
from rwkv_batch.wire.supervision import EngineInfo


class Sampling(Struct, frozen=True, omit_defaults=True):
    """How the next token is drawn. All fields apply to every row of a request."""

    temperature: float = 1.0  # <= 0: greedy
    top_k: int = 0  # <= 0: off
    top_p: float = 1.0  # 0: greedy; outside [0, 1]: off
    alpha_presence: float = 0.0  # native penalties: the first time a token is drawn adds this,
    alpha_frequency: float = 0.0  # each later time adds this,
    alpha_decay: float = 1.0  # and everything decays by this factor at each token
    presence_penalty: float = 0.0  # OpenAI penalties, which do not decay
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None  # None: the engine picks one
    method: Literal["rapid", "nucleus", "gumbel", "noise"] = "rapid"  # see sampling/sampler.py
    noise: float = 0.0  # "noise" only: how far below the likeliest a token may be and still win
    min_p: float = 0.0  # tokens stay that have this share of the likeliest one's probability; 0: off
    top_a: float = 0.0  # tokens stay that have this share of its square; 0: off
    repetition_penalty: float = 1.0  # divides the logits of tokens of the prompt and the answer; 1: off


REQUEST_BYTES = 16  # of SessionTurn.request; REQUEST_ID of rwkv_batch/state/entries.py


class SessionTurn(Struct, frozen=True, omit_defaults=True):
    """How a request continues a stored state and stores its final state. It has one prompt and n = 1.

    The stored state has seen the prompt and exactly the tokens of the text that was sent. A turn that fails
    or is cancelled stores nothing. Turns with the same target run one by one, in the order of arrival.
    """

    source: str | None = None  # the key of the state to start from; None: the zero state
    target: str | None = None  # the key to store the state under; may be the source; None: nothing is stored
    branch: str | None = None  # in place of a target: stored as "{branch}:{n}", n the next unused number
    required: bool = False  # without a source, True: reject ("not_found"); False: start from the zero state
    # Goes in front of a prompt that continues a stored state and does not begin with it. Paused requests are
    # stored with the name "seam".
    separator: str = field(default="", name="seam")
    # Of a paused turn: what its source had seen. The turn is rejected ("conflict") if that is something else.
    source_digest: bytes = b""
    # By which the turn is found when it is sent again (rwkv_batch/engine/rows/repeats.py); empty: it is not.
    request: bytes = b""


class LateStops(Struct, frozen=True, omit_defaults=True):
    """Stop strings that count in the answer only, not in a thought in front of it."""

    strings: list[str]
    opens: str  # what a thought begins with,
    closes: str  # and ends with; line feeds behind that are not of the answer
    inside: bool = False  # the prompt has begun the thought
    rest: str = ""  # what the prompt's last tag lacks; a text may begin with it


class AnswerHead(Struct, frozen=True, omit_defaults=True):
    """What may come before the part of an answer that a grammar binds."""

    rest: str = ""  # what the prompt's last tag lacks; the text begins with it
    closes: str = ""  # a thought comes, which ends with this; "": none
    space: bool = False  # one space may come


class Grammar(Struct, frozen=True, omit_defaults=True):
    """What the text of each row must be. Where it is complete, id 0 may be drawn, which ends the row."""

    # "choice": a JSON list of strings; "grammar": Lark as llguidance has it, or GBNF; the last two: see
    # routes.chat.grammars.of_calls
    kind: Literal["json_schema", "regex", "choice", "grammar", "calls", "tagged_calls"]
    source: str
    head: AnswerHead = AnswerHead()
    field: str = ""  # of the request, where it stands


class WireMessage(Struct, frozen=True):
    """What all messages between front ends and the engine have."""

    id: str  # of the request or command


class ModelMessage(WireMessage, frozen=True, kw_only=True):
    """A request or command for one of the models."""

    to_model: str = ""  # its name; "": the default one


OWNER = "\x1e"  # around the name of the key in front of what belongs to it; clients cannot send it


def owned(owner: str, name: str) -> str:
    """The name of a session, document or request of that owner, as the engine knows it; "": of none."""
    return f"{OWNER}{owner}{OWNER}{name}" if owner else name


def owner_and_name(stored: str) -> tuple[str, str]:
    """From what the engine knows to the owner, empty if there is none, and the name that it has there."""
    owner, mark, name = stored.removeprefix(OWNER).partition(OWNER)
    return (owner, name) if mark and stored.startswith(OWNER) else ("", stored)


LEAST_SUM = 1e-6  # of the weights of a mixture, beside the sum of their sizes


class MixturePart(Struct, frozen=True, array_like=True):
    """A state of a mixture."""

    start_state: str  # its name; "": that before any token
    weight: float


class PausedRow(Struct, frozen=True, array_like=True):
    """A row of a request that was paused."""

    number: int  # of the row in the request that was paused
    drawn: list[int]  # before that; the text of it has been sent


class GenerateRequest(ModelMessage, frozen=True, omit_defaults=True, tag="generate"):
    """Continue every prompt `n` times. Row i belongs to prompt i // n."""

    prompts: list[str | list[int]]
    max_tokens: int  # per row
    sampling: Sampling = Sampling()
    n: int = 1
    prediction: str = ""  # a text that is expected to come back, which only makes the answer faster
    stop_ids: list[int] = []
    stop_strings: list[str] = []
    late_stops: LateStops | None = None
    grammar: Grammar | None = None
    flush_tokens: int = 0  # send text after this many tokens of a row; 0: only when the row has finished
    top_logprobs: int | None = None  # None: no logprobs; n: those of the drawn token and of the n likeliest
    # The same for each token of the prompt but the first. Such rows run with max_tokens 0 too.
    prompt_logprobs: int | None = None
    scored_from: int = 0  # tokens of the prompt before this one need no logprobs
    return_ids: bool = False  # say the ids of prompts (Accepted) and of what was drawn (RowDelta)
    return_bytes: bool = False  # say the bytes of the prompts' tokens (Accepted)
    prefix_cache: bool = True  # cached states of prefixes may be used, and this prompt's may be cached
    turn: SessionTurn | None = None
    prefix_ids: list[int] = []  # token ids in front of every prompt, but not of a turn that continues a state
    # The name of the state in which every row begins, and a turn whose source is not there; "": that before
    # any token.
    start_state: str = ""
    # In place of one start state: every row runs in each of these, and draws from the mixture of their
    # distributions (sampling/mixtures.py).
    mixture: list[MixturePart] = []
    adapter: str = ""  # the name of the adapter that all rows run with; "": none
    adapter_digest: str = ""  # what its digest must be; "": anything
    adapter_scale: float = 1.0  # by which what it changes is multiplied
    start_digest: bytes = b""  # of a request that goes on: of the start states in which it began
    name: str = ""  # what clients call it; others may have the same
    rows: list[PausedRow] = []  # of a request that goes on: one for each prompt, and n is 1
    model: str = ""  # of a request that goes on: the fingerprint of the model that began it
    pausable: bool = True  # False: nothing could continue the reply that the front end makes
    traced: bool = False  # the engine says when its rows came how far (RowTimes)
    batch: bool = False  # its rows run in slots that others leave, and give them back
    deadline: float = 0.0  # seconds since 1970; the earliest goes first among those of its kind; 0: none
    # Of a request whose rows are spread over several engines: the numbers that these rows have in it.
    row_numbers: list[int] = []


class Cancel(WireMessage, frozen=True, omit_defaults=True, tag="cancel"):
    """The reader of this request has left; its rows are dropped before the next step."""

    # Whether somebody counts what comes until a last event. A turn that is being stored has its own; anything
    # else has Failed.
    closes: bool = False


class WatchLoad(WireMessage, frozen=True, tag="watch_load"):
    """The front end wants `EngineLoad` from now on; its id is that of these events."""


class TokenLogprob(Struct, frozen=True, array_like=True, gc=False):
    """One token under the model's own distribution, before penalties, temperature and filters."""

    token: bytes
    logprob: float
    top: list[tuple[bytes, float]]  # likeliest first


class RowDelta(Struct, frozen=True, array_like=True, gc=False):
    """New text of a row since its last delta."""

    row: int
    text: str
    tokens: int  # tokens drawn since the last delta; a stop id does not count
    finish_reason: str | None = None  # "stop", "length", "paused" or "error" in the row's last delta
    logprobs: list[TokenLogprob] = []
    stop: str = ""  # in the last delta: the stop string that has ended the text
    ids: list[int] = []  # of these tokens, and the stop id last, if the request has `return_ids`
    prompt: list[TokenLogprob] = []  # of the prompt, in the row's first delta
    error: str = ""  # with "error": why the row cannot go on, one sentence; other rows of its request do
    accepted: int = 0  # of these tokens, those that a draft had
    rejected: int = 0  # tokens of drafts that are not among these


class Accepted(WireMessage, frozen=True, tag="accepted"):
    """The request is in the queue."""

    prompt_tokens: list[int]  # per prompt
    cached_tokens: list[int] = []  # per prompt: how many of them need not be computed, as far as is known now
    target: str = ""  # of a turn: the key its state will be stored under
    fingerprint: str = ""  # of the weights that will make the text
    prompt_ids: list[list[int]] = []  # per prompt, if the request has `return_ids`
    prompt_bytes: list[list[bytes]] = []  # per prompt, of each token, if it has `return_bytes`


class Rejected(WireMessage, frozen=True, tag="rejected"):
    """The request or command was not accepted."""

    # "overloaded" and "unavailable" (try again later), "invalid", "not_found", "exists", "conflict"
    reason: str
    message: str
    field: str = ""  # of the request, which is wrong; "": it says none


class Progress(WireMessage, frozen=True, omit_defaults=True, tag="progress", gc=False):
    """New text of rows of a request, which is finished when each of its rows has had a finish reason."""

    rows: list[RowDelta]
    repeated: bool = False  # a turn that was stored before: this is all of it, and nothing was computed


class Failed(WireMessage, frozen=True, tag="failed"):
    """The engine gave up on this request or command; no more events follow."""

    message: str
    gone: bool = False  # it has died, and others serve


class EngineLoad(WireMessage, frozen=True, tag="load"):
    """What the engine has to do for all front ends."""

    rows: int  # that wait or run
    tokens: int  # of their prompts that are not read yet


class SessionInfo(Struct, frozen=True):
    """One stored state."""

    key: str
    tier: Literal["L1", "L2", "L3"]  # device, host memory, database: the fastest place that has it
    updated: float  # seconds since 1970
    tokens: int  # that the state has seen


class TurnInfo(Struct, frozen=True, array_like=True):
    """One turn of a session. Positions count tokens."""

    number: int  # from 1
    start: int
    end: int
    prompt: str
    completion: str
    prompt_tokens: list[int]
    completion_tokens: list[int]
    created: float  # seconds since 1970


class RequestInfo(Struct, frozen=True, array_like=True):
    """A request that waits or runs."""

    name: str
    rows: int  # whose text has not ended
    drawn: int  # tokens, by these rows together
    max_tokens: int  # of each


class StartStateInfo(Struct, frozen=True, array_like=True):
    """A start state."""

    name: str
    description: bytes  # as it was given
    created: float  # seconds since 1970
    layers: int
    heads: int
    digest: bytes  # 16 bytes that follow from its numbers


class AdapterInfo(Struct, frozen=True, array_like=True):
    """An adapter that requests may name."""

    name: str
    digest: str  # 32 hexadecimal digits that follow from its numbers and its scaling
    rank: int  # the largest of its matrices
    created: float  # seconds since 1970
    path: str


class CommandReply(WireMessage, frozen=True, omit_defaults=True, tag="command_reply"):
    """A command has been carried out."""

    # DeleteSession, RemoveDocument, DescribeStartState, RemoveStartStates, RemoveAdapter,
    # StopRequest: how many there were
    found: int = 0
    data: bytes = b""  # ExportSession, GetDocument
    keys: list[str] = []  # ListDocuments
    sessions: list[SessionInfo] = []  # ListSessions
    total: int = 0  # ListSessions: how many sessions there are,
    l1: int = 0  # those of them in L1,
    l2: int = 0  # and those in L2
    position: int = 0  # SessionHistory, RewindSession: tokens that the session has seen
    turns: list[TurnInfo] = []  # SessionHistory
    requests: list[RequestInfo] = []  # ListRequests, and the one that StopRequest or PauseRequest has found
    paused: list[str] = []  # ListRequests: names of paused requests
    adapters: list[AdapterInfo] = []  # ListAdapters, and the one that LoadAdapter has loaded
    start_states: list[StartStateInfo] = []  # ListStartStates, and the one that PutStartState has stored
    # ListModels, LoadModel, RemoveModel: all that are served, the default one first
    models: list[EngineInfo] = []
    note: str = ""  # LoadModel: what clients may have noticed
    metrics: list[Series] = []  # GetMetrics
    token_ids: list[list[int]] = []  # Tokenize: of each text
    token_bytes: list[bytes] = []  # Tokenize: of all these tokens. Detokenize: of all tokens
    updated: float = 0.0  # SessionHistory: when the session was changed last, in seconds since 1970


class RowTimes(WireMessage, frozen=True, tag="row_times"):
    """When a row of a traced request came how far, before its last delta; None: it did not.

    Seconds of the clock that all processes of a host share (time.monotonic).
    """

    row: int
    reason: str  # why it has ended
    arrived: float
    admitted: float | None = None  # to its slot
    first_token: float | None = None
    text_ended: float | None = None
    answered: float | None = None  # its text is on its way; of a turn behind its commit
    committed: bool = False  # it is a turn of a session, which is stored


Event = Accepted | Rejected | Progress | Failed | CommandReply | EngineLoad | RowTimes
RequestKey = tuple[bytes, str]  # (front end, request id): what the engine knows a request or command by
