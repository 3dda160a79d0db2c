"""Which start state a request asks for, and what that changes.

A request names it as `state_id`, in the header X-RWKV-State-Id, or behind the model's name in `model`
("rwkv7-g1-1.5b pirate"). By its id it takes the place of a session's state; behind the model's name it is
that in which a new session begins.
"""

import json
import math
import uuid
from dataclasses import dataclass

from msgspec.structs import replace

from routes.http.errors import ApiError, Json
from routes.http.exchange import HttpRequest
from routes.http.frontend import Frontend
from routes.http.model_field import Named
from rwkv_batch.wire.commands import ListStartStates
from rwkv_batch.wire.protocol import LEAST_SUM, GenerateRequest, MixturePart, StartStateInfo

HEADER = "x-rwkv-state-id"
MEMBER = "\x1f"  # in the names of a mixture's states, behind that of the mixture; clients cannot send it
WEIGHTS = "mrss_gatingweight"  # of the states of a mixture
# What may belong to a start state: of the sampling, and of how chats are rendered.
DEFAULTS, TEMPLATE = ("temperature", "top_p"), ("think_type", "chat_template_kwargs")
# By which a request chooses how a chat is rendered.
THOUGHT = (*TEMPLATE, "enable_think", "think", "thinking", "reasoning_effort", "reasoning")
THOUGHT_KWARGS = {"rwkv_generation_prompt", "enable_thinking"}  # of chat_template_kwargs


@dataclass(frozen=True)
class ChosenState:
    """The start state of a request. `restarts`: also where the request continues a session."""

    info: StartStateInfo
    restarts: bool
    mixture: list[MixturePart]  # of a view with several states

    def with_defaults(self, fields: Json, is_chat: bool) -> Json:
        """The body with what belongs to the state: its sampling, where the body has none of its own.

        Chats are rendered as the state says, unless the body says how; without a thought if neither does, as
        states are tuned.
        """
        own, sent = describe(self.info), {name: value for name, value in fields.items() if value is not None}
        defaults = {name: own[name] for name in DEFAULTS if own.get(name) is not None and name not in sent}
        if not is_chat or any(name in sent for name in THOUGHT):
            return fields | defaults
        template = {name: own[name] for name in TEMPLATE if name in own}
        thinks = not THOUGHT_KWARGS.isdisjoint(template.get("chat_template_kwargs", {}))
        return fields | defaults | ({} if thinks else {"think_type": "none"}) | template

    def begin(self, request: GenerateRequest) -> GenerateRequest:
        """The request, which begins in the state."""
        if self.mixture:
            request = replace(request, mixture=self.mixture)
        else:
            request = replace(request, start_state=self.info.name)
        if self.restarts and request.turn:
            request = replace(request, turn=replace(request.turn, source=None, required=False))
        return request


async def choose_state(front: Frontend, http: HttpRequest, fields: Json, named: Named) -> ChosenState | None:
    """None: the request names none. Raises ApiError, 404 for one that is not there."""
    by_id, by_model = _state_id(http, fields), named.state
    if by_id and by_model and by_id != by_model:
        raise ApiError(400, f"`state_id` is {by_id}, but `model` names the state {by_model}; send one.")
    name = by_id or by_model
    if not name:
        if fields.get(WEIGHTS) is not None:
            raise ApiError(400, f"`{WEIGHTS}`: the request names no mixture of states.", param=WEIGHTS)
        return None
    command = ListStartStates(uuid.uuid4().hex, name, to_model=named.model.model)
    found = (await front.ask(command)).start_states
    if not found:
        raise ApiError(404, f"There is no start state {name[:200]}; /v1/state/list lists them.", "state_id")
    return ChosenState(found[0], bool(by_id), _mixture(found[0], fields.get(WEIGHTS)))


def is_member(name: str) -> bool:
    """Whether it is a state of a mixture, which is not listed; the mixture has the name of its first one."""
    return MEMBER in name


def describe(info: StartStateInfo) -> Json:
    """What the routes have noted of a start state."""
    own: Json = json.loads(info.description or b"{}")
    return own


def weights_of(given: object, count: int, field: str) -> list[float]:
    """One weight for each state; missing ones are 0. Numbers may be texts. Raises ApiError 400."""
    try:
        if not isinstance(given, list):
            raise ValueError
        weights = [float(each) for each in given if not isinstance(each, bool)]
        if len(weights) < len(given) or not all(map(math.isfinite, weights)):
            raise ValueError
    except (ValueError, TypeError):
        message = f"`{field}`: must be a list of numbers, one for each state."
        raise ApiError(400, message, param=field) from None
    weights = (weights + [0.0] * count)[:count]
    if not abs(sum(weights)) > LEAST_SUM * sum(map(abs, weights)):
        raise ApiError(400, f"`{field}`: the weights must not sum to 0.", param=field)
    return weights


def _mixture(info: StartStateInfo, given: object) -> list[MixturePart]:
    members = describe(info).get("members")
    if members is None:
        if given is not None:
            raise ApiError(400, f"`{WEIGHTS}`: {info.name} is one state and no mixture.", param=WEIGHTS)
        return []
    weights = describe(info)["weights"] if given is None else weights_of(given, len(members), WEIGHTS)
    return [MixturePart(name, weight) for name, weight in zip(members, weights, strict=True)]


def _state_id(http: HttpRequest, fields: Json) -> str:
    given, header = fields.get("state_id"), http.headers.get(HEADER) or ""
    if given is not None and not isinstance(given, str):
        raise ApiError(400, "`state_id`: must be a string.", param="state_id")
    if given and header and given != header:
        raise ApiError(400, f"`state_id` is {given[:200]}, but {HEADER} says otherwise; send one of them.")
    return given or header
