"""The table of all routes, and the Robyn application that serves it."""

import logging
import traceback
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from robyn import Request, Robyn
from robyn.argument_parser import Config
from robyn.robyn import HttpMethod

from routes.chat.checkpoints import settings_for
from routes.http.errors import ApiError, ErrorShape, Json, native_shape, openai_shape
from routes.http.exchange import HttpRequest, HttpResponse, error_response, preflight
from routes.http.frontend import Frontend
from routes.http.generate import Prepared, generate
from routes.native import (
    adapters,
    batch,
    mixtures,
    model_files,
    requests,
    sessions,
    start_states,
    state,
    translate,
)
from routes.openai import chat, completions, models, tokenizer
from routes.responses import routes as responses
from rwkv_batch.config import FrontendConfig
from rwkv_batch.wire.supervision import EngineInfo

METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", HttpMethod.TRACE)  # Robyn has no name for TRACE

log = logging.getLogger(__name__)
Handler = Callable[[Frontend, HttpRequest], Awaitable[HttpResponse]]


class Route(NamedTuple):
    """One path. A part of it that begins with a colon stands for any text."""

    methods: str  # separated by a space
    path: str
    shape: ErrorShape  # of its errors
    handler: Handler

    def allowed(self) -> list[str]:
        """The methods; where there is GET, HEAD too."""
        return [*self.methods.split(), "HEAD"] if "GET" in self.methods else self.methods.split()

    def matches(self, path: str) -> bool:
        ours, theirs = self.path.split("/"), path.split("/")
        return len(ours) == len(theirs) and all(
            a == b or (a.startswith(":") and b) for a, b in zip(ours, theirs, strict=True)
        )


def chats(prepare: Callable[[Json, str, FrontendConfig], Prepared]) -> Handler:
    """The same for a route that renders chats, which the configuration has a say in."""

    async def handler(front: Frontend, http: HttpRequest) -> HttpResponse:
        def prepare_chat(body: Json, model: EngineInfo) -> Prepared:
            return prepare(body, model.model, settings_for(model, front.settings))

        return await generate(front, http, prepare_chat)

    return handler


def generates(prepare: Callable[[Json, str], Prepared], public: bool = False) -> Handler:
    """The handler of a route that generates what `prepare` makes of its body and the model's name."""

    async def handler(front: Frontend, http: HttpRequest) -> HttpResponse:
        return await generate(front, http, lambda body, model: prepare(body, model.model), public=public)

    return handler


async def v1_chat(front: Frontend, http: HttpRequest) -> HttpResponse:
    """`contents` asks for the native batch, `messages` for OpenAI chat.

    Without either, a request is OpenAI chat if it has an Authorization header.
    """
    body, _ = http.json
    if "contents" in body or "messages" in body:
        is_chat = "messages" in body and not body.get("contents")
    else:
        is_chat = bool(http.headers.get("authorization"))
    if is_chat:
        http.shape = openai_shape
    return await (OPENAI_CHAT if is_chat else RAW_BATCH)(front, http)


OPENAI_CHAT = chats(chat.prepare)
RAW_BATCH = generates(batch.v1)
TRANSLATE = generates(translate.prepare, public=True)

