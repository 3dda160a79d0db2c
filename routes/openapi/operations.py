"""What each route takes and gives, for the document. The fields are those of the schemas that parse them."""

from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, Field

from routes.anthropic.models import ModelsQuery
from routes.anthropic.schemas import CountBody, MessagesBody
from routes.http.schemas import RequestBody
from routes.llama_cpp.schemas import InfillBody
from routes.native.adapters import (
    DeleteAdapterFields,
    LoadLoraFields,
    PutAdapterFields,
    UnloadLoraFields,
)
from routes.native.batch import BatchFields, BigBatchFields, FimFields, V2Fields, V3Fields
from routes.native.mixtures import LoadMixtureFields, WeightFields
from routes.native.model_files import LoadModelFields, ModelFields
from routes.native.requests import RequestFields, ResumeFields
from routes.native.sessions import (
    DeleteFields,
    ExportFields,
    ForkFields,
    HistoryFields,
    ImportFields,
    RewindFields,
    StatusFields,
)
from routes.native.start_states import LoadStateFields, RemoveStateFields, StateIdFields, UploadFields
from routes.native.state import MultiStateFields, StateFields
from routes.native.translate import TranslateFields
from routes.ollama.schemas import OllamaChatBody, OllamaTextBody, ShowBody
from routes.openai.fim import FimBody
from routes.openai.schemas import ChatBody, CompletionBody
from routes.openai.tokenizer import DetokenizeBody, TokenCountBody, TokenizeBody
from routes.responses.schemas import ResponsesBody

JSON, EVENTS, LINES = "application/json", "text/event-stream", "application/x-ndjson"
BYTES, TEXT, HTML, FORM = "application/octet-stream", "text/plain", "text/html", "multipart/form-data"


class Chosen(BaseModel):
    """Which model runs a request. It is read in one place for all routes."""

    model: Annotated[str, Field(description='"<model>", or with an adapter and a start state')] = ""


class ChosenRun(Chosen):
    """Which model runs a request, with which adapter, and in which state it begins."""

    adapter: str | None = None
    adapter_id: str | None = None
    adapter_scale: Literal[1] | None = None
    adapter_version: str | None = None
    state_id: str | None = None
    mrss_gatingweight: list[float] | None = None


