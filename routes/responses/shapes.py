"""The shapes of what routes/responses/items.py reads. They document, and do not parse."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field

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
    arguments: str | Json = ""  # an object, or its JSON text


class OutputItem(BaseModel):
    type: Literal["function_call_output"]
    call_id: Filled
    output: ItemText


class ReasoningItem(BaseModel):
    """A thought of an earlier turn, which the model does not read again."""

    type: Literal["reasoning"]


Item = MessageItem | CallItem | OutputItem | ReasoningItem


class NamedResponseTool(BaseModel):
    type: Literal["function"]
    name: str
