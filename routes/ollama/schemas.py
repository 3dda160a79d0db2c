"""The bodies of /api/chat, /api/generate and /api/show: fields, defaults, ranges, refusals.

`options` has what says how tokens are drawn. Other options are about memory that a model of Ollama's needs;
they are hints, as is `keep_alive`: models stay until they are removed. RWKV's own fields stand beside
`options`, as on /v1/chat/completions, and have the same defaults.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, Field

from routes.chat.calls import read_arguments
from routes.chat.fields import ChatStyleFields
from routes.chat.grammars import ANY_OBJECT, of_schema
from routes.http.errors import TEXT_ONLY, ApiError, Json, native_field
from routes.http.open_lists import open_to, taken, taken_with_places
from routes.http.schemas import Int, Number, RequestBody, refused
from routes.llama_cpp.fields import LlamaSamplers, Predict, Seed
from routes.openai.schemas import (
    CHAT_ONLY,
    Alpha,
    LogitBias,
    NewTokens,
    OpenAIBody,
    Penalty,
    Share,
    StopList,
    StopTokens,
    TopK,
    TopP,
)
from routes.openai.tools import MAX_TOOLS, ToolUse, offered_tool
from rwkv_batch.chat.templates import Message
from rwkv_batch.config import SamplingProfileName
from rwkv_batch.wire.protocol import Grammar

REFUSED = CHAT_ONLY | {
    "response_format": "this route takes format",
    "reasoning_effort": "this route takes think",
}
NO_TEXT = "this route takes a conversation as messages; /api/generate takes it"
NO_IMAGES = refused(f"{TEXT_ONLY}; leave it out")
NOT_RAW = "a prompt that is raw or stands before a suffix is no chat; leave it out"


def _options_field(place: str, why: str) -> ApiError:
    return native_field(f"options.{place}", why)


def _level(think: object) -> object:
    """How much is thought is up to the model."""
    return True if think in ("low", "medium", "high", "max") else think


def _form(value: object) -> object:
    """Clients send an empty string where they want none."""
    if value in (None, ""):
        return None
    if value != "json" and not isinstance(value, dict):
        raise ValueError('input should be "json" or a JSON schema: an object')
    return value


def _arguments(value: object) -> object:
    """An object, or a text as OpenAI's clients have it."""
    if not isinstance(value, dict | str):
        raise ValueError("input should be an object, or its JSON text")
    return value


Arguments = Annotated[Any, BeforeValidator(_arguments, json_schema_input_type=Json | str)]


class OllamaOptions(LlamaSamplers, RequestBody):
    """How tokens are drawn."""

    field_error = staticmethod(_options_field)

    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_k: TopK | None = None
    top_p: TopP | None = None
    seed: Seed | None = None
    num_predict: Predict | None = None
    stop: StopList | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    min_p: Share | None = None
    # What other protocols call them, and RWKV's own.
    max_tokens: NewTokens | None = None
    n_predict: Predict | None = None
    repetition_penalty: Annotated[Number, Field(gt=0, le=2)] | None = None
    top_a: Share | None = None
    alpha_presence: Alpha | None = None
    alpha_frequency: Alpha | None = None
    alpha_decay: Annotated[Number, Field(ge=0, le=1)] | None = None
    stop_tokens: StopTokens | None = None
    logit_bias: LogitBias | None = None
    ignore_eos: bool | None = None

    def as_fields(self) -> Json:
        """By the names of an OpenAI request's fields, those that are given. Raises ApiError 400."""
        names = OpenAIBody.model_fields.keys() & OllamaOptions.model_fields.keys()
        fields = {name: getattr(self, name) for name in names}
        fields["max_tokens"] = self._one_of("num_predict", "max_tokens", "n_predict")
        fields["repetition_penalty"] = self._one_of("repeat_penalty", "repetition_penalty")
        return {name: value for name, value in fields.items() if value is not None}

    def _one_of(self, own: str, *others: str) -> float | None:
        """The value of a field by any of its names. Raises ApiError 400 if there are several."""
        given = {name: value for name in (own, *others) if (value := getattr(self, name)) is not None}
        first, *more = given or {own: None}
        for name in more:
            if given[name] != given[first]:
                raise self.field_error(name, f"this differs from {first}; send one of them")
        return given.get(first)


