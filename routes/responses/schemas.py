"""The body of POST /v1/responses: fields, defaults, ranges, refusals."""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, Field, WithJsonSchema, model_validator

from routes.chat.fields import ChatStyleFields, Effort
from routes.chat.grammars import of_format
from routes.chat.shapes import shaped_as
from routes.http.errors import TEXT_ONLY, Json
from routes.http.open_lists import named
from routes.http.schemas import Int
from routes.openai.schemas import CHAT_ONLY, NewTokens, OpenAIBody, StreamOptions
from routes.openai.tools import MAX_TOOLS
from routes.responses.items import ignored_items
from routes.responses.shapes import AllowedResponseTools, Item, NamedResponseTool
from routes.responses.tools import ResponseTool, ignored_tools
from rwkv_batch.wire.protocol import Grammar

REFUSED = CHAT_ONLY | {
    "background": "responses are made while the client waits; leave it out and read the reply, or its stream",
    "conversation": "conversations are no objects here; continue a response with previous_response_id",
    "session_id": "continue a response with previous_response_id; sessions belong to /v1/chat/completions",
    "prompt": "there are no stored prompts here; send the text as input",
    "messages": "this route takes the conversation as input",
    "contents": "this route takes the conversation as input",
    "moderation": "this server does not moderate",
    "logprobs": "this route takes top_logprobs, or message.output_text.logprobs in include",
    "max_tokens": "this route calls it max_output_tokens",
    "max_completion_tokens": "this route calls it max_output_tokens",
    "response_format": "this route takes text.format",
    "reasoning_effort": "this route calls it reasoning.effort",
    "functions": "this is deprecated; use tools",
    "function_call": "this is deprecated; use tool_choice",
    "access_programs": "there are none here",
    "image": TEXT_ONLY,
}
LOGPROBS = "message.output_text.logprobs"
# What OpenAI's protocol lets clients include. All but the logprobs belong to items that are not made here, or
# stand in them anyway, as thoughts are never encrypted.
INCLUDABLE = (
    LOGPROBS,
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)
MAX_PAIRS, MAX_KEY, MAX_VALUE = 16, 64, 512  # OpenAI's limits of metadata
METADATA: Json = {
    "type": "object",
    "maxProperties": MAX_PAIRS,
    "propertyNames": {"maxLength": MAX_KEY},
    "additionalProperties": {"type": "string", "maxLength": MAX_VALUE},
}


def _metadata(value: object) -> object:
    if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
        raise ValueError("input should be an object whose values are strings")
    if len(value) > MAX_PAIRS or any(len(k) > MAX_KEY or len(v) > MAX_VALUE for k, v in value.items()):
        raise ValueError(
            f"input should hold at most {MAX_PAIRS} keys of {MAX_KEY} characters with values of {MAX_VALUE}"
        )
    return value


class ResponseStreamOptions(StreamOptions):
    include_obfuscation: bool | None = None  # a hint: nothing is added to events


Summary = Literal["auto", "concise", "detailed"]


class Reasoning(BaseModel):
    """Thoughts are sent as the text of a reasoning item. Those of earlier turns in `input` are not read."""

    effort: Effort | None = None
    summary: Summary | None = None  # a hint, as is the next: thoughts are sent whole
    generate_summary: Summary | None = None
    context: Literal["auto", "current_turn"] | None = None
    mode: Literal["standard"] | None = None


class TextFormat(BaseModel):
    """A schema binds the answer, with `strict` or without."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema_: Json | None = Field(None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> Self:
        if self.type == "json_schema" and not (self.name and self.schema_ is not None):
            raise ValueError("a json_schema needs name and schema")
        if self.type == "text" and self.schema_ is not None:
            raise ValueError("a schema is given, so type should be json_schema")
        return self


class TextConfig(BaseModel):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None  # a hint


class ResponsesBody(ChatStyleFields, OpenAIBody):
    """RWKV's own sampling fields are those of /v1/chat/completions, with the same defaults."""

    refused = REFUSED

    stream_options: ResponseStreamOptions | None = None
    n: Annotated[Int, Field(ge=1, le=1)] = 1
    input: Annotated[Any, shaped_as(str | list[Item])] = ""  # checked by items.parse_items
    instructions: str = ""
    previous_response_id: str | None = None
    store: bool = True
    max_output_tokens: Annotated[NewTokens, Field(ge=1)] | None = None
    # for tools that the server runs; there are none
    max_tool_calls: Annotated[Int, Field(ge=1)] | None = None
    metadata: Annotated[
        dict[str, str],
        BeforeValidator(_metadata),
        WithJsonSchema(METADATA),
        Field(default_factory=dict),
    ]
    reasoning: Reasoning = Reasoning()
    text: TextConfig = TextConfig()
    truncation: Literal["auto", "disabled"] = "disabled"  # there is no window that could overflow
    context_management: list[Json] = Field(default_factory=list)  # a hint: nothing needs to be compacted
    include: list[str] = Field(default_factory=list)
    top_logprobs: Annotated[Int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[ResponseTool], Field(default_factory=list, max_length=MAX_TOOLS)]
    tool_choice: Annotated[
        Any, shaped_as(Literal["none", "auto", "required"] | NamedResponseTool | AllowedResponseTools)
    ] = "auto"
    parallel_tool_calls: bool = True  # whether more than one call of an answer counts
    # Labels and hints.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: Json = Field(default_factory=dict)

    @property
    def wanted_logprobs(self) -> int | None:
        """How many of the likeliest tokens come with each one drawn; None: none, and no logprobs."""
        return (self.top_logprobs or 0) if self.top_logprobs or LOGPROBS in self.include else None

    def ignored(self) -> list[str]:
        """The places of what is left out of its lists, with its kinds."""
        names = [
            named(f"include[{i}]", each) for i, each in enumerate(self.include) if each not in INCLUDABLE
        ]
        return [*ignored_items(self.input), *ignored_tools(self.tools), *names]

    def given(self) -> dict[str, Grammar]:
        form = self.text.format or TextFormat(type="text", schema=None)
        grammar = of_format(form.type, form.schema_)
        return super().given() | ({"text.format": grammar} if grammar else {})