# fmt: off
ROUTES = (
    Route("POST",       "/v1/chat/completions",                 native_shape, v1_chat),
    Route("POST",       "/v1/batch/completions",                native_shape, RAW_BATCH),
    Route("POST",       "/v2/chat/completions",                 native_shape, generates(batch.v2)),
    Route("POST",       "/v3/chat/completions",                 native_shape, chats(batch.v3)),
    Route("POST",       "/big_batch/completions",               native_shape, generates(batch.big_batch)),
    Route("POST",       "/FIM/v1/batch-FIM",                    native_shape, generates(batch.fim)),
    Route("POST",       "/translate/v1/batch-translate",        native_shape, TRANSLATE),
    Route("POST",       "/state/chat/completions",              native_shape, generates(state.session)),
    Route("POST",       "/multi_state/chat/completions",        native_shape, generates(state.tree)),
    Route("POST",       "/state/status",                        native_shape, sessions.status),
    Route("POST",       "/state/delete",                        native_shape, sessions.delete),
    Route("GET POST",   "/v1/state/export",                     native_shape, sessions.export),
    Route("POST",       "/v1/state/import",                     native_shape, sessions.import_),
    Route("POST",       "/v1/state/fork",                       native_shape, sessions.fork),
    Route("GET",        "/v1/state/history",                    native_shape, sessions.history),
    Route("POST",       "/v1/state/rewind",                     native_shape, sessions.rewind),
    Route("POST",       "/v1/state/upload",                     native_shape, start_states.upload),
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
    Route("POST",       "/v1/tokens/count",                     native_shape, tokenizer.count),
    Route("GET",        "/health",                              native_shape, models.health),

    Route("POST",       "/openai/v1/chat/completions",          openai_shape, OPENAI_CHAT),
    Route("POST",       "/v1/completions",                      openai_shape, generates(completions.prepare)),
    Route("POST",       "/openai/v1/completions",               openai_shape, generates(completions.prepare)),
    Route("POST",       "/tokenize",                            openai_shape, tokenizer.tokenize),
    Route("POST",       "/detokenize",                          openai_shape, tokenizer.detokenize),
    Route("GET",        "/tokenizer_info",                      openai_shape, tokenizer.info),
    Route("POST",       "/v1/responses",                        openai_shape, responses.create),
    Route("POST",       "/openai/v1/responses",                 openai_shape, responses.create),
    Route("GET DELETE", "/v1/responses/:id",                    openai_shape, responses.stored),
    Route("GET DELETE", "/openai/v1/responses/:id",             openai_shape, responses.stored),
    Route("GET",        "/v1/responses/:id/input_items",        openai_shape, responses.input_items),
    Route("GET",        "/openai/v1/responses/:id/input_items", openai_shape, responses.input_items),
    Route("GET",        "/v1/models",                           openai_shape, models.models),
    Route("GET",        "/openai/v1/models",                    openai_shape, models.models),
    Route("GET",        "/v1/models/:id",                       openai_shape, models.model),
    Route("GET",        "/openai/v1/models/:id",                openai_shape, models.model),
)
# fmt: on


def application(front: Frontend, workers: int) -> Robyn:
    """All routes, errors in JSON for everything else, and OPTIONS everywhere, on `workers` threads."""
    config = Config()
    config.disable_openapi = True
    config.log_level = "WARN"
    config.workers = workers
    app = Robyn(__file__, config)
    for route in ROUTES:
        for method in route.allowed():
            app.add_route(method, route.path, _endpoint(front, route.handler, route.shape))
    for path in ("/", "/*path"):
        for method in METHODS:
            app.add_route(method, path, _endpoint(front, _unknown))
        app.add_route("OPTIONS", path, _endpoint(front, _options))
    return app


def _endpoint(
    front: Frontend, handler: Handler, shape: ErrorShape = native_shape
) -> Callable[[Request], Awaitable[HttpResponse]]:
    async def endpoint(request: Request) -> HttpResponse:
        http = HttpRequest.from_robyn(request, front.settings.max_body, shape)
        try:
            return await handler(front, http)
        except ApiError as error:
            return error_response(http, error)
        except Exception as error:  # the message may quote a prompt, so it is not logged
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

    return endpoint


async def _options(front: Frontend, http: HttpRequest) -> HttpResponse:
    return preflight(http)


async def _unknown(front: Frontend, http: HttpRequest) -> HttpResponse:
    path = http.path.rstrip("/") or "/"
    if path.startswith(("/v1/", "/openai/")):
        http.shape = openai_shape
    route = next((route for route in ROUTES if route.matches(path)), None)
    if route is None:
        raise ApiError(404, f"There is no {http.path[:200]} here; the README lists the routes.")
    http.shape = route.shape
    error = ApiError(405, f"{path} takes {route.methods.replace(' ', ' or ')}, not {http.method}.")
    return error_response(http, error, {"Allow": ", ".join([*route.allowed(), "OPTIONS"])})
