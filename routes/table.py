"""The table of all routes, and the Robyn application that serves it."""

import logging
import traceback
from collections.abc import Awaitable, Callable
from functools import cache, partial
from inspect import unwrap

from robyn import Request, Robyn
from robyn.argument_parser import Config
from robyn.robyn import FunctionInfo, HttpMethod

from routes.anthropic import messages
from routes.anthropic import models as anthropic_models
from routes.anthropic.models import for_anthropic
from routes.batches import files as batch_files
from routes.batches import handlers as batches
from routes.callers.caller import Caller
from routes.chat.handlers import chats, generates
from routes.direct import send_directly
from routes.errors import disk_error
from routes.guard.reads import Guard
from routes.http.access import demand_access
from routes.http.counts import OTHER
from routes.http.errors import (
    ApiError,
    ErrorShape,
    Json,
    anthropic_shape,
    native_shape,
    ollama_shape,
    openai_shape,
)
from routes.http.exchange import (
    HttpRequest,
    HttpResponse,
    audit_entry,
    error_response,
    html_response,
    json_response,
    preflight,
)
from routes.http.frontend import Frontend
from routes.http.route import Handler, Route
from routes.llama_cpp import infill
from routes.native import (
    adapters,
    batch,
    cluster,
    health,
    index,
    metrics,
    mixtures,
    model_files,
    requests,
    sessions,
    start_states,
    state,
    usage,
)
from routes.ollama import models as ollama_models
from routes.ollama import prepare as ollama
from routes.openai import chat, completions, fim, models, tokenizer
from routes.openapi import page
from routes.openapi.document import document
from routes.page import defaults as page_defaults
from routes.page import files
from routes.responses import routes as responses
from routes.translate import glossaries, google, multilingual, offline_reader, wires
from routes.translate import handlers as translate
from routes.translate.errors import deepl_shape, google_shape, plain_shape
from routes.unserved import of_other_servers

METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", HttpMethod.TRACE)  # Robyn has no name for TRACE

# How the errors of paths look that are no route's.
FAMILIES: tuple[tuple[str, ErrorShape], ...] = (
    ("/v1/messages", anthropic_shape),
    ("/v1/", openai_shape),
    ("/openai/", openai_shape),
    ("/api/", ollama_shape),
    ("/v2/", deepl_shape),
    ("/v3/glossaries", deepl_shape),
    ("/language/", google_shape),
    ("/translate_a/", google_shape),
)

MOST_PARTS = 8  # of a path that is not served, in whose end a route is looked for

log = logging.getLogger(__name__)


def either(get: Handler, post: Handler) -> Handler:
    """The handler of a path that lists and creates."""

    async def handler(front: Frontend, http: HttpRequest) -> HttpResponse:
        return await (post if http.method == "POST" else get)(front, http)

    return handler


async def v1_chat(front: Frontend, http: HttpRequest) -> HttpResponse:
    """`contents` asks for the native batch, everything else is OpenAI chat, also a body that is broken."""
    body, _ = http.json
    if "metadata" in body and offline_reader.is_translation(body):
        return await offline_reader.translate_page(front, http)
    if "contents" in body and (body["contents"] or "messages" not in body):
        http.shape = native_shape
        return await RAW_BATCH(front, http)
    return await OPENAI_CHAT(front, http)


async def root(front: Frontend, http: HttpRequest) -> HttpResponse:
    """GET /: the page for browsers, the routes for programs."""
    if front.settings.page and files.prefers_html(http.headers.get("accept") or ""):
        return files.index(http)
    methods: dict[str, list[str]] = {}
    for route in ROUTES:
        methods.setdefault(route.path, []).extend(route.methods.split())
    return index.describe(front, http, methods)


async def openapi(front: Frontend, http: HttpRequest) -> HttpResponse:
    """GET /openapi.json: what all routes take and give. Raises ApiError."""
    return json_response(http, _described(front, http))


async def docs(front: Frontend, http: HttpRequest) -> HttpResponse:
    """GET /docs: the same as a page. Raises ApiError."""
    return html_response(http, page.render(_described(front, http)), page.POLICY)


def _described(front: Frontend, http: HttpRequest) -> Json:
    demand_access(front, http)
    return _document(front.guarded, front.settings.protect_translate)