class OllamaBody(ChatStyleFields, OpenAIBody):
    """What both routes that generate have in common."""

    field_error = staticmethod(native_field)
    refused = REFUSED

    stream: bool = True
    n: Annotated[Int, Field(ge=1, le=1)] = 1
    options: OllamaOptions = Field(default_factory=OllamaOptions)
    think: Annotated[
        bool | None,
        BeforeValidator(_level, json_schema_input_type=bool | Literal["low", "medium", "high", "max"] | None),
    ] = None
    format: Annotated[
        Json | Literal["json"] | None,
        BeforeValidator(_form, json_schema_input_type=Json | Literal["json", ""] | None),
    ] = None
    keep_alive: Any = None
    logprobs: bool = False
    top_logprobs: Annotated[Int, Field(ge=0, le=20)] | None = None

    @classmethod
    def from_json(cls, fields: Json, profile: SamplingProfileName = "default") -> Self:
        options = fields.get("options") or {}
        if not isinstance(options, dict):
            raise native_field("options", "must be an object")
        return super().from_json({**fields, **OllamaOptions.from_json(options).as_fields()}, profile)

    def given(self) -> dict[str, Grammar]:
        if self.format is None:
            return super().given()
        return super().given() | {"format": of_schema(ANY_OBJECT if self.format == "json" else self.format)}

    @property
    def wanted_logprobs(self) -> int | None:
        """How many of the likeliest tokens come with each one drawn; None: none. Raises ApiError 400."""
        if self.top_logprobs is not None and not self.logprobs:
            raise native_field("top_logprobs", "this is only allowed when logprobs is true")
        return (self.top_logprobs or 0) if self.logprobs else None


class OllamaFunction(BaseModel):
    name: Annotated[str, Field(min_length=1, pattern=r"\S")]
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None  # whether the schema binds the arguments


class OllamaTool(BaseModel):
    type: Literal["function"] = "function"
    function: OllamaFunction


class OllamaCalledFunction(BaseModel):
    name: Annotated[str, Field(min_length=1)]
    arguments: Arguments = Field(default_factory=dict)


class OllamaCall(BaseModel):
    function: OllamaCalledFunction


class OllamaMessage(BaseModel):
    """`thinking` of earlier turns is not read again."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    images: Annotated[None, NO_IMAGES] = None
    tool_calls: list[OllamaCall] | None = None

    def read(self) -> Message:
        """What the model reads."""
        calls = [call.function for call in self.tool_calls or []]
        return Message(
            self.role, self.content or "", [(each.name, read_arguments(each.arguments)) for each in calls]
        )


class OllamaChatBody(OllamaBody):
    """POST /api/chat."""

    refused = (
        REFUSED
        | dict.fromkeys(("prompt", "suffix", "system", "template", "context"), NO_TEXT)
        | {"tool_choice": "the model chooses here; /v1/chat/completions takes it"}
    )

    messages: list[OllamaMessage] = Field(default_factory=list)  # none: the model is to be loaded
    tools: Annotated[list[Annotated[OllamaTool, open_to("function")]], Field(max_length=MAX_TOOLS)] = Field(
        default_factory=list
    )

    def tool_use(self) -> ToolUse:
        """How the chat uses its tools."""
        functions = [tool.function for tool in taken(self.tools)]
        offered = [offered_tool(each.name, each.description, each.parameters) for each in functions]
        strict = frozenset(each.name for each in functions if each.strict)
        places = [f"tools[{i}]" for i, _ in taken_with_places(self.tools)]
        return ToolUse(offered, "auto", bool(offered), True, strict, places=places)


class OllamaTextBody(OllamaBody):
    """POST /api/generate."""

    refused = (
        REFUSED
        | dict.fromkeys(("messages", "tools", "tool_choice"), "/api/chat takes it")
        | {
            "template": "chats are rendered as the model was trained; use raw",
            "context": "send the conversation to /api/chat as messages",
        }
    )

    prompt: str = ""  # empty, and no suffix: the model is to be loaded
    suffix: str = ""
    system: str = ""
    raw: bool = False  # whether the prompt stands as it is
    images: Annotated[None, NO_IMAGES] = None

    @property
    def is_chat(self) -> bool:
        """Whether the prompt is rendered as a chat; else it stands as it is, or before a `suffix`."""
        return not (self.raw or self.suffix)

    def check_raw(self) -> None:
        """Raises ApiError 400 for what only a chat has."""
        for name in ("system", "think", "enable_think", "think_type", "chat_template_kwargs"):
            if getattr(self, name):
                raise native_field(name, NOT_RAW)


class ShowBody(RequestBody):
    """POST /api/show. `model` is read where all routes read it."""

    name: str = ""  # what older clients call the model
