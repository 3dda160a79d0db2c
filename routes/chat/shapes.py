"""The shapes of what is read by hand: OpenAI's messages and tools. They document, and do not parse."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field

from routes.http.errors import Json

Named = Annotated[str, Field(min_length=1, pattern=r"\S")]


def shaped_as(shape: Any) -> BeforeValidator:
    """Documents a field that is checked where it is read."""
    return BeforeValidator(lambda value: value, json_schema_input_type=shape)


class TextPart(BaseModel):
    type: Literal["text", "input_text", "output_text"]
    text: str


class RefusalPart(BaseModel):
    type: Literal["refusal"]
    refusal: str


Content = str | list[str | TextPart | RefusalPart] | None


class CalledFunction(BaseModel):
    name: Annotated[str, Field(min_length=1)]
    arguments: str | Json = ""  # an object, or its JSON text


class CallOfMessage(BaseModel):
    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class AskingMessage(BaseModel):
    role: Literal["system", "developer", "user", "tool"]
    content: Content
    tool_call_id: str | None = None


class AnsweringMessage(BaseModel):
    role: Literal["assistant"]
    content: Content = None
    tool_calls: list[CallOfMessage] | None = None


ChatMessages = list[AskingMessage | AnsweringMessage]


class OfferedFunction(BaseModel):
    name: Named
    description: str | None = None
    parameters: Json | None = None


class OfferedTool(BaseModel):
    type: Literal["function"]
    function: OfferedFunction


class NamedFunction(BaseModel):
    name: str


class NamedTool(BaseModel):
    type: Literal["function"]
    function: NamedFunction


class AllowedChoice(BaseModel):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1)]


class AllowedTools(BaseModel):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedChoice


ToolChoiceShape = Literal["none", "auto", "required", "any"] | NamedTool | AllowedTools
