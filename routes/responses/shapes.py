"""The shapes of what routes/responses/items.py reads, and of replies. They document, and do not parse."""

from typing import Annotated, Literal, NotRequired

from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from routes.chat.shapes import RefusalPart, TextPart
from routes.http.errors import Json

Filled = Annotated[str, Field(min_length=1)]
ItemText = str | list[TextPart | RefusalPart]


class MessageItem(BaseModel):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: ItemText


class CallItem(BaseModel):
    type: Literal["function_call"]
    call_id: Filled
    name: Filled
    namespace: str | None = None  # of the function
    arguments: str | Json = ""  # an object, or its JSON text


class OutputItem(BaseModel):
    type: Literal["function_call_output"]
    call_id: Filled
    output: ItemText


class ReasoningItem(BaseModel):
    """A thought of an earlier turn, which the model does not read again."""

    type: Literal["reasoning"]


class ReferenceItem(BaseModel):
    """An item of a response that is stored."""

    type: Literal["item_reference"] = "item_reference"
    id: Filled


Item = MessageItem | CallItem | OutputItem | ReasoningItem | ReferenceItem


class NamedResponseTool(BaseModel):
    type: Literal["function"]
    name: str
    namespace: str | None = None  # needed where several have a function of this name


class AllowedResponseTools(BaseModel):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedResponseTool], Field(min_length=1)]


class WrittenText(TypedDict):
    type: Literal["output_text"]
    text: str
    annotations: list[Json]
    logprobs: NotRequired[list[Json]]


class AskedText(TypedDict):
    type: Literal["input_text"]
    text: str


class ThoughtText(TypedDict):
    type: Literal["reasoning_text"]
    text: str


ItemStatus = Literal["in_progress", "completed", "incomplete"]


class MadeMessage(TypedDict):
    id: str
    type: Literal["message"]
    status: ItemStatus
    role: Literal["user", "assistant", "system", "developer"]
    content: list[WrittenText | AskedText]


class MadeThought(TypedDict):
    id: str
    type: Literal["reasoning"]
    summary: list[Json]
    status: NotRequired[ItemStatus]
    content: NotRequired[list[ThoughtText]]


class MadeFunctionCall(TypedDict):
    id: str
    type: Literal["function_call"]
    status: ItemStatus
    call_id: str
    name: str
    namespace: NotRequired[str]
    arguments: str


class ReadOutput(TypedDict):
    id: str
    type: Literal["function_call_output"]
    status: ItemStatus
    call_id: str
    output: str


class InputDetails(TypedDict):
    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(TypedDict):
    reasoning_tokens: int


class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseFailure(TypedDict):
    code: str
    message: str


class WhyIncomplete(TypedDict):
    reason: str


class MadeResponse(TypedDict):
    """An answer, with the fields of its request."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: NotRequired[int]
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: bool
    error: ResponseFailure | None
    incomplete_details: WhyIncomplete | None
    instructions: str | None
    model: str
    output: list[MadeMessage | MadeThought | MadeFunctionCall]
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    prompt_cache_retention: str | None
    reasoning: Json
    safety_identifier: str | None
    service_tier: str
    store: bool
    temperature: float
    text: Json
    tool_choice: str | Json
    tools: list[Json]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponseUsage | None
    user: str | None


class DeletedResponse(TypedDict):
    id: str
    object: Literal["response"]
    deleted: bool


class InputItems(TypedDict):
    """A page of what a response was asked."""

    object: Literal["list"]
    data: list[MadeMessage | MadeThought | MadeFunctionCall | ReadOutput]
    has_more: bool
    first_id: str
    last_id: str


class InputTokenCount(TypedDict):
    object: Literal["response.input_tokens"]
    input_tokens: int
