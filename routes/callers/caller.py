"""Who has sent a request, and what the server has done for it. One `Caller` serves one HTTP request."""

import hashlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from routes.callers.trace import RequestTrace
from routes.errors import ApiError
from rwkv_batch.audit.lines import ids_text, text_hash
from rwkv_batch.keys.ledger import Standing, Standings
from rwkv_batch.keys.records import Key
from rwkv_batch.wire.protocol import GenerateRequest, RowDelta, owned

# Names under which is counted what no key has asked for; no key can be called so.
PASSWORD, ANYONE = "(password)", "(anyone)"


log = logging.getLogger(__name__)


class Role(Enum):
    """What a caller may see."""

    UNKNOWN = "unknown"  # it has not been asked who it is, so nothing
    ANYONE = "anyone"  # what needs no key
    KEY = "key"  # what belongs to its key
    OPERATOR = "operator"  # everything


@dataclass
class RowPlaces:
    """Rows of one request among those that its key may have at once. They are kept until none of it runs."""

    held: int = 0
    running: int = 0


class Caller:
    """Of one request. `hashes`: whether texts are hashed for the audit log."""

    def __init__(self, hashes: bool = False) -> None:
        self.role = Role.UNKNOWN
        self.key: Key | None = None
        self.limited = False  # whether the key has limits
        self.owner = ""  # the key in whose name it asks; "": what belongs to no key
        self.owner_asked = False  # whether the operator has named that one
        self.trace: RequestTrace | None = None  # with --traces
        self.vouched = False  # it is known who it is, as of rows of a batch: nothing more is asked
        self.headers: dict[str, str] = {}  # of the reply: what the key has left of its limits
        self.places = RowPlaces()  # with limits
        self.served = EngineWork() if not hashes else HashedWork()

    @property
    def name(self) -> str:
        """Under which its usage is counted."""
        if self.key:
            return self.key.name
        return PASSWORD if self.role is Role.OPERATOR else ANYONE

    def is_key(self, key: Key) -> None:
        """It has sent this key."""
        self.key, self.owner, self.limited = key, key.name, key.limited
        self.role = Role.OPERATOR if key.admin else Role.KEY

    def is_anyone(self) -> None:
        """It needs no key for what it asks."""
        self.role, self.key = Role.ANYONE, None

    def is_operator(self) -> None:
        """It has sent the password, or everything is open."""
        self.role = Role.OPERATOR

    def may_use_model(self, name: str) -> bool:
        return self.key is None or self.key.may_use_model(name)

    def may_use_adapter(self, name: str) -> bool:
        return self.key is None or self.key.may_use_adapter(name)

    def plain(self, text: str) -> str:
        """A text of the engine without the mark of the owner, in whose name it was asked."""
        return text.replace(owned(self.owner, ""), "") if self.owner else text

    def demand_operator(self) -> None:
        """Raises ApiError 403 for a key that is not an admin's."""
        if self.role is not Role.OPERATOR:
            raise not_allowed("change what all use")

    def stands(self, standings: Standings) -> None:
        """Say what is left, as OpenAI does."""
        for name, standing in (("requests", standings.requests), ("tokens", standings.tokens)):
            if standing:
                self.headers |= _headers(name, standing)


def not_allowed(what: str) -> ApiError:
    """The 403 for what the key may not do."""
    return ApiError(
        403, f"This key may not {what}; whoever runs the server can allow it.", code="permission_denied"
    )


def _headers(name: str, standing: Standing) -> dict[str, str]:
    return {
        f"x-ratelimit-limit-{name}": str(standing.limit),
        f"x-ratelimit-remaining-{name}": str(standing.remaining),
        f"x-ratelimit-reset-{name}": f"{standing.reset:.3f}s",
    }


# Of all requests, held for an instant. The garbage collector may cancel a job in the thread that has it.
_COUNTING = threading.RLock()


class EngineWork:
    """What the engine has done for a request, whose jobs may be several."""

    def __init__(self) -> None:
        self.model = ""  # empty: the engine has not got it
        self.requests = self.rows = 0
        self.prompt_tokens = self.cached_tokens = self.completion_tokens = 0
        self.first: float | None = None  # when the first text came, by time.monotonic()
        self.leaving = 0  # jobs that are cancelled and have not had their last event
        self._when_over: Callable[[], object] = lambda: None

    def job_leaves(self) -> None:
        """A job is cancelled, and what the engine has done for it is not known yet."""
        with _COUNTING:
            self.leaving += 1

    def job_left(self) -> None:
        """Now it is."""
        with _COUNTING:
            self.leaving -= 1
            call = self._when_over if not self.leaving else None
        if call:
            try:
                call()
            except Exception as error:  # the thread serves all others
                log.error("a request could not be noted: %s", type(error).__name__)

    def when_known(self, call: Callable[[], object]) -> None:
        """Have `call` called once all is known: at once, or by the thread that takes the last event."""
        with _COUNTING:
            if self.leaving:
                self._when_over = call
                return
        call()

    def submitted(self, request: GenerateRequest) -> int:
        """One more job of the request; returns its number, from 1."""
        self.model = request.to_model
        self.requests += 1
        self.rows += len(request.prompts) * request.n
        return self.requests

    def drew(self, job: int, deltas: list[RowDelta]) -> int:
        """The tokens of these deltas of a job, which go into the reply."""
        if self.first is None:
            self.first = time.monotonic()
        tokens = sum([delta.tokens for delta in deltas])
        self.completion_tokens += tokens
        return tokens

    def hashes(self) -> dict[str, str]:
        """Of its prompts and answers."""
        return {}


class HashedWork(EngineWork):
    """What one request has had done, with hashes of its prompts and answers."""

    def __init__(self) -> None:
        super().__init__()
        self._prompts: list[str] = []
        self._answers: dict[tuple[int, int], hashlib._Hash] = {}  # by job and row

    def submitted(self, request: GenerateRequest) -> int:
        self._prompts += [each if isinstance(each, str) else ids_text(each) for each in request.prompts]
        return super().submitted(request)

    def drew(self, job: int, deltas: list[RowDelta]) -> int:
        for delta in deltas:
            place = job, delta.row
            if (answer := self._answers.get(place)) is None:
                answer = self._answers[place] = hashlib.sha256()
            answer.update(delta.text.encode(errors="surrogatepass"))
        return super().drew(job, deltas)

    def hashes(self) -> dict[str, str]:
        digests = [answer.hexdigest() for _, answer in sorted(self._answers.items())]
        answer = digests[0] if len(digests) == 1 else text_hash(["".join(digests)])
        return {"prompt_sha256": text_hash(self._prompts), "answer_sha256": answer}
