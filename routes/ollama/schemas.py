"""The bodies of /api/chat, /api/generate and /api/show: fields, defaults, ranges, refusals.

`options` has what says how tokens are drawn. Other options are about memory that a model of Ollama's needs;
they are hints, as is `keep_alive`: models stay until they are removed. RWKV's own fields stand beside
`options`, as on /v1/chat/completions, and have the same defaults.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, Field

from routes.chat.calls import canonical_json
from routes.chat.fields import ChatStyleFields
from routes.chat.templates import Message
from routes.http.errors import ApiError, Json, native_field
from routes.http.schemas import RequestBody, refused
from routes.llama_cpp.fields import LlamaSamplers, Predict, Seed
from routes.openai.schemas import UNBOUND, Int, Number, OpenAIBody, Penalty, Share, StopList, TopK, TopP
from routes.openai.tools import MAX_TOOLS, ToolUse, offered_tool
from rwkv_batch.config import SamplingProfileName

REFUSED = UNBOUND | {"session_id": "sessions are not available on this route; use /v1/chat/completions"}
NO_IMAGES = refused("this server reads text only; leave it out")
NO_FORMAT = refused("answers are not bound to a form here; leave it out and ask for it in the prompt")


def _options_field(place: str, why: str) -> ApiError:
    return native_field(f"options.{place}", why)


def _level(think: object) -> object:
    """How much is thought is up to the model."""
    return True if think in ("low", "medium", "high", "max") else think


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

    def as_fields(self) -> Json:
        """By the names of an OpenAI request's fields, those that are given."""
        names = ("temperature", "top_k", "top_p", "min_p", "seed", "stop")
        fields = {name: getattr(self, name) for name in (*names, "presence_penalty", "frequency_penalty")}
        fields |= {"max_tokens": self.num_predict, "repetition_penalty": self.repeat_penalty}
        return {name: value for name, value in fields.items() if value is not None}


class OllamaBody(ChatStyleFields, OpenAIBody):
    """What both routes that generate have in common."""

    field_error = staticmethod(native_field)
    refused = REFUSED

    stream: bool = True
    n: Annotated[Int, Field(ge=1, le=1)] = 1
    options: OllamaOptions = OllamaOptions()
    think: Annotated[
        bool | None,
        BeforeValidator(_level, json_schema_input_type=bool | Literal["low", "medium", "high", "max"] | None),
    ] = None
    format: Annotated[None, NO_FORMAT] = None
    keep_alive: Any = None
    logprobs: bool = False
    top_logprobs: Annotated[Int, Field(ge=0, le=20)] | None = None

    @classmethod
    def from_json(cls, fields: Json, profile: SamplingProfileName = "default") -> Self:
        options = fields.get("options") or {}
        if not isinstance(options, dict):
            raise native_field("options", "must be an object")
        return super().from_json({**fields, **OllamaOptions.from_json(options).as_fields()}, profile)

    @property
    def wanted_logprobs(self) -> int | None:
        """How many of the likeliest tokens come with each one drawn; None: no logprobs."""
        return (self.top_logprobs or 0) if self.logprobs else None


class OllamaFunction(BaseModel):
    name: Annotated[str, Field(min_length=1, pattern=r"\S")]
    description: str | None = None
    parameters: Json | None = None


class OllamaTool(BaseModel):
    type: Literal["function"] = "function"
    function: OllamaFunction


class OllamaCalledFunction(BaseModel):
    name: Annotated[str, Field(min_length=1)]
    arguments: Json = Field(default_factory=dict)


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
            self.role, self.content or "", [(each.name, canonical_json(each.arguments)) for each in calls]
        )


class OllamaChatBody(OllamaBody):
    """POST /api/chat."""

    messages: list[OllamaMessage] = Field(default_factory=list)  # none: the model is to be loaded
    tools: Annotated[list[OllamaTool], Field(max_length=MAX_TOOLS)] = Field(default_factory=list)

    def tool_use(self) -> ToolUse:
        functions = [tool.function for tool in self.tools]
        offered = [offered_tool(each.name, each.description, each.parameters) for each in functions]
        return ToolUse(offered, "auto", bool(offered), True)


class OllamaTextBody(OllamaBody):
    """POST /api/generate."""

    prompt: str = ""  # empty, and no suffix: the model is to be loaded
    suffix: str = ""
    system: str = ""
    raw: bool = False  # whether the prompt stands as it is
    images: Annotated[None, NO_IMAGES] = None
    template: Annotated[None, refused("chats are rendered as the model was trained; use raw")] = None
    context: Annotated[None, refused("send the conversation to /api/chat as messages")] = None


class ShowBody(RequestBody):
    """POST /api/show. `model` is read where all routes read it."""

    name: str = ""  # what older clients call the model