@cache
def _document(guarded: bool, protect_translate: bool) -> Json:
    """It takes a tenth of a second to make."""
    return document(ROUTES, guarded, TRANSLATIONS if protect_translate else [])


OPENAI_CHAT = chats(chat.prepare)
RAW_BATCH = generates(batch.v1)
OLLAMA_CHAT = ollama_models.untagged(chats(ollama.chat))
OLLAMA_TEXT = ollama_models.untagged(chats(ollama.text, ollama.is_chat))
MODELS = for_anthropic(anthropic_models.models, models.models)
MODEL = for_anthropic(anthropic_models.model, models.model)
IMMERSIVE, DEEPL = translate.translates(wires.IMMERSIVE), translate.translates(wires.DEEPL)
GOOGLE, GOOGLE_WEB = translate.translates(wires.GOOGLE), translate.translates(wires.GOOGLE_WEB)
MTRANSERVER_BATCH = translate.translates(wires.MTRANSERVER_BATCH)
LANGUAGES = translate.libretranslate_languages
MESSAGES, COUNT_TOKENS = chats(messages.prepare), chats(messages.count_tokens)
FILES = either(batch_files.list_, batch_files.create)
BATCHES = either(batches.list_, batches.create)

# fmt: off
ROUTES = (
    Route("POST",       "/v1/chat/completions",                 openai_shape, v1_chat),
    Route("POST",       "/v1/batch/completions",                native_shape, RAW_BATCH),
    Route("POST",       "/v2/chat/completions",                 native_shape, generates(batch.v2)),
    Route("POST",       "/v3/chat/completions",                 native_shape, chats(batch.v3)),
    Route("POST",       "/big_batch/completions",               native_shape, generates(batch.big_batch)),
    Route("POST",       "/FIM/v1/batch-FIM",                    native_shape, generates(batch.fim)),
    Route("POST",       "/translate/v1/batch-translate",        native_shape, IMMERSIVE),
    Route("POST",       "/state/chat/completions",              native_shape, generates(state.session)),
    Route("POST",       "/multi_state/chat/completions",        native_shape, generates(state.tree)),
    Route("POST",       "/state/status",                        native_shape, sessions.status),
    Route("POST",       "/state/delete",                        native_shape, sessions.delete),
    Route("GET POST",   "/v1/state/export",                     native_shape, sessions.export),
    Route("POST",       "/v1/state/import",                     native_shape, sessions.import_, True),
    Route("POST",       "/v1/state/fork",                       native_shape, sessions.fork),
    Route("GET",        "/v1/state/history",                    native_shape, sessions.history),
    Route("POST",       "/v1/state/rewind",                     native_shape, sessions.rewind),
    Route("POST",       "/v1/state/upload",                     native_shape, start_states.upload, True),
    Route("GET POST",   "/v1/state/list",                       native_shape, start_states.list_),
    Route("DELETE POST", "/v1/state/delete",                    native_shape, start_states.delete),
    Route("POST",       "/loadmodel",                           native_shape, model_files.load),
    Route("POST",       "/removemodel",                         native_shape, model_files.remove),
    Route("POST",       "/loadstatemodel",                      native_shape, start_states.load),
    Route("POST",       "/removestatemodel",                    native_shape, start_states.remove),
    Route("POST",       "/mrss_loadstatemodel",                 native_shape, mixtures.load),
    Route("POST",       "/mrss_set_gatingweight",               native_shape, mixtures.set_weights),
    Route("POST",       "/v1/load_lora_adapter",                openai_shape, adapters.load_lora),
    Route("POST",       "/v1/unload_lora_adapter",              openai_shape, adapters.unload_lora),
    Route("GET",        "/v1/adapters",                         native_shape, adapters.list_),
    Route("POST",       "/v1/adapters",                         native_shape, adapters.put),
    Route("DELETE",     "/v1/adapters",                         native_shape, adapters.delete),
    Route("GET",        "/models",                              native_shape, models.legacy_models),
    Route("GET",        "/v1/server/status",                    native_shape, requests.status),
    Route("POST",       "/v1/server/stop",                      native_shape, requests.stop),
    Route("POST",       "/v1/server/pause",                     native_shape, requests.pause),
    Route("POST",       "/v1/server/resume",                    native_shape, requests.resume),
    Route("GET",        "/v1/usage",                            openai_shape, usage.usage),
    Route("GET",        "/openapi.json",                        native_shape, openapi),
    Route("GET",        "/docs",                                native_shape, docs),
    Route("POST",       "/v1/tokens/count",                     native_shape, tokenizer.count),
    Route("GET",        "/health",                              native_shape, models.health),
    Route("GET",        "/health/live",                         native_shape, health.live),
    Route("GET",        "/health/ready",                        native_shape, health.ready),
    Route("GET",        "/cluster/state",                       native_shape, cluster.state),
    Route("GET",        "/metrics",                             native_shape, metrics.metrics),
    Route("GET",        "/stats",                               native_shape, metrics.stats),
    Route("GET",        "/",                                    native_shape, root),
    Route("GET",        "/page/defaults.json",                  native_shape, page_defaults.defaults),
    Route("GET",        "/page/:file",                          native_shape, files.file),
    Route("GET",        "/page/vendor/:file",                   native_shape, files.vendored),

    Route("POST",       "/openai/v1/chat/completions",          openai_shape, OPENAI_CHAT),
    Route("POST",       "/v1/completions",                      openai_shape, generates(completions.prepare)),
    Route("POST",       "/openai/v1/completions",               openai_shape, generates(completions.prepare)),
    Route("POST",       "/v1/fim/completions",                  openai_shape, generates(fim.prepare)),
    Route("POST",       "/tokenize",                            openai_shape, tokenizer.tokenize),
    Route("POST",       "/detokenize",                          openai_shape, tokenizer.detokenize),
    Route("GET",        "/tokenizer_info",                      openai_shape, tokenizer.info),
    Route("POST",       "/v1/responses",                        openai_shape, responses.create),
    Route("POST",       "/openai/v1/responses",                 openai_shape, responses.create),
    Route("POST",       "/v1/responses/input_tokens",           openai_shape, responses.input_tokens),
    Route("POST",       "/openai/v1/responses/input_tokens",    openai_shape, responses.input_tokens),
    Route("POST",       "/v1/responses/:id/cancel",             openai_shape, responses.cancel),
    Route("POST",       "/openai/v1/responses/:id/cancel",      openai_shape, responses.cancel),
    Route("GET DELETE", "/v1/responses/:id",                    openai_shape, responses.stored),
    Route("GET DELETE", "/openai/v1/responses/:id",             openai_shape, responses.stored),
    Route("GET",        "/v1/responses/:id/input_items",        openai_shape, responses.input_items),
    Route("GET",        "/openai/v1/responses/:id/input_items", openai_shape, responses.input_items),
    Route("GET",        "/v1/models",                           openai_shape, MODELS),
    Route("GET",        "/openai/v1/models",                    openai_shape, models.models),
    Route("GET",        "/v1/models/:id",                       openai_shape, MODEL),
    Route("GET",        "/openai/v1/models/:id",                openai_shape, models.model),

    Route("GET POST",   "/v1/files",                            openai_shape, FILES, True),
    Route("GET POST",   "/openai/v1/files",                     openai_shape, FILES, True),
    Route("GET DELETE", "/v1/files/:id",                        openai_shape, batch_files.one),
    Route("GET DELETE", "/openai/v1/files/:id",                 openai_shape, batch_files.one),
    Route("GET",        "/v1/files/:id/content",                openai_shape, batch_files.content),
    Route("GET",        "/openai/v1/files/:id/content",         openai_shape, batch_files.content),
    Route("GET POST",   "/v1/batches",                          openai_shape, BATCHES),
    Route("GET POST",   "/openai/v1/batches",                   openai_shape, BATCHES),
    Route("GET",        "/v1/batches/:id",                      openai_shape, batches.one),
    Route("GET",        "/openai/v1/batches/:id",               openai_shape, batches.one),
    Route("POST",       "/v1/batches/:id/cancel",               openai_shape, batches.cancel),
    Route("POST",       "/openai/v1/batches/:id/cancel",        openai_shape, batches.cancel),

    Route("POST",       "/v1/messages",                         anthropic_shape, MESSAGES),
    Route("POST",       "/v1/messages/count_tokens",            anthropic_shape, COUNT_TOKENS),
    Route("POST",       "/api/chat",                            ollama_shape, OLLAMA_CHAT),
    Route("POST",       "/api/generate",                        ollama_shape, OLLAMA_TEXT),
    Route("GET",        "/api/tags",                            ollama_shape, ollama_models.tags),
    Route("GET",        "/api/ps",                              ollama_shape, ollama_models.running),
    Route("POST",       "/api/show",                            ollama_shape, ollama_models.show),
    Route("POST",       "/translate",                           plain_shape, translate.any_service),
    Route("POST",       "/translate/batch",                     plain_shape, MTRANSERVER_BATCH),
    Route("GET",        "/languages",                           plain_shape, LANGUAGES),
    Route("POST",       "/detect",                              plain_shape, translate.detects),
    Route("POST",       "/v2/translate",                        deepl_shape, DEEPL),
    Route("GET POST",   "/v2/languages",                        deepl_shape, translate.deepl_languages),
    Route("GET POST",   "/v2/usage",                            deepl_shape, translate.deepl_usage),
    Route("GET POST",   "/v2/glossaries",                       deepl_shape, glossaries.collection),
    Route("GET DELETE", "/v2/glossaries/:id",                   deepl_shape, glossaries.one),
    Route("GET",        "/v2/glossaries/:id/entries",           deepl_shape, glossaries.entries),
    Route("GET",        "/v2/glossary-language-pairs",          deepl_shape, glossaries.pairs),
    Route("GET POST",   "/v3/glossaries",                       deepl_shape, multilingual.collection),
    Route("GET PATCH DELETE", "/v3/glossaries/:id",             deepl_shape, multilingual.one),
    Route("GET",        "/v3/glossaries/:id/entries",           deepl_shape, multilingual.entries),
    Route("PUT DELETE", "/v3/glossaries/:id/dictionaries",      deepl_shape, multilingual.dictionaries),
    Route("GET POST",   "/language/translate/v2",               google_shape, GOOGLE),
    Route("GET POST",   "/translate_a/single",                  google_shape, GOOGLE_WEB),
    Route("GET POST",   "/language/translate/v2/languages",     google_shape, google.languages),
    Route("GET POST",   "/language/translate/v2/detect",        google_shape, google.detections),
    Route("POST",       "/infill",                              openai_shape, generates(infill.prepare)),
    Route("GET",        "/api/version",                         ollama_shape, ollama_models.version),
)
# fmt: on
# Which need the password only under --protect-translate.
TRANSLATIONS = [
    route.path
    for route in ROUTES
    if route.shape in (plain_shape, deepl_shape, google_shape) or route.path.startswith("/translate/")
]


