"""The routes that tell what is served and whether it is ready."""

from urllib.parse import unquote

from robyn import Response

from routes.http import auth
from routes.http.errors import ApiError
from routes.http.exchange import Call, json_response
from routes.http.frontend import Frontend


async def models(front: Frontend, call: Call) -> Response:
    """GET /v1/models and /openai/v1/models: the one model. Raises ApiError."""
    return json_response(call, {"object": "list", "data": [_served(front, call)]})


async def model(front: Frontend, call: Call) -> Response:
    """GET /v1/models/{id}. Raises ApiError."""
    served = _served(front, call)
    asked = unquote(call.path.split("/models/", 1)[1].rstrip("/"))
    if asked != served["id"]:
        raise ApiError(
            404,
            f"There is no model {asked[:60]} here; the one that is served is {served['id']}.",
            code="model_not_found",
        )
    return json_response(call, served)


def _served(front: Frontend, call: Call) -> dict:
    auth.demand(front.settings.password, call.header("authorization"), None, call.passwords)
    return {
        "id": front.ready_engine().model,
        "object": "model",
        "created": front.started,
        "owned_by": "rwkv_lightning",
    }


async def health(front: Frontend, call: Call) -> Response:
    """GET /health: 200 when requests are taken, else 503; names the model only to those who may use it."""
    status = front.status
    body = {"status": status}
    engine = front.engine
    if engine and auth.authorized(
        front.settings.password, call.header("authorization"), None, call.passwords
    ):
        body["model"] = engine.model
    return json_response(call, body, 200 if status == "ready" else 503)
