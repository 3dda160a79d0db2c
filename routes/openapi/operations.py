"""What each route takes and gives, for the document. The fields are those of the schemas that parse them."""

from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, Field

from routes.anthropic.models import ModelsQuery
from routes.anthropic.schemas import CountBody, MessagesBody
from routes.anthropic.shapes import AnsweredMessage, AnthropicModel, AnthropicModels, MessageTokens
from routes.batches.files import MOST_LISTED, FileFields
from routes.batches.handlers import BatchBody
from routes.batches.shapes import BatchList, BatchObject, DeletedFile, FileList, FileObject
from routes.http.adapters import MOST_SCALE
from routes.http.errors import Json
from routes.http.schemas import RequestBody
from routes.llama_cpp.schemas import InfillBody
from routes.llama_cpp.shapes import InfillText
from routes.native.adapters import (
    DeleteAdapterFields,
    LoadLoraFields,
    PutAdapterFields,
    UnloadLoraFields,
)
from routes.native.batch import BatchFields, BigBatchFields, FimFields, V2Fields, V3Fields
from routes.native.cluster import FetchFields
from routes.native.metrics import MetricsQuery
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
from routes.native.shapes import (
    DeletedAdapter,
    DeletedState,
    Done,
    DoneSession,
    KeyUsage,
    ListedAdapter,
    ListedAdapters,
    ListedStates,
    Live,
    NativeTexts,
    PausedNow,
    Ready,
    RewoundSession,
    ServerIndex,
    ServerStats,
    ServerStatus,
    SessionTurns,
    StoppedRequest,
    StoredSessions,
    TurnTexts,
    UploadedState,
)
from routes.native.start_states import LoadStateFields, RemoveStateFields, StateIdFields, UploadFields
from routes.native.state import MultiStateFields, StateFields
from routes.native.usage import UsageQuery
from routes.ollama.schemas import OllamaChatBody, OllamaTextBody, ShowBody
from routes.ollama.shapes import (
    OllamaChat,
    OllamaModel,
    OllamaRunning,
    OllamaTags,
    OllamaText,
    OllamaVersion,
)
from routes.openai.fim import FimBody
from routes.openai.schemas import ChatBody, CompletionBody
from routes.openai.shapes import (
    ChatCompletion,
    Health,
    ModelName,
    ServedModel,
    ServedModels,
    TextCompletion,
    TextTokens,
    TokenizerInfo,
    TokenNumber,
    TokensText,
)
from routes.openai.tokenizer import DetokenizeBody, TokenCountBody, TokenizeBody
from routes.page.defaults import PageDefaults
from routes.responses.schemas import ResponsesBody
from routes.responses.shapes import DeletedResponse, InputItems, InputTokenCount, MadeResponse
from routes.translate.glossaries import GlossaryFields
from routes.translate.multilingual import (
    ChangeFields,
    MultilingualFields,
    OpenPairQuery,
    PairQuery,
    ReplaceFields,
)
from routes.translate.schemas import (
    AnyTranslation,
    DeepLFields,
    DetectFields,
    GoogleDetectFields,
    GoogleFields,
    GoogleLanguagesFields,
    GoogleWebFields,
    LanguagesQuery,
    MTranServerBatchFields,
    OpenName,
    TargetName,
    TextOrTexts,
    TranslateFields,
)
from routes.translate.shapes import (
    AnyTranslated,
    DeepLGlossaries,
    DeepLGlossary,
    DeepLLanguage,
    DeepLPairs,
    DeepLTexts,
    DeepLUsage,
    DetectedLanguage,
    DictionaryList,
    GlossaryDictionary,
    GoogleDetections,
    GoogleLanguages,
    GoogleTexts,
    GoogleWebText,
    LibreTranslateLanguage,
    MTranServerTexts,
    MultilingualGlossaries,
    MultilingualGlossary,
    TranslatedTexts,
)

JSON, EVENTS, LINES = "application/json", "text/event-stream", "application/x-ndjson"
BYTES, TEXT, HTML, FORM = "application/octet-stream", "text/plain", "text/html", "multipart/form-data"


class Chosen(RequestBody):
    """Which model runs a request. It is read in one place for all routes."""

    model: Annotated[str, Field(description='"<model>", or with an adapter and a start state')] = ""


