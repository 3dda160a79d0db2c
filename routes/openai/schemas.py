"""The bodies of the OpenAI requests: fields, defaults, ranges, and the sentence that names what is wrong.

A top-level null means "not given", as in OpenAI's own API. Fields without effect (`user`, `metadata`,
`service_tier`, `parallel_tool_calls`, `model`) are either hints or labels; unknown fields are ignored.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, ValidationError

from routes.http.errors import ApiError
from routes.native.schemas import MAX_ID, own_id, plain_id

LAST_ID = 65535  # rows of the head
LAST_TEXT_ID = 65529  # ids above have no text and cannot stand in a prompt
MAX_ROWS = 4096  # prompts times n of one request
MAX_STOPS = 16
MAX_STOP_TOKENS = 64
MAX_NEW_TOKENS = 2**31 - 1


def _number(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("input should be a number, not a boolean")
    return value


def _stop(value: object) -> object:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(s, str) and s for s in stops):
        raise ValueError("input should be a string that is not empty, or a list of such strings")
    if len(stops) > MAX_STOPS:
        raise ValueError(f"input should hold at most {MAX_STOPS} strings")
    return stops


def _stop_tokens(value: object) -> object:
    if not isinstance(value, list) or not all(
        _is_id(v, LAST_ID) or (isinstance(v, str) and v) for v in value
    ):
        raise ValueError(
            f"input should be a list of token ids (0 to {LAST_ID}) and strings that are not empty"
        )
    if len(value) > MAX_STOP_TOKENS:
        raise ValueError(f"input should hold at most {MAX_STOP_TOKENS} entries")
    return value


def _logit_bias(value: object) -> object:
    if not isinstance(value, dict):
        raise ValueError("input should be an object from token ids to numbers")
    bias = {}
    for key, amount in value.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 5 and int(key) <= LAST_ID):
            raise ValueError(f"keys should be token ids, 0 to {LAST_ID}")
        if isinstance(amount, bool) or not isinstance(amount, int | float) or not -100 <= amount <= 100:
            raise ValueError("values should be numbers from -100 to 100")
        bias[int(key)] = float(amount)
    return bias


def _prompts(value: object) -> object:
    """A string, a list of strings, a list of ids or a list of lists of ids, as a list of prompts. Null is the
    empty string.
    """
    if value is None or isinstance(value, str):
        return [value or ""]
    if isinstance(value, list) and value:
        if all(isinstance(p, str) for p in value):
            return value
        if all(_is_id(v, LAST_TEXT_ID) for v in value):
            return [value]
        if all(isinstance(p, list) and p and all(_is_id(v, LAST_TEXT_ID) for v in p) for p in value):
            return value
    raise ValueError(
        "input should be a string, a list of strings, a list of token ids, or a list of lists of token ids "
        f"(each 0 to {LAST_TEXT_ID}), and no list may be empty"
    )


def _is_id(value: object, last: int) -> bool:
    return type(value) is int and 0 <= value <= last


def _tool_compat(value: object) -> object:
    """Taken as a boolean or as its name, nothing else."""
    flag = {"true": True, "false": False}.get(value, value) if isinstance(value, str) else value
    if not isinstance(flag, bool):
        raise ValueError("rwkv_tool_compat_mode must be one of: true, false")
    return flag


Int = Annotated[int, BeforeValidator(_number)]
Number = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]
Penalty = Annotated[Number, Field(ge=-2, le=2)]
Alpha = Annotated[Number, Field(ge=-100, le=100)]
NewTokens = Annotated[Int, Field(ge=0, le=MAX_NEW_TOKENS)]
Prompts = list[str | list[int]]


class StreamOptions(BaseModel):
    include_usage: bool | None = None


class OpenAIBody(BaseModel):
    """What both routes take. The alphas are RWKV's own penalties; None there means the route's default."""

    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: NewTokens | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[Number, Field(ge=0, le=1)]
    top_k: Annotated[Int, Field(ge=-1, le=2**31 - 1)]
    alpha_presence: Alpha | None = None
    alpha_frequency: Alpha | None = None
    alpha_decay: Annotated[Number, Field(ge=0, le=1)] = 0.996
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[int, float], BeforeValidator(_logit_bias)] = {}
    seed: Annotated[Int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    n: Annotated[Int, Field(ge=1, le=128)] = 1
    stop: Annotated[list[str], BeforeValidator(_stop)] = []
    stop_tokens: Annotated[list[int | str], BeforeValidator(_stop_tokens)] | None = None
    ignore_eos: bool = False
    chunk_size: Annotated[Int, Field(le=MAX_NEW_TOKENS)] = 1
    use_prefix_cache: bool = (
        True  # whether states of earlier prompts' beginnings may be used; results are the same either way
    )


class ChatBody(OpenAIBody):
    """POST /v1/chat/completions. `messages`, `tools` and `tool_choice` are checked where they are read."""

    top_p: Annotated[Number, Field(ge=0, le=1)] = 0.6
    top_k: Annotated[Int, Field(ge=-1, le=2**31 - 1)] = 20
    max_completion_tokens: NewTokens | None = None
    messages: list[Any] = []
    contents: list[str] = []
    system: str = ""
    # "": the whole conversation is here
    session_id: Annotated[str, Field(max_length=MAX_ID), AfterValidator(plain_id), AfterValidator(own_id)] = (
        ""
    )
    logprobs: bool = False
    top_logprobs: Annotated[Int, Field(ge=0, le=20)] | None = None
    tools: Any = None
    tool_choice: Any = None
    rwkv_tool_compat_mode: Annotated[bool, BeforeValidator(_tool_compat)] = True
    enable_tool_calls: bool = False
    tool_call_parser: Literal["auto", "tag"] = "auto"
    parallel_tool_calls: bool = True  # at most one call is made in any case
    enable_think: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None


class CompletionBody(OpenAIBody):
    """POST /v1/completions."""

    prompt: Annotated[Prompts, BeforeValidator(_prompts)]
    top_p: Annotated[Number, Field(ge=0, le=1)] = 1.0
    top_k: Annotated[Int, Field(ge=-1, le=2**31 - 1)] = 0
    suffix: str = ""
    echo: bool = False
    best_of: Int | None = None
    logprobs: Annotated[Int, Field(ge=0, le=5)] | None = None


Body = TypeVar("Body", bound=OpenAIBody)


def parse(schema: type[Body], body: dict) -> Body:
    """The checked body. Raises ApiError 400 whose sentence and `param` name the first field that is wrong."""
    given = {key: value for key, value in body.items() if value is not None or key == "prompt"}
    try:
        parsed = schema.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        raise bad(path(first["loc"]), _sentence(first["type"], first["msg"])) from None
    if parsed.stream_options and not parsed.stream:
        raise bad("stream_options", "this is only allowed when stream is true")
    return parsed


def refuse(body: dict, fields: dict[str, str]) -> None:
    """Raises ApiError 400 if `body` holds one of `fields` (name: why it is refused), unless it is null, false
    or empty.
    """
    for name, why in fields.items():
        if body.get(name) not in (None, "", [], {}, False):
            raise bad(name, why)


def bad(where: str, why: str) -> ApiError:
    """The error for a field: `where` is its path, `why` what is wrong and what would be right."""
    return ApiError(400, f"{where}: {why}.", param=where)


def path(loc: Sequence[int | str]) -> str:
    """`("messages", 0, "role")` as `messages[0].role`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc)
    return text.removeprefix(".")


def _sentence(kind: str, message: str) -> str:
    if kind == "missing":
        return "this field is required"
    message = message.removeprefix("Value error, ")
    return message[0].lower() + message[1:]
