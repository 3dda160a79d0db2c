"""The routes that tell what is served and whether it is ready."""
from robyn import Response

from routes import auth
from routes.frontend import Frontend
from routes.http import Call, json_response


async def models(front: Frontend, call: Call) -> Response:
    """GET /v1/models and /openai/v1/models: the one model. Raises ApiError."""
    auth.demand(front.settings.password, call.header("authorization"), None, call.passwords)
    model = front.ready_engine().model
    return json_response(call, {"object": "list", "data": [
        {"id": model, "object": "model", "created": front.started, "owned_by": "rwkv_lightning"}]})


async def health(front: Frontend, call: Call) -> Response:
    """GET /health: 200 when requests are taken, else 503; names the model only to those who may use it."""
    status = front.status
    body = {"status": status}
    engine = front.engine
    if engine and auth.authorized(front.settings.password, call.header("authorization"), None, call.passwords):
        body["model"] = engine.model
    return json_response(call, body, 200 if status == "ready" else 503)