def application(front: Frontend, guard: Guard, workers: int) -> Robyn:
    """All routes, errors in JSON for everything else, and OPTIONS everywhere, on `workers` threads."""
    config = Config()
    config.disable_openapi = True
    config.log_level = "WARN"
    config.workers = workers
    app = Robyn(__file__, config)
    for route in ROUTES:
        for method in route.allowed():
            app.add_route(method, route.path, _endpoint(front, guard, route.handler, route.shape, route.path))
    taken = _route_of("/")
    for path in ("/", "/*path"):
        for method in METHODS:
            if path != "/" or taken is None or method not in taken.allowed():
                app.add_route(method, path, _endpoint(front, guard, _unknown))
        app.add_route("OPTIONS", path, _endpoint(front, guard, _options))
    _call_directly(app)
    return app


def _call_directly(app: Robyn) -> None:
    """Have endpoints called with the request, and nothing else.

    Robyn's own function in front of each reads everything of a request first, also copies of its body, as
    parameters of the endpoint may stand for that.
    """
    routes = app.router.routes
    for place, route in enumerate(routes):
        ours = FunctionInfo(unwrap(route.function.handler), True, 1, route.function.args, {})
        routes[place] = route._replace(function=ours)


def _endpoint(
    front: Frontend, guard: Guard, handler: Handler, shape: ErrorShape = native_shape, path: str = ""
) -> Callable[[Request], Awaitable[HttpResponse]]:
    async def endpoint(request: Request) -> HttpResponse:
        http = HttpRequest.from_robyn(request, front.settings.max_body, shape)
        if front.audit:
            http.caller = Caller(hashes=True)
        if front.tracing:
            context = (http.headers.get(name) for name in ("traceparent", "tracestate"))
            http.caller.trace = front.tracing.begin(*context)
            http.caller.headers |= http.caller.trace.headers
        seen = front.seen_by(http.caller) if front.metered else front
        http.count = partial(_answered, front, path or _label_of(http.path))
        reply = await _reply(seen, http, handler)
        if not http.note.old:
            return reply
        return await send_directly(guard, http, reply, front.settings.send_timeout)

    return endpoint


