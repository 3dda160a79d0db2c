"""/v1/models: the model that is served. /health: whether the server is ready."""

from urllib.parse import unquote

from robyn import Response

from routes.http.errors import ApiError, Json
from routes.http.exchange import HttpRequest, authorized, demand_password, json_response
from routes.http.frontend import Frontend


async def models(front: Frontend, http: HttpRequest) -> Response:
    """GET /v1/models and /openai/v1/models: the one model. Raises ApiError."""
    return json_response(http, {"object": "list", "data": [_served(front, http)]})


async def model(front: Frontend, http: HttpRequest) -> Response:
    """GET /v1/models/{id}. Raises ApiError."""
    served = _served(front, http)
    asked = unquote(http.path.split("/models/", 1)[1].rstrip("/"))
    if asked != served["id"]:
        raise ApiError(
            404,
            f"There is no model {asked[:60]} here; the one that is served is {served['id']}.",
            code="model_not_found",
        )
    return json_response(http, served)


def _served(front: Frontend, http: HttpRequest) -> Json:
    demand_password(front.settings.password, http)
    return {
        "id": front.ready_engine().model,
        "object": "model",
        "created": front.started,
        "owned_by": "rwkv_lightning",
    }


async def health(front: Frontend, http: HttpRequest) -> Response:
    """GET /health: 200 when requests are taken, else 503; names the model only to those who may use it."""
    body = {"status": front.status}
    engine = front.engine
    if engine and authorized(front.settings.password, http):
        body["model"] = engine.model
    return json_response(http, body, 200 if body["status"] == "ready" else 503)