class ChosenRun(Chosen):
    """Which model runs a request, with which adapter, and in which state it begins."""

    adapter: str | None = None
    adapter_id: str | None = None
    adapter_scale: Annotated[float, Field(ge=-MOST_SCALE, le=MOST_SCALE)] | None = None
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


class GoogleQuery(BaseModel):
    """The URL parameters of a translation, as Google takes them."""

    q: TextOrTexts
    target: TargetName
    source: OpenName = None
    format: Literal["text", "html"] = "html"


class GoogleWebQuery(BaseModel):
    """The URL parameters of a translation, as browser extensions ask Google's page."""

    client: str = "gtx"
    sl: OpenName = None
    tl: TargetName
    dt: Literal["t"] = "t"
    dj: Literal["0", "1"] = "0"
    q: str


class FilesQuery(BaseModel):
    """The URL parameters of the list of files."""

    purpose: Literal["batch", "batch_output"] | None = None
    limit: Annotated[int, Field(ge=1, le=MOST_LISTED)] = MOST_LISTED
    order: Literal["asc", "desc"] = "desc"
    after: str = ""


class BatchesQuery(ItemsQuery):
    """The URL parameters of the list of batches."""


@dataclass(frozen=True)
class Operation:
    """One route in the document."""

    summary: str
    body: Any = None  # a schema, or a union of schemas
    reply: Any = None  # the type of a JSON reply
    query: tuple[type[BaseModel], ...] = ()  # whose fields are URL parameters
    chosen: type[BaseModel] | None = None  # what else the body holds
    takes: str = JSON  # the media type of the body
    gives: tuple[str, ...] = (JSON,)  # media types of a reply
    open: bool = False  # whether it needs no password
    status: int = 200  # of a reply
    errors: tuple[str, ...] = ()  # their schemas, where that is not the one of the route's family

    @property
    def bodies(self) -> list[type[BaseModel]]:
        """The schema of the body, or the members of a union; none if it takes no fields."""
        return [] if self.body is None else list(get_args(self.body)) or [self.body]


def _texts(summary: str, body: Any, reply: Any, gives: tuple[str, ...] = (JSON, EVENTS)) -> Operation:
    """A route that generates."""
    return Operation(summary, body, reply, chosen=ChosenRun, gives=gives)


def _translates(summary: str, body: Any, reply: Any) -> Operation:
    return Operation(summary, body, reply, chosen=ChosenRun, open=True)


def _on_both(operations: dict[str, Operation]) -> dict[str, Operation]:
    """The operations, also for the same paths behind /openai."""
    return operations | {path.replace("/v1/", "/openai/v1/", 1): each for path, each in operations.items()}


RAW = "A batch of raw prompts"
CHAT = _texts("A conversation", ChatBody, ChatCompletion)
COMPLETION = _texts("Completions, or what stands in front of a suffix", CompletionBody, TextCompletion)
RESPONSE = _texts("A response, which may continue an earlier one", ResponsesBody, MadeResponse)
COUNT = _texts("How many tokens such an input has", ResponsesBody, InputTokenCount, gives=(JSON,))
CANCEL = Operation("An error, as a stored response is over", reply=MadeResponse)
STORED = Operation("A stored response", reply=MadeResponse, query=(StreamQuery,))
FORGET = Operation("Delete a stored response", reply=DeletedResponse, query=(StreamQuery,))
ITEMS = Operation("The input of a stored response", reply=InputItems, query=(ItemsQuery,))
MODELS = Operation("What is served", reply=ServedModels)
MODEL = Operation("One of the models", reply=ServedModel)
BOTH = ("OpenAIError", "AnthropicError")
LINES_OR_JSON = (LINES, JSON)
PAGE_FILES = ("text/javascript", "text/css", "image/svg+xml")