class ItemsQuery(BaseModel):
    """The URL parameters of a response's input items."""

    limit: Annotated[int, Field(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"
    after: str = ""


class StreamQuery(BaseModel):
    """The URL parameter of a stored response, which is not streamed again."""

    stream: Literal["false"] = "false"


@dataclass(frozen=True)
class Operation:
    """One route in the document."""

    summary: str
    body: Any = None  # a schema, or a union of schemas
    query: tuple[type[BaseModel], ...] = ()  # whose fields are URL parameters
    chosen: type[BaseModel] | None = None  # what else the body holds
    takes: str = JSON  # the media type of the body
    gives: tuple[str, ...] = (JSON,)  # media types of a reply
    open: bool = False  # whether it needs no password
    errors: tuple[str, ...] = ()  # their schemas, where that is not the one of the route's family

    @property
    def bodies(self) -> list[type[BaseModel]]:
        """The schema of the body, or the members of a union; none if it takes no fields."""
        return [] if self.body is None else list(get_args(self.body)) or [self.body]


def _texts(summary: str, body: Any, gives: tuple[str, ...] = (JSON, EVENTS), open: bool = False) -> Operation:
    """A route that generates."""
    return Operation(summary, body, chosen=ChosenRun, gives=gives, open=open)


RAW = "A batch of raw prompts"
CHAT = _texts("A conversation", ChatBody)
COMPLETION = _texts("Completions, or what stands in front of a suffix", CompletionBody)
RESPONSE = _texts("A response, which may continue an earlier one", ResponsesBody)
INPUT_TOKENS = _texts("How many tokens such an input has", ResponsesBody, gives=(JSON,))
CANCEL = Operation("An error, as a stored response is over")
STORED = Operation("A stored response", query=(StreamQuery,))
ITEMS = Operation("The input of a stored response", query=(ItemsQuery,))
MODELS, MODEL = Operation("What is served"), Operation("One of the models")
BOTH = ("OpenAIError", "AnthropicError")
LINES_OR_JSON = (LINES, JSON)
PAGE_FILES = ("text/javascript", "text/css", "image/svg+xml")

OPERATIONS = {
    "/v1/chat/completions": replace(
        _texts("A conversation, or a batch of raw prompts", ChatBody | BatchFields),
        errors=("OpenAIError", "Error"),
    ),
    "/v1/batch/completions": _texts(RAW, BatchFields),
    "/v2/chat/completions": _texts(f"{RAW} under top-k, then nucleus sampling", V2Fields),
    "/v3/chat/completions": _texts("Questions, each answered on its own, or a conversation", V3Fields),
    "/big_batch/completions": _texts(f"{RAW}, drawn by temperature alone", BigBatchFields),
    "/FIM/v1/batch-FIM": _texts("What stands between prefixes and suffixes", FimFields),
    "/translate/v1/batch-translate": _texts("Translations", TranslateFields, gives=(JSON,), open=True),
    "/state/chat/completions": _texts("A raw prompt that continues a session", StateFields),
    "/multi_state/chat/completions": _texts("A turn in a tree of turns", MultiStateFields),
    "/state/status": Operation("The stored sessions", StatusFields, chosen=Chosen),
    "/state/delete": Operation("Delete a session, or a tree of them", DeleteFields, chosen=Chosen),
    "/v1/state/export": Operation(
        "A session as a file", ExportFields, (ExportFields, Chosen), Chosen, gives=(BYTES,)
    ),
    "/v1/state/import": Operation("A session from a file", query=(ImportFields, Chosen), takes=BYTES),
    "/v1/state/fork": Operation("A copy of a session", ForkFields, chosen=Chosen),
    "/v1/state/history": Operation("The turns of a session", query=(HistoryFields, Chosen)),
    "/v1/state/rewind": Operation("Forget the last turns of a session", RewindFields, chosen=Chosen),
    "/v1/state/upload": Operation("A start state from a file", UploadFields, chosen=Chosen, takes=FORM),
    "/v1/state/list": Operation("The start states of a model", RequestBody, (Chosen,), Chosen),
    "/v1/state/delete": Operation("Delete a start state", StateIdFields, (StateIdFields, Chosen), Chosen),
    "/loadmodel": Operation("Load a checkpoint of --models", LoadModelFields),
    "/removemodel": Operation("Remove a model", ModelFields),
    "/loadstatemodel": Operation("A start state from a file of --models", LoadStateFields, chosen=Chosen),
    "/removestatemodel": Operation("Remove start states", RemoveStateFields, chosen=Chosen),
    "/mrss_loadstatemodel": Operation("A mixture of start states", LoadMixtureFields, chosen=Chosen),
    "/mrss_set_gatingweight": Operation("The weights of a mixture", WeightFields, chosen=Chosen),
    "/v1/load_lora_adapter": Operation("Load an adapter", LoadLoraFields, chosen=Chosen, gives=(TEXT,)),
    "/v1/unload_lora_adapter": Operation("Unload an adapter", UnloadLoraFields, chosen=Chosen, gives=(TEXT,)),
    "/v1/adapters": Operation("The adapters of a model", query=(Chosen,)),
    "POST /v1/adapters": Operation("Load an adapter", PutAdapterFields, chosen=Chosen),
    "DELETE /v1/adapters": Operation("Unload an adapter", DeleteAdapterFields, chosen=Chosen),
    "/models": replace(MODELS, summary="The names of what is served"),
    "/v1/server/status": Operation("The requests that wait, run or are paused", open=True),
    "/v1/server/stop": Operation("End the texts of a request", RequestFields),
    "/v1/server/pause": Operation("Pause a request", RequestFields),
    "/v1/server/resume": Operation("Have a paused request go on", ResumeFields, gives=(JSON, EVENTS)),
    "/health": Operation("Whether requests are taken", open=True),
    "/openai/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETION,
    "/openai/v1/completions": COMPLETION,
    "/v1/responses": RESPONSE,
    "/openai/v1/responses": RESPONSE,
    "/v1/fim/completions": _texts("What stands between a prompt and a suffix", FimBody),
    "/v1/responses/input_tokens": INPUT_TOKENS,
    "/openai/v1/responses/input_tokens": INPUT_TOKENS,
    "/v1/responses/:id/cancel": CANCEL,
    "/openai/v1/responses/:id/cancel": CANCEL,
    "/v1/responses/:id": STORED,
    "/openai/v1/responses/:id": STORED,
    "/v1/responses/:id/input_items": ITEMS,
    "/openai/v1/responses/:id/input_items": ITEMS,
    "/v1/models": replace(
        MODELS,
        summary="What is served; with the header anthropic-version in pages, as Anthropic's clients ask",
        query=(ModelsQuery,),
        errors=BOTH,
    ),
    "/openai/v1/models": MODELS,
    "/v1/models/:id": replace(MODEL, errors=BOTH),
    "/openai/v1/models/:id": MODEL,
    "/v1/messages": _texts("A conversation, as Anthropic's clients ask", MessagesBody),
    "/v1/messages/count_tokens": _texts("The tokens of such a conversation", CountBody, gives=(JSON,)),
    "/api/chat": _texts("A conversation, as Ollama's clients ask", OllamaChatBody, gives=LINES_OR_JSON),
    "/api/generate": _texts("One prompt, as Ollama's clients ask", OllamaTextBody, gives=LINES_OR_JSON),
    "/api/tags": replace(MODELS, summary="What is served, as Ollama's clients ask"),
    "/api/ps": replace(MODELS, summary="What is loaded, as Ollama's clients ask"),
    "/api/show": Operation("What is known of a model", ShowBody, chosen=Chosen),
    "/api/version": Operation("The version of the server"),
    "/infill": _texts("What stands between a prefix and a suffix, for editors", InfillBody),
    "/tokenize": Operation("The token ids of a text or conversation", TokenizeBody, chosen=Chosen),
    "/detokenize": Operation("The text of token ids", DetokenizeBody, chosen=Chosen),
    "/tokenizer_info": Operation("What tokenizes, and the chat template"),
    "/v1/tokens/count": Operation("How many tokens texts have", TokenCountBody, chosen=Chosen),
    "/metrics": Operation("What is counted, for Prometheus", gives=(TEXT,)),
    "/stats": Operation("Some of it, for people"),
    "/": Operation("The page for browsers, the routes for programs", gives=(JSON, HTML), open=True),
    "/page/:file": Operation("A file of the page", gives=PAGE_FILES, open=True),
    "/openapi.json": Operation("This document"),
    "/docs": Operation("This document as a page", gives=(HTML,)),
}


def operation(method: str, path: str) -> Operation:
    """That of a method of a route, or of all of the route's. Raises KeyError."""
    return OPERATIONS.get(f"{method} {path}") or OPERATIONS[path]
