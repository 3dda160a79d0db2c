"""The shapes of replies that are no stream. They document."""

from typing import Literal

from typing_extensions import TypedDict

from routes.http.errors import Json


class AnsweredThought(TypedDict):
    type: Literal["thinking"]
    thinking: str
    signature: str


class AnsweredText(TypedDict):
    type: Literal["text"]
    text: str


class AnsweredCall(TypedDict):
    type: Literal["tool_use"]
    id: str
    name: str
    input: Json


class MessageUsage(TypedDict):
    """`input_tokens` are those that were computed."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    service_tier: Literal["standard"]


class AnsweredMessage(TypedDict):
    """An answer."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnsweredThought | AnsweredText | AnsweredCall]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "pause_turn"]
    stop_sequence: str | None
    usage: MessageUsage


class MessageTokens(TypedDict):
    input_tokens: int


class AnthropicModel(TypedDict):
    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    lifecycle: Literal["active"]


class AnthropicModels(TypedDict):
    """A page of what is served."""

    data: list[AnthropicModel]
    has_more: bool
    first_id: str | None
    last_id: str | None