OPERATIONS = {
    "/v1/chat/completions": replace(
        _texts(
            "A conversation, or a batch of raw prompts", ChatBody | BatchFields, ChatCompletion | NativeTexts
        ),
        errors=("OpenAIError", "Error"),
    ),
    "/v1/batch/completions": _texts(RAW, BatchFields, NativeTexts),
    "/v2/chat/completions": _texts(f"{RAW} under top-k, then nucleus sampling", V2Fields, NativeTexts),
    "/v3/chat/completions": _texts(
        "Questions, each answered on its own, or a conversation", V3Fields, NativeTexts
    ),
    "/big_batch/completions": _texts(f"{RAW}, drawn by temperature alone", BigBatchFields, NativeTexts),
    "/FIM/v1/batch-FIM": _texts("What stands between prefixes and suffixes", FimFields, NativeTexts),
    "/translate/v1/batch-translate": _translates(
        "Translations, as Immersive Translate asks", TranslateFields, TranslatedTexts
    ),
    "/translate": replace(
        _translates(
            "Translations, as LibreTranslate, DeepLX, MTranServer, kiss-translator or hcfy asks",
            AnyTranslation,
            AnyTranslated,
        ),
        errors=("Error", "DeepLError"),
    ),
    "/translate/batch": _translates(
        "Translations, as MTranServer asks", MTranServerBatchFields, MTranServerTexts
    ),
    "/v2/translate": _translates("Translations, as DeepL asks", DeepLFields, DeepLTexts),
    "/v2/languages": Operation(
        "The languages, as DeepL lists them", reply=list[DeepLLanguage], query=(LanguagesQuery,), open=True
    ),
    "/v2/usage": Operation("What was translated, as DeepL counts", reply=DeepLUsage, open=True),
    "/languages": Operation(
        "The languages, as LibreTranslate lists them", reply=list[LibreTranslateLanguage], open=True
    ),
    "/detect": Operation(
        "The language of a text, as LibreTranslate or MTranServer asks",
        DetectFields,
        list[DetectedLanguage],
        open=True,
    ),
    "GET /v2/glossaries": Operation("The stored glossaries, as DeepL lists them", reply=DeepLGlossaries),
    "POST /v2/glossaries": Operation(
        "Store a glossary, as DeepL's clients do", GlossaryFields, DeepLGlossary, status=201
    ),
    "GET /v2/glossaries/:id": Operation("A stored glossary", reply=DeepLGlossary),
    "DELETE /v2/glossaries/:id": Operation("Delete a stored glossary", gives=(), status=204),
    "/v2/glossaries/:id/entries": Operation(
        "The entries of a stored glossary", gives=("text/tab-separated-values",)
    ),
    "GET /v3/glossaries": Operation(
        "The stored glossaries of several pairs of languages, as DeepL lists them",
        reply=MultilingualGlossaries,
    ),
    "POST /v3/glossaries": Operation(
        "Store a glossary of several pairs of languages, as DeepL's clients do",
        MultilingualFields,
        MultilingualGlossary,
        status=201,
    ),
    "GET /v3/glossaries/:id": Operation(
        "A stored glossary of several pairs of languages", reply=MultilingualGlossary
    ),
    "PATCH /v3/glossaries/:id": Operation(
        "Another name for a stored glossary, and further terms", ChangeFields, MultilingualGlossary
    ),
    "DELETE /v3/glossaries/:id": Operation("Delete a stored glossary", gives=(), status=204),
    "/v3/glossaries/:id/entries": Operation(
        "The terms of a stored glossary for a pair of languages",
        reply=DictionaryList,
        query=(OpenPairQuery,),
    ),
    "PUT /v3/glossaries/:id/dictionaries": Operation(
        "Other terms for a pair of languages of a stored glossary", ReplaceFields, GlossaryDictionary
    ),
    "DELETE /v3/glossaries/:id/dictionaries": Operation(
        "Delete the terms for a pair of languages", query=(PairQuery,), gives=(), status=204
    ),
    "/v2/glossary-language-pairs": Operation(
        "For which languages glossaries can be, as DeepL lists them", reply=DeepLPairs, open=True
    ),
    "/language/translate/v2": replace(
        _translates("Translations, as Google asks", GoogleFields, GoogleTexts), query=(GoogleQuery,)
    ),
    "/translate_a/single": replace(
        _translates("A translation, as browser extensions ask Google's page", GoogleWebFields, GoogleWebText),
        query=(GoogleWebQuery,),
    ),
    "/language/translate/v2/languages": Operation(
        "The languages, as Google lists them",
        GoogleLanguagesFields,
        GoogleLanguages,
        query=(GoogleLanguagesFields,),
        open=True,
    ),
    "/language/translate/v2/detect": Operation(
        "The languages of texts, as Google asks",
        GoogleDetectFields,
        GoogleDetections,
        query=(GoogleDetectFields,),
        open=True,
    ),
    "/state/chat/completions": _texts("A raw prompt that continues a session", StateFields, NativeTexts),
    "/multi_state/chat/completions": _texts("A turn in a tree of turns", MultiStateFields, TurnTexts),
    "/state/status": Operation("The stored sessions", StatusFields, StoredSessions, chosen=Chosen),
    "/state/delete": Operation("Delete a session, or a tree of them", DeleteFields, Done, chosen=Chosen),
    "/v1/state/export": Operation(
        "A session as a file", ExportFields, query=(ExportFields, Chosen), chosen=Chosen, gives=(BYTES,)
    ),
    "/v1/state/import": Operation(
        "A session from a file", reply=DoneSession, query=(ImportFields, Chosen), takes=BYTES
    ),
    "/v1/state/fork": Operation("A copy of a session", ForkFields, DoneSession, chosen=Chosen),
    "/v1/state/history": Operation(
        "The turns of a session", reply=SessionTurns, query=(HistoryFields, Chosen)
    ),
    "/v1/state/rewind": Operation(
        "Forget the last turns of a session", RewindFields, RewoundSession, chosen=Chosen
    ),
    "/v1/state/upload": Operation(
        "A start state from a file", UploadFields, UploadedState, chosen=Chosen, takes=FORM
    ),
    "/v1/state/list": Operation("The start states of a model", Chosen, ListedStates, (Chosen,)),
    "/v1/state/delete": Operation(
        "Delete a start state", StateIdFields, DeletedState, (StateIdFields, Chosen), Chosen
    ),
    "/loadmodel": Operation("Load a checkpoint of --models", LoadModelFields, Done),
    "/removemodel": Operation("Remove a model", ModelFields, Done),
    "/loadstatemodel": Operation(
        "A start state from a file of --models", LoadStateFields, Done, chosen=Chosen
    ),
    "/removestatemodel": Operation("Remove start states", RemoveStateFields, Done, chosen=Chosen),
    "/mrss_loadstatemodel": Operation("A mixture of start states", LoadMixtureFields, Done, chosen=Chosen),
    "/mrss_set_gatingweight": Operation("The weights of a mixture", WeightFields, Done, chosen=Chosen),
    "/v1/load_lora_adapter": Operation("Load an adapter", LoadLoraFields, chosen=Chosen, gives=(TEXT,)),
    "/v1/unload_lora_adapter": Operation("Unload an adapter", UnloadLoraFields, chosen=Chosen, gives=(TEXT,)),
    "/v1/adapters": Operation("The adapters of a model", reply=ListedAdapters, query=(Chosen,)),
    "POST /v1/adapters": Operation("Load an adapter", PutAdapterFields, ListedAdapter, chosen=Chosen),
    "DELETE /v1/adapters": Operation("Unload an adapter", DeleteAdapterFields, DeletedAdapter, chosen=Chosen),
    "/models": Operation("The names of what is served", reply=list[ModelName]),
    "/v1/server/status": Operation(
        "The requests that wait, run or are paused", reply=ServerStatus, open=True
    ),
    "/v1/server/stop": Operation("End the texts of a request", RequestFields, StoppedRequest),
    "/v1/server/pause": Operation("Pause a request", RequestFields, PausedNow),
    "/v1/server/resume": Operation(
        "Have a paused request go on", ResumeFields, NativeTexts, gives=(JSON, EVENTS)
    ),
    "/v1/usage": Operation("What a key has used, by model and day", reply=KeyUsage, query=(UsageQuery,)),
    "/health": Operation("Whether requests are taken", reply=Health, open=True),
    "/health/live": Operation("Whether the server's process answers", reply=Live, open=True),
    "/health/ready": Operation(
        "Whether a request would be answered now; 503 with the reason if not", reply=Ready, open=True
    ),
    "/openai/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETION,
    "/openai/v1/completions": COMPLETION,
    "/v1/fim/completions": _texts("What stands between a prompt and a suffix", FimBody, ChatCompletion),
    "/v1/responses": RESPONSE,
    "/openai/v1/responses": RESPONSE,
    "/v1/responses/input_tokens": COUNT,
    "/openai/v1/responses/input_tokens": COUNT,
    "/v1/responses/:id/cancel": CANCEL,
    "/openai/v1/responses/:id/cancel": CANCEL,
    "/v1/responses/:id": STORED,
    "/openai/v1/responses/:id": STORED,
    "DELETE /v1/responses/:id": FORGET,
    "DELETE /openai/v1/responses/:id": FORGET,
    "/v1/responses/:id/input_items": ITEMS,
    "/openai/v1/responses/:id/input_items": ITEMS,
    "/v1/models": Operation(
        "What is served; with the header anthropic-version in pages, as Anthropic's clients ask",
        reply=ServedModels | AnthropicModels,
        query=(ModelsQuery,),
        errors=BOTH,
    ),
    "/openai/v1/models": MODELS,
    "/v1/models/:id": replace(MODEL, reply=ServedModel | AnthropicModel, errors=BOTH),
    "/openai/v1/models/:id": MODEL,
    **_on_both(
        {
            "GET /v1/files": Operation(
                "The files of requests and answers", reply=FileList, query=(FilesQuery,)
            ),
            "POST /v1/files": Operation("A file of requests", FileFields, FileObject, takes=FORM),
            "GET /v1/files/:id": Operation("A file of requests or answers", reply=FileObject),
            "DELETE /v1/files/:id": Operation("Delete a file", reply=DeletedFile),
            "/v1/files/:id/content": Operation("What is in a file", gives=(BYTES,)),
            "GET /v1/batches": Operation("The batches", reply=BatchList, query=(BatchesQuery,)),
            "POST /v1/batches": Operation(
                "Run the requests of a file when nothing else runs", BatchBody, BatchObject
            ),
            "/v1/batches/:id": Operation("How far a batch is", reply=BatchObject),
            "/v1/batches/:id/cancel": Operation("Cancel a batch", reply=BatchObject),
        }
    ),
    "/v1/messages": _texts("A conversation, as Anthropic's clients ask", MessagesBody, AnsweredMessage),
    "/v1/messages/count_tokens": _texts(
        "The tokens of such a conversation", CountBody, MessageTokens, gives=(JSON,)
    ),
    "/api/chat": _texts(
        "A conversation, as Ollama's clients ask", OllamaChatBody, OllamaChat, gives=LINES_OR_JSON
    ),
    "/api/generate": _texts(
        "One prompt, as Ollama's clients ask", OllamaTextBody, OllamaText, gives=LINES_OR_JSON
    ),
    "/api/tags": Operation("What is served, as Ollama's clients ask", reply=OllamaTags),
    "/api/ps": Operation("What is loaded, as Ollama's clients ask", reply=OllamaRunning),
    "/api/show": Operation("What is known of a model", ShowBody, OllamaModel, chosen=Chosen),
    "/api/version": Operation("The version of the server", reply=OllamaVersion),
    "/infill": _texts("What stands between a prefix and a suffix, for editors", InfillBody, InfillText),
    "/tokenize": Operation(
        "The token ids of a text or conversation", TokenizeBody, TextTokens, chosen=Chosen
    ),
    "/detokenize": Operation("The text of token ids", DetokenizeBody, TokensText, chosen=Chosen),
    "/tokenizer_info": Operation("What tokenizes, and the chat template", reply=TokenizerInfo),
    "/v1/tokens/count": Operation("How many tokens texts have", TokenCountBody, TokenNumber, chosen=Chosen),
    "/cluster/state": Operation(
        "The state of a turn, for other servers of a cluster", query=(FetchFields, Chosen), gives=(BYTES,)
    ),
    "/metrics": Operation("What is counted, for Prometheus", gives=(TEXT,), query=(MetricsQuery,)),
    "/stats": Operation("Some of it, for people", reply=ServerStats),
    "/": Operation(
        "The page for browsers, the routes for programs", reply=ServerIndex, gives=(JSON, HTML), open=True
    ),
    "/page/:file": Operation("A file of the page", gives=PAGE_FILES, open=True),
    "/page/defaults.json": Operation(
        "How the chats of a model are drawn where a request does not say it",
        reply=PageDefaults,
        query=(Chosen,),
    ),
    "/page/vendor/:file": Operation(
        "A module of somebody else, which the page uses", gives=("text/javascript",), open=True
    ),
    "/openapi.json": Operation("This document", reply=Json),
    "/docs": Operation("This document as a page", gives=(HTML,)),
}


def operation(method: str, path: str) -> Operation:
    """That of a method of a route, or of all of the route's. Raises KeyError."""
    return OPERATIONS.get(f"{method} {path}") or OPERATIONS[path]
