"""The table of routes, and the Robyn application that serves it."""

import logging
import traceback
from collections.abc import Awaitable, Callable
from functools import partial

from robyn import Request, Response, Robyn, StreamingResponse
from robyn.argument_parser import Config
from robyn.robyn import HttpMethod

from routes.http.errors import ApiError, native_shape, openai_shape
from routes.http.exchange import Call, Shape, error_response, preflight, read
from routes.http.frontend import Frontend
from routes.http.generate import Kind, generate
from routes.native import (
    batch,
    big_batch,
    fim,
    multi_state,
    session_files,
    sessions,
    state,
    translate,
    v2,
    v3,
)
from routes.openai import chat, completions
from routes.openai.models import health, model, models
from routes.responses import routes as responses
from rwkv_batch.config import FrontendConfig

METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD")
BATCH = Kind(batch.prepare, native_shape)
V2 = Kind(v2.prepare, native_shape)
V3 = Kind(v3.prepare, native_shape)
BIG_BATCH = Kind(big_batch.prepare, native_shape)
STATE = Kind(state.prepare, native_shape)
MULTI_STATE = Kind(multi_state.prepare, native_shape)
FIM = Kind(fim.prepare, native_shape)
CHAT = Kind(chat.prepare, openai_shape)
COMPLETION = Kind(completions.prepare, openai_shape)

log = logging.getLogger(__name__)
Answer = Response | StreamingResponse
Handler = Callable[[Frontend, Call], Awaitable[Answer]]


def v1_chat(call: Call, body: dict | None) -> Kind:
    """`contents` asks for the native batch, `messages` for OpenAI chat; without either the manner of
    authentication tells.
    """
    if not body or ("contents" not in body and "messages" not in body):
        return CHAT if call.header("authorization") else BATCH
    return BATCH if body.get("contents") or "messages" not in body else CHAT


def table(settings: FrontendConfig) -> dict[str, tuple[str, Handler, Shape]]:
    """Path -> methods (separated by a space), handler, shape of errors."""
    translation = Kind(translate.prepare, native_shape, open=not settings.protect_translate)
    return {
        "/v1/chat/completions": ("POST", _generation(v1_chat), native_shape),
        "/openai/v1/chat/completions": ("POST", _generation(lambda call, body: CHAT), openai_shape),
        "/v2/chat/completions": ("POST", _generation(lambda call, body: V2), native_shape),
        "/v3/chat/completions": ("POST", _generation(lambda call, body: V3), native_shape),
        "/big_batch/completions": ("POST", _generation(lambda call, body: BIG_BATCH), native_shape),
        "/state/chat/completions": ("POST", _generation(lambda call, body: STATE), native_shape),
        "/multi_state/chat/completions": ("POST", _generation(lambda call, body: MULTI_STATE), native_shape),
        "/state/status": ("POST", sessions.status, native_shape),
        "/state/delete": ("POST", sessions.delete, native_shape),
        "/v1/state/export": ("GET POST", session_files.export, native_shape),
        "/v1/state/import": ("POST", session_files.import_, native_shape),
        "/v1/state/fork": ("POST", session_files.fork, native_shape),
        "/v1/completions": ("POST", _generation(lambda call, body: COMPLETION), openai_shape),
        "/openai/v1/completions": ("POST", _generation(lambda call, body: COMPLETION), openai_shape),
        "/translate/v1/batch-translate": ("POST", _generation(lambda call, body: translation), native_shape),
        "/FIM/v1/batch-FIM": ("POST", _generation(lambda call, body: FIM), native_shape),
        "/v1/responses": ("POST", responses.create, openai_shape),
        "/v1/responses/:id": ("GET DELETE", responses.stored, openai_shape),
        "/v1/responses/:id/input_items": ("GET", responses.input_items, openai_shape),
        "/openai/v1/responses": ("POST", responses.create, openai_shape),
        "/openai/v1/responses/:id": ("GET DELETE", responses.stored, openai_shape),
        "/openai/v1/responses/:id/input_items": ("GET", responses.input_items, openai_shape),
        "/v1/models": ("GET", models, openai_shape),
        "/v1/models/:id": ("GET", model, openai_shape),
        "/openai/v1/models": ("GET", models, openai_shape),
        "/openai/v1/models/:id": ("GET", model, openai_shape),
        "/health": ("GET", health, native_shape),
    }


def application(front: Frontend, workers: int) -> Robyn:
    """All routes, an answer in JSON to everything else, and OPTIONS everywhere, on `workers` threads."""
    config = Config()
    config.disable_openapi = True
    config.log_level = "WARN"
    config.workers = workers
    app = Robyn(__file__, config)
    routes = table(front.settings)
    for path, (methods, handler, shape) in routes.items():
        for method in served(methods):
            app.add_route(method, path, _endpoint(front, handler, shape))
    for path in ("/", "/*path"):
        for other in METHODS:
            app.add_route(other, path, _endpoint(front, partial(_unknown, routes), native_shape))
        app.add_route("OPTIONS", path, _endpoint(front, _options, native_shape))
        app.add_route(HttpMethod.TRACE, path, _endpoint(front, partial(_unknown, routes), native_shape))
    return app


def served(methods: str) -> list[str]:
    """What a route answers: where there is GET, HEAD too."""
    return [*methods.split(), "HEAD"] if "GET" in methods else methods.split()


def _generation(choose: Callable[[Call, dict | None], Kind]) -> Handler:
    async def handler(front: Frontend, call: Call) -> Answer:
        return await generate(front, choose, call)

    return handler


def _endpoint(front: Frontend, handler: Handler, shape: Shape) -> Callable[[Request], Awaitable[Answer]]:
    async def endpoint(request: Request) -> Answer:
        call = read(request)
        call.shape = shape
        try:
            return await handler(front, call)
        except ApiError as error:
            return error_response(call, error)
        except Exception as error:  # the message may quote a prompt, so it is not logged
            log.error(
                "%s %s %s: %s\n%s",
                call.method,
                call.path,
                call.id,
                type(error).__name__,
                "".join(traceback.format_tb(error.__traceback__)),
            )
            return error_response(
                call, ApiError(500, "The request could not be answered; this is a fault of the server.")
            )

    return endpoint


async def _options(front: Frontend, call: Call) -> Answer:
    return preflight(call)


async def _unknown(routes: dict[str, tuple[str, Handler, Shape]], front: Frontend, call: Call) -> Answer:
    path = call.path.rstrip("/") or "/"
    if path.startswith(("/v1/", "/openai/")):
        call.shape = openai_shape
    entry = next((entry for known, entry in routes.items() if _matches(known, path)), None)
    if entry is None:
        return error_response(
            call, ApiError(404, f"There is no {call.path[:200]} here; the README lists the routes.")
        )
    methods, _, call.shape = entry
    allow = ", ".join([*served(methods), "OPTIONS"])
    return error_response(
        call,
        ApiError(405, f"{path} takes {methods.replace(' ', ' or ')}, not {call.method}."),
        {"Allow": allow},
    )


def _matches(known: str, path: str) -> bool:
    """Whether `path` is one of `known`, in which a part that begins with a colon stands for any text."""
    ours, theirs = known.split("/"), path.split("/")
    return len(ours) == len(theirs) and all(
        a == b or (a.startswith(":") and b) for a, b in zip(ours, theirs, strict=True)
    )
