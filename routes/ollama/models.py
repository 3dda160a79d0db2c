"""/api/tags, /api/ps, /api/show and /api/version: what is served, as Ollama's clients ask for it."""

from robyn import Response

from routes.http.access import authorized_json, demand_access
from routes.http.errors import ApiError
from routes.http.exchange import HttpRequest, HttpResponse, json_response
from routes.http.frontend import Frontend
from routes.http.model_field import read_model
from routes.http.replies import timestamp
from routes.http.route import Handler
from routes.http.schemas import INT_LIMIT
from routes.http.served import Served, by_every_name, list_served
from routes.ollama.schemas import ShowBody
from routes.ollama.shapes import (
    ListedModel,
    OllamaDetails,
    OllamaModel,
    OllamaRunning,
    OllamaTags,
    OllamaVersion,
    RunningModel,
    TaggedModel,
)
from routes.ollama.template import go_template
from rwkv_batch import __version__
from rwkv_batch.chat.checkpoints import chat_template, settings_for
from rwkv_batch.wire.supervision import EngineInfo

OLLAMA_VERSION = "0.13.0"  # whose routes these are; clients refuse to work with an old one
STAYS_UNTIL = "9999-12-31T23:59:59Z"  # no model leaves by itself
TAG = ":latest"  # clients of Ollama write it behind any name
FAMILY = "rwkv"
TYPES = {"float32": "F32", "float16": "F16"}  # of activations, and of weights unless they are in a format
CAPABILITIES = ["completion", "tools", "insert", "thinking"]


def untagged(handler: Handler) -> Handler:
    """A handler for which a model's name may have the tag."""

    async def without_tag(front: Frontend, http: HttpRequest) -> HttpResponse:
        _remove_tag(http)
        return await handler(front, http)

    return without_tag


async def tags(front: Frontend, http: HttpRequest) -> Response:
    """GET /api/tags: every name that a request may have as `model`, the default one first. Raises ApiError.

    An adapter and a start state may be named together, too; of these names there are too many to list.
    """
    listed: list[TaggedModel] = [
        {**_listed(name, each), "modified_at": timestamp(each.created)}
        for name, each in by_every_name(await list_served(front, http)).items()
    ]
    found: OllamaTags = {"models": listed}
    return json_response(http, found)


async def running(front: Frontend, http: HttpRequest) -> Response:
    """GET /api/ps: the models, all of which are loaded. Raises ApiError."""
    listed: list[RunningModel] = [
        {
            **_listed(each.name, each),
            "expires_at": STAYS_UNTIL,
            "size_vram": 0 if each.model.device == "cpu" else each.model.weight_bytes,
            "context_length": INT_LIMIT,
        }
        for each in await list_served(front, http)
        if each.name == each.model.model
    ]
    found: OllamaRunning = {"models": listed}
    return json_response(http, found)


def _listed(name: str, each: Served) -> ListedModel:
    return {
        "name": name,
        "model": name,
        "size": each.model.weight_bytes,
        "digest": each.digest,
        "details": _details(each.model),
    }


async def show(front: Frontend, http: HttpRequest) -> Response:
    """POST /api/show: what is known of a model. Raises ApiError."""
    _remove_tag(http)
    body = authorized_json(front, http)
    asked = body.get("model") or ShowBody.from_json(body).name
    if not asked:
        raise ApiError(400, "`model`: this field is required.", param="model")
    model = (await read_model(front, http, body | {"model": asked})).model
    template = chat_template(model.checkpoint, settings_for(model, front.settings))
    described: OllamaModel = {
        "modified_at": timestamp(front.started),
        "template": go_template(template),
        "parameters": "",
        "modelfile": f"FROM {model.checkpoint}",
        "license": "",
        "details": _details(model),
        "model_info": {
            "general.architecture": FAMILY,
            "general.basename": model.model,
            "general.parameter_count": model.parameters,
            f"{FAMILY}.context_length": INT_LIMIT,  # texts may have any length
            f"{FAMILY}.block_count": model.layers,
            f"{FAMILY}.embedding_length": model.width,
            f"{FAMILY}.vocab_size": model.vocabulary,
        },
        "capabilities": CAPABILITIES,
    }
    return json_response(http, described)


async def version(front: Frontend, http: HttpRequest) -> Response:
    """GET /api/version: that of Ollama whose routes these are, and that of this server. Raises ApiError."""
    demand_access(front, http)
    versions: OllamaVersion = {"version": OLLAMA_VERSION, "rwkv_batch": __version__}
    return json_response(http, versions)


def _remove_tag(http: HttpRequest) -> None:
    fields, _ = http.json
    for name in ("model", "name"):
        if isinstance(fields.get(name), str):
            fields[name] = fields[name].removesuffix(TAG)


def _details(model: EngineInfo) -> OllamaDetails:
    billions = model.parameters / 1e9
    size = f"{billions:.1f}B" if billions >= 1 else f"{model.parameters / 1e6:.1f}M"
    return {
        "parent_model": "",
        "format": FAMILY,
        "family": FAMILY,
        "families": [FAMILY],
        "parameter_size": size,
        "quantization_level": model.weights.upper() or TYPES.get(model.dtype, "unknown"),
    }
