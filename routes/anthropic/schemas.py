"""The bodies of POST /v1/messages and /v1/messages/count_tokens: fields, defaults, ranges, refusals.

RWKV's own fields are those of /v1/chat/completions, with the same defaults. `metadata`, `service_tier` and
`cache_control` are labels or hints, and so are the effort and the budget of a thought: `max_tokens` is what
ends it.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from routes.anthropic.blocks import CachedBlock, InputMessage, Name, Texts, ignored_blocks, text_of
from routes.chat.fields import ChatStyleFields
from routes.chat.grammars import of_schema
from routes.http.errors import Json, openai_field
from routes.http.open_lists import ignored, named, open_to, taken_with_places
from routes.http.schemas import INT_LIMIT, Int, refused
from routes.openai.schemas import CHAT_ONLY, NewTokens, OpenAIBody, StopList
from routes.openai.tools import MAX_TOOLS, ToolUse, offered_tool
from rwkv_batch.wire.protocol import Grammar

REFUSED = CHAT_ONLY | {
    "response_format": "this route takes output_config.format",
    "contents": "this route takes a conversation as messages",
    "reasoning_effort": "this route takes thinking",
    "logprobs": "logprobs are available on /v1/chat/completions",
    "container": "this server runs no code; leave it out",
    "mcp_servers": "this server calls no other servers; send their tools as tools",
}


class CustomTool(CachedBlock):
    type: Literal["custom"] | None = None
    name: Name
    description: str | None = None
    input_schema: Json
    strict: bool | None = None  # whether the schema binds the arguments
    defer_loading: bool | None = None  # a hint: all tools are in the prompt
    input_examples: Annotated[None, refused("examples are not shown; put them into the description")] = None
    allowed_callers: list[str] | None = None

    @property
    def is_for_model(self) -> bool:
        """Whether the model may call it, and not only code that it writes, of which none runs here."""
        return self.allowed_callers is None or "direct" in self.allowed_callers


class FreeChoice(BaseModel):
    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool = False


class NamedChoice(BaseModel):
    type: Literal["tool"]
    name: Name
    disable_parallel_tool_use: bool = False


class Thinking(BaseModel):
    type: Literal["enabled", "disabled", "adaptive"] = "disabled"
    budget_tokens: Annotated[Int, Field(ge=1, le=INT_LIMIT)] | None = None
    display: Literal["summarized", "omitted"] | None = None  # omitted: the block of the thought is empty


class OutputFormat(BaseModel):
    type: Literal["json_schema"]
    schema_: Annotated[Json, Field(alias="schema")]


class OutputConfig(BaseModel):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class ContextEdit(BaseModel):
    """Thoughts of earlier turns are never read again, so there is nothing to do."""

    type: Literal["clear_thinking_20251015"]


class ContextManagement(BaseModel):
    edits: list[Annotated[ContextEdit, open_to("clear_thinking_20251015")]] = Field(default_factory=list)


class MessagesBody(ChatStyleFields, OpenAIBody):
    """POST /v1/messages."""

    refused = REFUSED

    max_tokens: NewTokens  # 0: nothing is generated, as by clients that want a prompt to be cached
    n: Annotated[Int, Field(ge=1, le=1)] = 1
    messages: Annotated[list[InputMessage], Field(min_length=1)]
    system: Texts = Field(default_factory=list)
    stop_sequences: StopList = Field(default_factory=list)
    tools: Annotated[
        list[Annotated[CustomTool, open_to("custom", "function")]], Field(max_length=MAX_TOOLS)
    ] = Field(default_factory=list)
    tool_choice: Annotated[FreeChoice | NamedChoice, Field(discriminator="type")] = FreeChoice(type="auto")
    thinking: Thinking = Field(default_factory=Thinking)
    output_config: OutputConfig = Field(default_factory=OutputConfig)
    output_format: OutputFormat | None = None  # what older clients call output_config.format
    context_management: ContextManagement = Field(default_factory=ContextManagement)
    metadata: Json = Field(default_factory=dict)
    service_tier: Literal["auto", "standard_only"] | None = None
    # Hints.
    speed: str | None = None
    inference_geo: str | None = None
    diagnostics: Any = None
    cache_control: Any = None

    @property
    def system_text(self) -> str:
        return text_of(self.system)

    @property
    def effort(self) -> str | None:
        """The thought that is asked for, as OpenAI's reasoning effort."""
        if "thinking" not in self.model_fields_set:
            return None
        return "none" if self.thinking.type == "disabled" else "high"

    def given(self) -> dict[str, Grammar]:
        forms = {"output_config.format": self.output_config.format, "output_format": self.output_format}
        return super().given() | {name: of_schema(form.schema_) for name, form in forms.items() if form}

    def tool_use(self) -> ToolUse:
        """How the message uses its tools. Raises ApiError 400 that names what is wrong with `tool_choice`."""
        known = [(i, tool) for i, tool in taken_with_places(self.tools) if tool.is_for_model]
        tools = [tool for _, tool in known]
        places = [f"tools[{i}]" for i, _ in known]
        offered = [offered_tool(tool.name, tool.description, tool.input_schema) for tool in tools]
        choice = self.tool_choice
        parallel = not choice.disable_parallel_tool_use
        strict = frozenset(tool.name for tool in tools if tool.strict)
        if isinstance(choice, NamedChoice):
            if choice.name not in [tool.name for tool in tools]:
                raise openai_field("tool_choice.name", "input should be the name of one of the tools")
            named = {"type": "function", "function": {"name": choice.name}}
            return ToolUse(offered, named, True, parallel, strict, "input_schema", places)
        if choice.type == "any" and not offered:
            raise openai_field("tool_choice", "any is only allowed when tools are given")
        wanted = "required" if choice.type == "any" else choice.type
        look = bool(offered) and wanted != "none"
        return ToolUse(offered, wanted, look, parallel, strict, "input_schema", places)

    def ignored(self) -> list[str]:
        """The places of what is left out of its lists, with its types."""
        return [
            *ignored_blocks(self.messages),
            *ignored("tools", self.tools),
            *(
                named(f"tools[{i}]", tool.name)
                for i, tool in taken_with_places(self.tools)
                if not tool.is_for_model
            ),
            *ignored("context_management.edits", self.context_management.edits),
        ]


class CountBody(MessagesBody):
    """POST /v1/messages/count_tokens: the same, of which no text is generated."""

    max_tokens: NewTokens = 0
