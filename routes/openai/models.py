"""/v1/models: what is served, with adapters and start states. /health: whether the server is ready."""

from urllib.parse import unquote

from robyn import Response

from routes.http.errors import ApiError, Json
from routes.http.exchange import HttpRequest, authorized, demand_password, json_response
from routes.http.frontend import Frontend
from routes.http.served import served


async def models(front: Frontend, http: HttpRequest) -> Response:
    """GET /v1/models and /openai/v1/models: each model, its adapters and start states. Raises ApiError."""
    return json_response(http, {"object": "list", "data": await _served(front, http)})


async def legacy_models(front: Frontend, http: HttpRequest) -> Response:
    """GET /models: their names, as RWKV-Infer lists them. Raises ApiError."""
    served = await _served(front, http)
    return json_response(http, [{"object": "models", "id": each["id"]} for each in served])


async def model(front: Frontend, http: HttpRequest) -> Response:
    """GET /v1/models/{id}. Raises ApiError."""
    listed = {each["id"]: each for each in await _served(front, http)}
    asked = unquote(http.path.split("/models/", 1)[1].rstrip("/"))
    if asked not in listed:
        raise ApiError(
            404,
            f"There is no model {asked[:60]} here; served are {', '.join(list(listed)[:20])}.",
            code="model_not_found",
        )
    return json_response(http, listed[asked])


async def _served(front: Frontend, http: HttpRequest) -> list[Json]:
    demand_password(front.settings.password, http)
    return [
        {"id": each.name, "object": "model", "created": int(each.created), "owned_by": "rwkv_lightning"}
        | ({"parent": each.model.model} if each.is_adapter else {})
        for each in await served(front)
    ]


async def health(front: Frontend, http: HttpRequest) -> Response:
    """GET /health: 200 when requests are taken, else 503; names the model only to those who may use it."""
    body: Json = {"status": front.status}
    names = list(front.models)
    if names and authorized(front.settings.password, http):
        body["model"] = names[0]
        if front.loading:
            body["loading"] = [
                {"model": each.model, "stage": each.stage, "progress": round(each.progress, 3)}
                for each in front.loading
            ]
    return json_response(http, body, 200 if body["status"] == "ready" else 503)
