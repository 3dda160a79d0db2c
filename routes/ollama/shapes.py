"""The shapes of replies; those that generate have one a line where they are streamed. They document."""

from typing import Literal, NotRequired

from typing_extensions import TypedDict

from routes.http.errors import Json
from routes.openai.shapes import DrawnToken


class RanFunction(TypedDict):
    name: str
    arguments: Json


class RanCall(TypedDict):
    function: RanFunction


class OllamaAnswer(TypedDict):
    role: Literal["assistant"]
    content: str
    thinking: NotRequired[str]
    tool_calls: NotRequired[list[RanCall]]


class OllamaEnd(TypedDict):
    """What both replies have; the counts lack where nothing was to be generated. Times are nanoseconds."""

    model: str
    created_at: str
    done: bool
    done_reason: NotRequired[str]
    logprobs: NotRequired[list[DrawnToken]]
    total_duration: NotRequired[int]
    load_duration: NotRequired[int]
    prompt_eval_count: NotRequired[int]
    prompt_eval_duration: NotRequired[int]
    eval_count: NotRequired[int]
    eval_duration: NotRequired[int]


class OllamaChat(OllamaEnd):
    message: OllamaAnswer


class OllamaText(OllamaEnd):
    response: str
    thinking: NotRequired[str]


class OllamaDetails(TypedDict):
    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class ListedModel(TypedDict):
    name: str
    model: str
    size: int  # bytes of its weights
    digest: str
    details: OllamaDetails


class TaggedModel(ListedModel):
    modified_at: str


class RunningModel(ListedModel):
    expires_at: str
    size_vram: int  # bytes on a GPU
    context_length: int


class OllamaTags(TypedDict):
    models: list[TaggedModel]


class OllamaRunning(TypedDict):
    models: list[RunningModel]


class OllamaModel(TypedDict):
    modified_at: str
    template: str
    parameters: str
    modelfile: str
    license: str
    details: OllamaDetails
    model_info: Json
    capabilities: list[str]


class OllamaVersion(TypedDict):
    """The version of Ollama whose routes these are, and that of this server."""

    version: str
    rwkv_batch: str