def _answered(front: Frontend, path: str, http: HttpRequest, status: int) -> None:
    """Count a request whose reply has been made, and note it in the audit log."""
    front.shared.answered.add(path, http.method, status)
    if front.tracing and (trace := http.caller.trace) and trace.requests:
        served = http.caller.served
        front.tracing.end(trace, path, status, (served.prompt_tokens, served.completion_tokens))
    if front.audit and http.caller.served.model:
        front.audit.add(audit_entry(http, status))


async def _reply(front: Frontend, http: HttpRequest, handler: Handler) -> HttpResponse:
    """What `handler` replies, or the error that it raises."""
    try:
        if http.note.status:
            raise ApiError(http.note.status, http.note.message)
        return await handler(front, http)
    except ApiError as error:
        return error_response(http, error)
    except Exception as error:  # the message may quote a prompt, so it is not logged
        if refusal := disk_error(error):
            log.error("%s %s %s: %s", http.method, http.path, http.id, refusal.message)
            return error_response(http, refusal)
        log.error(
            "%s %s %s: %s\n%s",
            http.method,
            http.path,
            http.id,
            type(error).__name__,
            "".join(traceback.format_tb(error.__traceback__)),
        )
        return error_response(
            http, ApiError(500, "The request could not be answered; this is a fault of the server.")
        )


