"""/v1/models: what is served, with adapters and start states. /health: whether the server is ready."""

from robyn import Response

from routes.http.access import authorized
from routes.http.exchange import HttpRequest, json_response
from routes.http.frontend import Frontend
from routes.http.served import Served, list_served, served_in_path
from routes.openai.shapes import Health, ModelName, ServedModel, ServedModels


async def models(front: Frontend, http: HttpRequest) -> Response:
    """GET /v1/models and /openai/v1/models: each model, its adapters and start states. Raises ApiError."""
    listed = [_model(each) for each in await list_served(front, http)]
    found: ServedModels = {"object": "list", "data": listed}
    return json_response(http, found)


async def legacy_models(front: Frontend, http: HttpRequest) -> Response:
    """GET /models: their names, as RWKV-Infer lists them. Raises ApiError."""
    served = await list_served(front, http)
    names: list[ModelName] = [{"object": "models", "id": each.name} for each in served]
    return json_response(http, names)


async def model(front: Frontend, http: HttpRequest) -> Response:
    """GET /v1/models/{id}. Raises ApiError."""
    return json_response(http, _model(await served_in_path(front, http)))


def _model(each: Served) -> ServedModel:
    described: ServedModel = {
        "id": each.name,
        "object": "model",
        "created": int(each.created),
        "owned_by": "rwkv_lightning",
    }
    if each.is_adapter:
        described["parent"] = each.model.model
    return described


async def health(front: Frontend, http: HttpRequest) -> Response:
    """GET /health: 200 when requests are taken, else 503; names the model only to those who may use it."""
    body: Health = {"status": front.status}
    names = list(front.models)
    if names and authorized(front, http):
        body["model"] = names[0]
        if only_ids := [name for name, model in front.models.items() if not model.texts]:
            body["token_ids_only"] = only_ids  # models whose vocabulary is not World's
        if front.loading:
            body["loading"] = [
                {"model": each.model, "stage": each.stage, "progress": round(each.progress, 3)}
                for each in front.loading
            ]
    return json_response(http, body, 200 if body["status"] == "ready" else 503)
