"""The bodies of the OpenAI requests: fields, defaults, ranges, and the engine request that they make.

A top-level null means "not given", as in OpenAI's own API. Fields without effect (`user`, `metadata`,
`model`) are either hints or labels; unknown fields are ignored, but those of unavailable.py.
"""

from functools import cache
from typing import Annotated, Any, ClassVar, Literal, Self

from msgspec.structs import replace
from pydantic import BaseModel, BeforeValidator, Field, GetJsonSchemaHandler, WithJsonSchema
from pydantic_core import CoreSchema

from routes.chat.fields import ChatStyleFields, Effort
from routes.chat.grammars import GrammarFields, answer_head, leaves_text_free
from routes.chat.profiles import ALPHAS, PROFILES
from routes.chat.shapes import ChatMessages, OfferedTool, ToolChoiceShape, shaped_as
from routes.http import schemas
from routes.http.errors import Json, openai_field
from routes.http.ids import new_id
from routes.http.priority import PriorityFields
from routes.http.schemas import (
    INT_LIMIT,
    LAST_ID,
    MAX_SESSION_ID,
    OWN_ID,
    Int,
    Number,
)
from routes.openai.samplers import UnavailableSamplers
from routes.openai.unavailable import FORM, NAMES_OF_FORM, UNAVAILABLE, is_refused, other_name
from rwkv_batch.chat.checkpoints import END_OF_TEXT
from rwkv_batch.chat.templates import Style
from rwkv_batch.config import SamplingProfileName
from rwkv_batch.wire.protocol import GenerateRequest, Grammar, Sampling, SessionTurn

LAST_TEXT_ID = 65529  # ids above have no text: they stand in no prompt and are never drawn
MAX_STOPS = 16
MAX_STOP_TOKENS = 64
CHAT_ALPHAS = dict(zip(ALPHAS, (1.0, 0.1), strict=True))
USUAL_ALPHAS = tuple(CHAT_ALPHAS.values())
SessionId = Annotated[str, Field(max_length=MAX_SESSION_ID), *OWN_ID]
# What other clients' protocols have no place for in a reply.
CHAT_ONLY = {
    "session_id": "sessions are not available on this route; use /v1/chat/completions",
    "return_token_ids": "token ids are available on /v1/chat/completions",
}
# By which a chat is rendered.
NO_CHAT = dict.fromkeys(
    ("think_type", "chat_template_kwargs", "enable_think", "think", "thinking", "reasoning_effort"),
    "this text is no chat; leave it out",
)


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
    for key, amount in ((str(key), amount) for key, amount in value.items()):
        if not (key.isascii() and key.isdigit() and len(key) <= 5 and int(key) <= LAST_TEXT_ID):
            raise ValueError(f"keys should be token ids, 0 to {LAST_TEXT_ID}")
        if isinstance(amount, bool) or not isinstance(amount, int | float) or not -100 <= amount <= 100:
            raise ValueError("values should be numbers from -100 to 100")
        bias[int(key)] = float(amount)
    return bias


def _prompts(value: object) -> object:
    """A string, strings, ids or lists of ids, as a list of prompts. Null is the empty string."""
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


Stop = Annotated[str, Field(min_length=1)]
StopList = Annotated[
    list[str],
    BeforeValidator(_stop, json_schema_input_type=Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)]),
]
Id = Annotated[int, Field(ge=0, le=LAST_ID)]
StopTokens = Annotated[
    list[int | str],
    BeforeValidator(
        _stop_tokens,
        json_schema_input_type=Annotated[list[Id | Stop], Field(max_length=MAX_STOP_TOKENS)],
    ),
]
ID_PATTERN = "^([0-9]{1,4}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9])$"
LogitBias = Annotated[
    dict[int, float],
    BeforeValidator(_logit_bias),
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {"pattern": ID_PATTERN},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        }
    ),
]
TextIds = Annotated[list[Annotated[int, Field(ge=0, le=LAST_TEXT_ID)]], Field(min_length=1)]
Prompt = (
    str
    | Annotated[list[str], Field(min_length=1)]
    | TextIds
    | Annotated[list[TextIds], Field(min_length=1)]
    | None
)
Penalty = Annotated[Number, Field(ge=-2, le=2)]
Alpha = Annotated[Number, Field(ge=-100, le=100)]
NewTokens = Annotated[Int, Field(ge=0, le=INT_LIMIT)]
TopP = Annotated[Number, Field(ge=0, le=1)]
Share = Annotated[Number, Field(ge=0, le=1)]
TopK = Annotated[Int, Field(ge=-1, le=INT_LIMIT)]


class StreamOptions(BaseModel):
    include_usage: bool | None = None


