"""The routes about adapters of requests: vLLM's, and those of rwkv_lightning_cuda's clients.

An adapter is loaded from the folder of --models, behind the rule for all routes that load files. It is there
until it is unloaded or the server ends.
"""

import re
import uuid
from typing import Annotated, Literal

from pydantic import AfterValidator, Field
from robyn import Response

from routes.http.access import authorized_json
from routes.http.adapters import adapters_of, missing
from routes.http.admin import admin_json, checkpoint_inside
from routes.http.errors import ApiError, Json
from routes.http.exchange import HttpRequest, json_response, text_response
from routes.http.frontend import READ_WITHIN, Frontend
from routes.http.model_field import read_model
from routes.http.schemas import MAX_SESSION_ID, RequestBody
from routes.native.schemas import Real
from routes.native.shapes import DeletedAdapter, ListedAdapter, ListedAdapters
from rwkv_batch.wire.commands import LoadAdapter, RemoveAdapter
from rwkv_batch.wire.protocol import AdapterInfo

# It stands behind a colon and in front of a space where a model is named.
# Blanks of Python and of ECMAScript.
NAME = re.compile(r"^[^\s\u001c-\u001f\u0085\ufeff:]+$")


def _stands_in_model(name: str) -> str:
    if not NAME.fullmatch(name):
        raise ValueError("must hold no blanks and no colons")
    return name


AdapterName = Annotated[
    str,
    Field(min_length=1, max_length=MAX_SESSION_ID, json_schema_extra={"pattern": NAME.pattern}),
    AfterValidator(_stands_in_model),
]
Path = Annotated[str, Field(min_length=1)]


class ScalingFields(RequestBody):
    """What the files of most adapters do not say: one of these, as of its training."""

    adapter_alpha: Real | None = None  # divided by the rank it is the scaling
    adapter_scaling: Real | None = None


class LoadLoraFields(ScalingFields):
    """The body of /v1/load_lora_adapter."""

    lora_name: AdapterName
    lora_path: Path  # inside of --models
    load_inplace: Literal[False] = False


class UnloadLoraFields(RequestBody):
    """The body of /v1/unload_lora_adapter."""

    lora_name: AdapterName
    lora_int_id: int | None = None  # vLLM's own number of it, which means nothing here or there


class PutAdapterFields(ScalingFields):
    """The body of POST /v1/adapters."""

    adapter_id: AdapterName
    path: Path


class DeleteAdapterFields(RequestBody):
    """The body of DELETE /v1/adapters."""

    adapter_id: AdapterName
    adapter_version: str | None = None


async def load_lora(front: Frontend, http: HttpRequest) -> Response:
    """POST /v1/load_lora_adapter. Raises ApiError."""
    body = admin_json(front, http)
    fields = LoadLoraFields.from_json(body)
    model = await _model(front, http, body)
    await _load(front, model, fields.lora_name, fields.lora_path, "lora_path", fields, 400)
    return text_response(http, f"Success: LoRA adapter '{fields.lora_name}' added successfully.")


async def unload_lora(front: Frontend, http: HttpRequest) -> Response:
    """POST /v1/unload_lora_adapter. Raises ApiError."""
    body = admin_json(front, http)
    name, model = UnloadLoraFields.from_json(body).lora_name, await _model(front, http, body)
    if not await _remove(front, model, name):
        raise await missing(front, model, name)
    return text_response(http, f"Success: LoRA adapter '{name}' removed successfully.")


async def list_(front: Frontend, http: HttpRequest) -> Response:
    """GET /v1/adapters. Raises ApiError."""
    authorized_json(front, http)
    model = await _model(front, http, {"model": http.parameter("model")})
    found = await adapters_of(front, model)
    listed: ListedAdapters = {"object": "list", "data": [_to_json(info) for info in found]}
    return json_response(http, listed)


async def put(front: Frontend, http: HttpRequest) -> Response:
    """POST /v1/adapters: load one. Raises ApiError."""
    body = admin_json(front, http)
    fields, model = PutAdapterFields.from_json(body), await _model(front, http, body)
    info = await _load(front, model, fields.adapter_id, fields.path, "path", fields, 409)
    return json_response(http, _to_json(info))


async def delete(front: Frontend, http: HttpRequest) -> Response:
    """DELETE /v1/adapters: unload one, if it is of the version that the body may name. Raises ApiError."""
    body = admin_json(front, http)
    fields, model = DeleteAdapterFields.from_json(body), await _model(front, http, body)
    name, version = fields.adapter_id, fields.adapter_version
    found = await adapters_of(front, model, name)
    if found and version not in (None, found[0].digest):
        message = f"The adapter {name} is of version {found[0].digest}; send that, or none."
        raise ApiError(409, message, param="adapter_version")
    removed = await _remove(front, model, name)
    reply: DeletedAdapter = {"adapter_id": name, "deleted": removed}
    return json_response(http, reply, 200 if removed else 404)


async def _model(front: Frontend, http: HttpRequest, body: Json) -> str:
    """The model that a body names, beside which the adapter is. Raises ApiError."""
    return (await read_model(front, http, body)).model.model


async def _load(
    front: Frontend, model: str, name: str, path: str, field: str, scaling: ScalingFields, exists: int
) -> AdapterInfo:
    """exists: the status if there is one of the name. Raises ApiError."""
    file = checkpoint_inside(front, path, field)
    if await adapters_of(front, model, name):
        raise ApiError(exists, f"The adapter {name} is loaded already; unload it first.")
    command = LoadAdapter(
        uuid.uuid4().hex, name, str(file), scaling.adapter_alpha, scaling.adapter_scaling, to_model=model
    )
    return (await front.ask(command, READ_WITHIN)).adapters[0]


async def _remove(front: Frontend, model: str, name: str) -> bool:
    return bool((await front.ask(RemoveAdapter(uuid.uuid4().hex, name, to_model=model))).found)


def _to_json(info: AdapterInfo) -> ListedAdapter:
    return {
        "adapter_id": info.name,
        "version": info.digest,
        "rank": info.rank,
        "path": info.path,
        "created": int(info.created),
    }
