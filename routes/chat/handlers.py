"""Handlers of routes that generate, made of the function that makes a request of a body."""

from collections.abc import Callable

from routes.http.errors import Json
from routes.http.exchange import HttpRequest, HttpResponse
from routes.http.frontend import Frontend
from routes.http.generate import Prepared, generate
from routes.http.route import Handler
from rwkv_batch.chat.checkpoints import settings_for
from rwkv_batch.config import FrontendConfig
from rwkv_batch.wire.supervision import EngineInfo


def generates(prepare: Callable[[Json, str], Prepared]) -> Handler:
    """The handler of a route that generates what `prepare` makes of its body and the model's name."""

    async def handler(front: Frontend, http: HttpRequest) -> HttpResponse:
        return await generate(front, http, lambda body, model: prepare(body, model.model))

    return handler


def chats(
    prepare: Callable[[Json, str, FrontendConfig], Prepared],
    is_chat: Callable[[Json], bool] = lambda fields: True,
) -> Handler:
    """A handler of a route that renders chats, in which the configuration has a say.

    `is_chat`: whether it renders one of such a body.
    """

    async def handler(front: Frontend, http: HttpRequest) -> HttpResponse:
        def prepare_chat(body: Json, model: EngineInfo) -> Prepared:
            return prepare(body, model.model, settings_for(model, front.settings))

        return await generate(front, http, prepare_chat, is_chat=is_chat)

    return handler
