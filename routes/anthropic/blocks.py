"""What the content of a message is made of: the blocks that clients send, and the messages they stand for."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field

from routes.chat.calls import canonical_json
from routes.http.errors import Json
from routes.http.open_lists import ignored, open_to
from routes.http.schemas import MEDIA, refused
from rwkv_batch.chat.templates import Message

Name = Annotated[str, Field(min_length=1, pattern=r"\S")]
NO_CITATIONS = refused("this server does not cite; leave it out")


class CachedBlock(BaseModel):
    """The base of all blocks. States of prompts' beginnings are kept in any case."""

    cache_control: Any = None


class TextBlock(CachedBlock):
    type: Literal["text"]
    text: str
    citations: Annotated[None, NO_CITATIONS] = None


class ThinkingBlock(CachedBlock):
    """A thought of an earlier turn, which the model does not read again."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class RedactedThinkingBlock(CachedBlock):
    """A thought that only Anthropic can read; it is left out."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(CachedBlock):
    type: Literal["tool_use"]
    id: Name
    name: Name
    input: Json


def _as_blocks(content: object) -> object:
    """A string stands for one block of text."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise ValueError("input should be a string or a list of blocks")
    return content


Texts = Annotated[list[TextBlock], BeforeValidator(_as_blocks, json_schema_input_type=str | list[TextBlock])]


class ToolReferenceBlock(CachedBlock):
    """What a search for tools has found. All tools are in the prompt, so its name says which."""

    type: Literal["tool_reference"]
    tool_name: Name

    @property
    def text(self) -> str:
        """What the model reads of it."""
        return self.tool_name


class Citations(BaseModel):
    enabled: Annotated[None, NO_CITATIONS] = None


class DocumentSource(BaseModel):
    """A text, or blocks of text."""

    type: Literal["text", "content"]
    media_type: Literal["text/plain"] = "text/plain"
    data: str = ""
    content: Texts = Field(default_factory=list)


class DocumentBlock(CachedBlock):
    """The model reads its title and what is said of it, and then its text."""

    type: Literal["document"]
    source: DocumentSource
    title: str | None = None
    context: str | None = None
    citations: Citations = Citations()

    @property
    def text(self) -> str:
        """What the model reads of it."""
        text = self.source.data if self.source.type == "text" else text_of(self.source.content)
        return "\n".join(part for part in (self.title, self.context, text) if part)


class SearchResultBlock(CachedBlock):
    type: Literal["search_result"]
    source: str
    title: str
    content: Texts
    citations: Citations = Citations()

    @property
    def text(self) -> str:
        """What the model reads of it."""
        return "\n".join((self.title, self.source, text_of(self.content)))


ReadBlock = TextBlock | DocumentBlock | SearchResultBlock
ResultBlock = Annotated[ReadBlock | ToolReferenceBlock, Field(discriminator="type")]


class ToolResultBlock(CachedBlock):
    type: Literal["tool_result"]
    tool_use_id: Name
    content: Annotated[
        list[ResultBlock], BeforeValidator(_as_blocks, json_schema_input_type=str | list[ResultBlock])
    ] = Field(default_factory=list)
    is_error: bool | None = None


UserBlock = Annotated[ReadBlock | ToolResultBlock, Field(discriminator="type")]
AssistantBlock = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock, Field(discriminator="type")
]
# Blocks of tools that other servers run are left out; content that is no text is refused, as are results.
AnyAssistantBlock = Annotated[
    AssistantBlock, open_to("text", "thinking", "redacted_thinking", "tool_use", "tool_result", *MEDIA)
]


class UserMessage(BaseModel):
    role: Literal["user"]
    content: Annotated[
        list[UserBlock], BeforeValidator(_as_blocks, json_schema_input_type=str | list[UserBlock])
    ]


class AssistantMessage(BaseModel):
    role: Literal["assistant"]
    content: Annotated[
        list[AnyAssistantBlock],
        BeforeValidator(_as_blocks, json_schema_input_type=str | list[AssistantBlock]),
    ]


class SystemMessage(BaseModel):
    role: Literal["system"]
    content: Texts


InputMessage = Annotated[UserMessage | AssistantMessage | SystemMessage, Field(discriminator="role")]


def text_of(blocks: Sequence[ReadBlock | ToolReferenceBlock]) -> str:
    """The texts of blocks, which are lines of one text."""
    return "\n".join(block.text for block in blocks)


def ignored_blocks(given: Sequence[UserMessage | AssistantMessage | SystemMessage]) -> list[str]:
    """The places and types of those that are left out."""
    return [
        name for i, message in enumerate(given) for name in ignored(f"messages[{i}].content", message.content)
    ]


def to_messages(given: Sequence[UserMessage | AssistantMessage | SystemMessage]) -> list[Message]:
    """What the model reads. Messages of one role that follow each other are one turn."""
    turns: list[list[Message]] = []  # joined at the end, as a turn may have very many parts
    for part in (part for message in given for part in _parts(message)):
        if turns and turns[-1][0].role == part.role != "tool":
            turns[-1].append(part)
        else:
            turns.append([part])
    return [
        Message(
            parts[0].role,
            "\n".join(part.text for part in parts if part.text),
            [call for part in parts for call in part.tool_calls],
        )
        for parts in turns
    ]


def _parts(message: UserMessage | AssistantMessage | SystemMessage) -> Iterator[Message]:
    """The results of tools are turns of their own; everything else is the turn of the message."""
    for block in message.content:
        match block:
            case TextBlock() | DocumentBlock() | SearchResultBlock():
                yield Message(message.role, block.text)
            case ToolUseBlock(name=name, input=arguments):
                yield Message(message.role, "", [(name, canonical_json(arguments))])
            case ToolResultBlock(content=content, is_error=failed):
                yield Message("tool", f"Error: {text_of(content)}" if failed else text_of(content))