class OpenAIBody(PriorityFields, UnavailableSamplers, GrammarFields):
    """What all OpenAI routes that generate have in common.

    The alphas are RWKV's own penalties; None there means the route's default.
    """

    field_error = staticmethod(openai_field)
    refused: ClassVar[dict[str, str]] = {}  # field that is not available -> why

    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: NewTokens | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] = 1.0
    top_p: TopP = 0.6
    top_k: TopK = 20
    alpha_presence: Alpha | None = None
    alpha_frequency: Alpha | None = None
    alpha_decay: Annotated[Number, Field(ge=0, le=1)] = 0.996
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    min_p: Share = 0.0  # of the likeliest token's probability
    top_a: Share = 0.0  # of its square
    repetition_penalty: Annotated[Number, Field(gt=0, le=2)] = 1.0
    logit_bias: LogitBias = Field(default_factory=dict)
    seed: Annotated[Int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    n: Annotated[Int, Field(ge=1, le=schemas.MAX_PROMPTS)] = 1
    stop: StopList = Field(default_factory=list)
    stop_tokens: StopTokens | None = None
    ignore_eos: bool = False
    chunk_size: Annotated[Int, Field(le=INT_LIMIT)] = 1
    use_prefix_cache: bool = True  # whether states of earlier prompts' beginnings may be used
    return_token_ids: bool = False  # vLLM's: the reply has the ids of prompts and of what was drawn
    _chat_alphas: ClassVar[tuple[float, ...]] = USUAL_ALPHAS  # of a chat, by default

    @classmethod
    def from_json(cls, fields: Json, profile: SamplingProfileName = "default") -> Self:
        unavailable = cls.unavailable()
        if not unavailable.keys().isdisjoint(fields):
            for name, why in unavailable.items():
                if name in fields and is_refused(name, fields[name]):
                    raise cls.field_error(name, why)
        if found := other_name(fields, cls._own()):
            raise cls.field_error(found[0], f"this route calls it {found[1]}")
        given = {k: v for k, v in fields.items() if v is not None or k == "prompt"}
        own = PROFILES[profile]
        body = super().from_json({name: v for name, v in own.items() if name not in ALPHAS} | given)
        if own:  # a private attribute of pydantic's would cost every request as much as all its fields
            alphas = tuple(own.get(name, usual) for name, usual in CHAT_ALPHAS.items())
            object.__setattr__(body, "_chat_alphas", alphas)
        if body.stream_options and not body.stream:
            raise cls.field_error("stream_options", "this is only allowed when stream is true")
        return body

    @classmethod
    @cache
    def unavailable(cls) -> dict[str, str]:
        """Why each field that is refused is, those of other servers among them."""
        form = cls.refused.get(FORM, f"this route takes {FORM}")
        elsewhere = UNAVAILABLE | dict.fromkeys(NAMES_OF_FORM, form)
        return {name: why for name, why in elsewhere.items() if name not in cls._own()} | cls.refused

    @classmethod
    @cache
    def _own(cls) -> set[str]:
        return {field.alias or name for name, field in cls.model_fields.items()} - cls.refused.keys()

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> Json:
        """The schema, with what is refused, and with options for a stream alone."""
        schema = handler.resolve_ref_schema(handler(core))
        streams = {"properties": {"stream": {"const": True}}, "required": ["stream"]}
        schema["dependentSchemas"] = {"stream_options": streams}
        for name, why in cls.unavailable().items():
            schema["properties"][name] = {schemas.REFUSED: why}
        return schema

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def request(
        self,
        prompts: schemas.Prompts,
        max_tokens: int,
        style: Style | None = None,
        top_logprobs: int | None = None,
        turn: SessionTurn | None = None,
        grammar: Grammar | None = None,
    ) -> GenerateRequest:
        """`style`: that of a chat, None for other text.

        Generation stops at id 0 and the stops of the chat, or at `stop_tokens` in their place; `stop` adds to
        either. The strings of both fields count behind a chat's thought only. A chat has alphas by default,
        not at temperature 0, with a `grammar` that binds all of the answer, or beside a penalty of OpenAI's.
        Such a grammar says where the answer ends, so the stops of the chat do not count. Raises ApiError 400
        when prompts times n are too many.
        """
        if grammar and self.ignore_eos:
            raise self.field_error("ignore_eos", "a bound answer ends where it is complete; leave this out")
        if len(prompts) * self.n > schemas.MAX_PROMPTS:
            raise self.field_error("n", f"prompts times n should be at most {schemas.MAX_PROMPTS}")
        is_bound = grammar is not None and not leaves_text_free(grammar)
        openai_penalty = self.presence_penalty is not None or self.frequency_penalty is not None
        no_alphas = is_bound or openai_penalty or self.temperature == 0
        alphas = self._chat_alphas if style and not no_alphas else (0.0, 0.0)
        stop_tokens = [END_OF_TEXT] if self.stop_tokens is None else self.stop_tokens
        stops = list(style.form.stops) if style and self.stop_tokens is None and not is_bound else []
        own_stops = [s for s in stop_tokens if isinstance(s, str)] + self.stop
        late_stops = style.late_stops(own_stops) if style and own_stops else None
        request = GenerateRequest(
            id=new_id(),
            prompts=prompts,
            max_tokens=max_tokens,
            sampling=Sampling(
                temperature=self.temperature,
                top_k=self.top_k,
                top_p=self.top_p,
                alpha_presence=alphas[0] if self.alpha_presence is None else self.alpha_presence,
                alpha_frequency=alphas[1] if self.alpha_frequency is None else self.alpha_frequency,
                alpha_decay=self.alpha_decay,
                presence_penalty=self.presence_penalty or 0.0,
                frequency_penalty=self.frequency_penalty or 0.0,
                logit_bias=self.logit_bias,
                min_p=self.min_p,
                top_a=self.top_a,
                repetition_penalty=self.repetition_penalty,
                seed=None if self.seed is None else self.seed % 2**63,  # the engine's seeds are not negative
            ),
            n=self.n,
            stop_ids=[
                s for s in stop_tokens if isinstance(s, int) and not (self.ignore_eos and s == END_OF_TEXT)
            ],
            stop_strings=stops if late_stops else stops + own_stops,
            late_stops=late_stops,
            grammar=replace(grammar, head=answer_head(style)) if grammar else None,
            flush_tokens=max(self.chunk_size, 1) if self.stream else 0,
            top_logprobs=top_logprobs,
            prefix_cache=self.use_prefix_cache,
            turn=turn,
            prefix_ids=list(style.lead) if style else [],
            return_ids=self.return_token_ids,
        )
        return self.ranked(request)


class ThinkingSwitch(BaseModel):
    type: Literal["enabled", "disabled"]


class ChatReasoning(BaseModel):
    """OpenRouter's field for thoughts."""

    effort: Effort | None = None
    max_tokens: Annotated[Int, Field(ge=0, le=INT_LIMIT)] | None = None  # a hint beside that it is above 0
    enabled: bool | None = None
    exclude: bool | None = None  # whether the reply has no thought

    @property
    def wanted(self) -> bool | None:
        """Whether a thought is asked for; None: that is not said."""
        if self.enabled is not None:
            return self.enabled
        if self.effort is not None:
            return self.effort not in ("none", "minimal")
        return None if self.max_tokens is None else self.max_tokens > 0


class PredictedPart(BaseModel):
    type: Literal["text"]
    text: str


class PredictedText(BaseModel):
    """A text that is expected to come back: it makes the answer faster, and changes nothing in it."""

    type: Literal["content"]
    content: str | list[PredictedPart]

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class ChatBody(ChatStyleFields, OpenAIBody):
    """POST /v1/chat/completions. `messages`, `tools` and `tool_choice` are checked where they are read."""

    refused: ClassVar[dict[str, str]] = {
        "audio": "this server writes text only",
        "functions": "this is deprecated; use tools",
        "function_call": "this is deprecated; use tool_choice",
        "web_search_options": "this server does not search the web",
        "echo": "the text is the answer alone; /v1/completions can begin with the prompt",
    }
    max_completion_tokens: NewTokens | None = None
    messages: Annotated[list[Any], shaped_as(ChatMessages)] = Field(default_factory=list)
    contents: list[str] = Field(default_factory=list)
    system: str = ""
    session_id: SessionId = ""  # "": the whole conversation is here
    thinking: ThinkingSwitch | None = None  # as DeepSeek, GLM and Kimi have it
    reasoning: ChatReasoning = Field(default_factory=ChatReasoning)
    include_reasoning: bool = True  # whether the reply says the thought, as vLLM has it
    store: bool = False  # a hint: nothing is stored
    prediction: PredictedText | None = None
    add_generation_prompt: bool = True  # vLLM's, as is the next
    continue_final_message: bool = False
    logprobs: bool = False
    top_logprobs: Annotated[Int, Field(ge=0, le=20)] | None = None
    tools: Annotated[Any, shaped_as(list[OfferedTool])] = Field(default_factory=list)
    tool_choice: Annotated[Any, shaped_as(ToolChoiceShape)] = "auto"
    rwkv_tool_compat_mode: Annotated[
        bool, BeforeValidator(_tool_compat, json_schema_input_type=bool | Literal["true", "false"])
    ] = True
    enable_tool_calls: bool = False
    tool_call_parser: Literal["auto", "tag"] = "auto"
    parallel_tool_calls: bool = True  # whether more than one call of an answer counts

    def switches(self) -> dict[str, bool | None]:
        thinking = None if self.thinking is None else self.thinking.type == "enabled"
        return super().switches() | {"thinking": thinking, "reasoning": self.reasoning.wanted}


class CompletionBody(OpenAIBody):
    """POST /v1/completions."""

    refused = NO_CHAT | {"session_id": "sessions are not available on this route; use chat completions"}
    prompt: Annotated[schemas.Prompts, BeforeValidator(_prompts, json_schema_input_type=Prompt)]
    top_p: TopP = 1.0
    top_k: TopK = 0
    suffix: str = ""
    echo: bool = False
    best_of: Int | None = None
    logprobs: Annotated[Int, Field(ge=0, le=5)] | None = None
