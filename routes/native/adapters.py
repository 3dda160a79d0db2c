"""The routes about adapters of requests: vLLM's, and those of rwkv_lightning_cuda's clients.

An adapter is loaded from the folder of --models, behind the rule for all routes that load files. It is there
until it is unloaded or the server ends.
"""

import uuid
from typing import Annotated, Literal

from pydantic import Field
from robyn import Response

from routes.http.adapters import missing
from routes.http.admin import admin_json, file_inside
from routes.http.errors import ApiError, Json
from routes.http.exchange import HttpRequest, authorized_json, json_response, text_response
from routes.http.frontend import Frontend
from routes.http.schemas import MAX_SESSION_ID, RequestBody
from routes.native.schemas import Real
from rwkv_batch.wire.commands import ListAdapters, LoadAdapter, RemoveAdapter
from rwkv_batch.wire.protocol import AdapterInfo

PACKAGE = "adapter.pth"  # in a folder, beside adapter.json
# It stands behind a colon and in front of a space where a model is named.
AdapterName = Annotated[str, Field(min_length=1, max_length=MAX_SESSION_ID, pattern=r"^[^\s:]+$")]
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
    fields = LoadLoraFields.from_json(admin_json(front, http))
    await _load(front, fields.lora_name, fields.lora_path, "lora_path", fields, 400)
    return text_response(http, f"Success: LoRA adapter '{fields.lora_name}' added successfully.")


async def unload_lora(front: Frontend, http: HttpRequest) -> Response:
    """POST /v1/unload_lora_adapter. Raises ApiError."""
    name = UnloadLoraFields.from_json(admin_json(front, http)).lora_name
    if not (await front.ask(RemoveAdapter(uuid.uuid4().hex, name))).found:
        raise await missing(front, name)
    return text_response(http, f"Success: LoRA adapter '{name}' removed successfully.")


async def list_(front: Frontend, http: HttpRequest) -> Response:
    """GET /v1/adapters. Raises ApiError."""
    authorized_json(front.settings.password, http)
    found = (await front.ask(ListAdapters(uuid.uuid4().hex))).adapters
    return json_response(http, {"object": "list", "data": [_to_json(info) for info in found]})


async def put(front: Frontend, http: HttpRequest) -> Response:
    """POST /v1/adapters: load one. Raises ApiError."""
    fields = PutAdapterFields.from_json(admin_json(front, http))
    info = await _load(front, fields.adapter_id, fields.path, "path", fields, 409)
    return json_response(http, _to_json(info))


async def delete(front: Frontend, http: HttpRequest) -> Response:
    """DELETE /v1/adapters: unload one, if it is of the version that the body may name. Raises ApiError."""
    fields = DeleteAdapterFields.from_json(admin_json(front, http))
    name, version = fields.adapter_id, fields.adapter_version
    found = (await front.ask(ListAdapters(uuid.uuid4().hex, name))).adapters
    if found and version not in (None, found[0].digest):
        message = f"The adapter {name} is of version {found[0].digest}; send that, or none."
        raise ApiError(409, message, param="adapter_version")
    removed = bool((await front.ask(RemoveAdapter(uuid.uuid4().hex, name))).found)
    return json_response(http, {"adapter_id": name, "deleted": removed}, 200 if removed else 404)


async def _load(
    front: Frontend, name: str, path: str, field: str, scaling: ScalingFields, exists: int
) -> AdapterInfo:
    """exists: the status if there is one of the name. Raises ApiError."""
    file = file_inside(front, path, field, folders=True)
    if file.is_dir():
        file_inside(front, str(file / PACKAGE), field)  # which may be a link to elsewhere
    if (await front.ask(ListAdapters(uuid.uuid4().hex, name))).adapters:
        raise ApiError(exists, f"The adapter {name} is loaded already; unload it first.")
    alpha, factor = scaling.adapter_alpha, scaling.adapter_scaling
    return (await front.ask(LoadAdapter(uuid.uuid4().hex, name, str(file), alpha, factor))).adapters[0]


def _to_json(info: AdapterInfo) -> Json:
    return {
        "adapter_id": info.name,
        "version": info.digest,
        "rank": info.rank,
        "path": info.path,
        "created": int(info.created),
    }