async def _options(front: Frontend, http: HttpRequest) -> HttpResponse:
    return preflight(http)


async def _unknown(front: Frontend, http: HttpRequest) -> HttpResponse:
    path = http.path.rstrip("/") or "/"
    http.shape = next((shape for start, shape in FAMILIES if path.startswith(start)), native_shape)
    if why := of_other_servers(path):
        raise ApiError(404, f"There is no {path[:200]} here: {why}.")
    route = _route_of(path)
    if route is None:
        raise _misplaced(http)
    http.shape = route.shape
    error = ApiError(405, f"{path} takes {route.methods.replace(' ', ' or ')}, not {http.method}.")
    return error_response(http, error, {"Allow": ", ".join([*route.allowed(), "OPTIONS"])})


def _misplaced(http: HttpRequest) -> ApiError:
    """The error for a path that is not served: mostly that of a client whose base URL is wrong.

    It lacks /v1, has it twice, or has the rest of a path, to which the client appends its own.
    """
    parts = [part for part in http.path.split("/") if part][-MOST_PARTS:]
    for start in range(len(parts)):
        for front in ("/v1/", "/"):
            meant = front + "/".join(parts[start:])
            if why := of_other_servers(meant):
                return ApiError(404, f"There is no {http.path[:200]} here: {why}.")
            if route := _route_of(meant):
                http.shape = route.shape
                way = f"the client's base URL should lead to {meant[:200]}"
                return ApiError(404, f"There is no {http.path[:200]} here; {way}.")
    return ApiError(404, f"There is no {http.path[:200]} here; GET / lists the routes.")


def takes_file(path: str) -> bool:
    """Whether a body at that path may be as large as a file."""
    route = _route_of(path)
    return route is not None and route.takes_file


def _label_of(path: str) -> str:
    """Under which requests are counted: a bounded number of names, for any paths."""
    route = _route_of(path)
    return route.path if route else OTHER


def _route_of(path: str) -> Route | None:
    """The route of a path, which may end with a slash."""
    path = path.rstrip("/") or "/"
    return next((route for route in ROUTES if route.matches(path)), None)
