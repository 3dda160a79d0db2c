"""The routes about start states: upload, list and delete, and those of RWKV-Infer's clients."""

import asyncio
import json
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, field_validator
from robyn import Response

from routes.chat.fields import TemplateKwargs
from routes.guard.limits import FORM_ROOM
from routes.http.access import authorized_json, demand_access
from routes.http.admin import admin_json, file_inside
from routes.http.errors import ApiError, Json
from routes.http.exchange import HttpRequest, json_response
from routes.http.frontend import READ_WITHIN, Frontend
from routes.http.model_field import ask_model, read_model
from routes.http.schemas import MAX_SESSION_ID, PLAIN_ID, RequestBody
from routes.http.start_states import DEFAULTS, TEMPLATE, describe, is_member
from routes.native.schemas import Real
from routes.native.shapes import ListedState, ListedStates, UploadedState
from rwkv_batch.chat.checkpoints import ThinkType
from rwkv_batch.disk import removal, uploads
from rwkv_batch.wire.commands import ListStartStates, PutStartState, RemoveStartStates
from rwkv_batch.wire.protocol import StartStateInfo

HEAD_SIZE = 64
SUFFIXES = (
    ".pth",
    ".safetensors",
    ".st",
)  # which say how a file is to be read; no other text of a client is in a path
StateName = Annotated[str, Field(min_length=1, max_length=MAX_SESSION_ID), *PLAIN_ID]
StateLayout = Literal["vk", "kv"]


class StateIdFields(RequestBody):
    """The body of /v1/state/delete, or its URL parameters."""

    state_id: StateName


class StateDefaults(RequestBody):
    """What requests in a state have unless they say otherwise. Numbers may be texts."""

    default_temperature: Annotated[Real, Field(ge=-1000, le=1000)] | None = None
    default_top_p: Annotated[Real, Field(ge=0, le=1)] | None = None
    default_think_type: ThinkType | None = None
    default_chat_template_kwargs: TemplateKwargs | None = None

    def given(self) -> Json:
        """By the names of a request's fields, those that are not null."""
        found = {name: getattr(self, f"default_{name}") for name in DEFAULTS + TEMPLATE}
        return {name: value for name, value in found.items() if value is not None}


class UploadFields(StateDefaults):
    """The form of /v1/state/upload, besides the file."""

    state_id: StateName
    state_layout: StateLayout = "vk"  # of a head's matrix in the file: [value, key] or [key, value]

    @field_validator("default_chat_template_kwargs", mode="before")
    @classmethod
    def _from_text(cls, value: object) -> object:
        """A form has texts only."""
        with suppress(ValueError, RecursionError):
            return json.loads(value) if isinstance(value, str) else value
        return value


class LoadStateFields(StateDefaults):
    """The body of /loadstatemodel."""

    state_filename: Annotated[str, Field(min_length=1)]  # inside of --models
    state_viewname: StateName
    state_layout: StateLayout = "vk"


class RemoveStateFields(RequestBody):
    """The body of /removestatemodel. A field that is not known is refused, as it may be a misnamed one.

    RWKV-Infer removes all for any body, and its clients send {"dummy": "dummy"} for that.
    """

    model_config = ConfigDict(extra="forbid")

    password: str | None = None  # has been checked, as `model` will be
    model: object = None
    state_viewname: StateName | None = None  # null: all
    dummy: object = None


async def upload(front: Frontend, http: HttpRequest) -> Response:
    """POST /v1/state/upload: a file of a tuned state in the multipart field `file`. Raises ApiError."""
    try:
        files, fields_sent = http.form(front.settings.max_state + FORM_ROOM)
    except ApiError:
        demand_access(front, http)
        raise
    form: dict[str, object] = {name: texts[-1] for name, texts in fields_sent.items()}
    demand_access(front, http, form)
    if len(files) != 1:
        raise ApiError(
            400, "Send one file of a tuned state as multipart/form-data, in the field `file`.", param="file"
        )
    ((filename, data),) = files.items()
    if len(data) > front.settings.max_state:
        most = front.settings.max_state
        raise ApiError(413, f"The file has {len(data)} bytes and at most {most} are taken.")
    path = Path(filename.replace("\\", "/"))
    fields = UploadFields.from_json({"state_id": path.stem} | form)
    model = (await read_model(front, http, form)).model.model
    if (await front.ask(ListStartStates(uuid.uuid4().hex, fields.state_id, to_model=model))).start_states:
        raise ApiError(409, f"There is a start state {fields.state_id} already; delete it first.")
    description = {"original_filename": path.name, "size_bytes": len(data), **fields.given()}
    loop = asyncio.get_running_loop()
    file = await loop.run_in_executor(None, uploads.write, data, front.settings.uploads)
    try:
        info = await put(front, model, fields.state_id, file, fields.state_layout, description)
    except ApiError as error:
        raise ApiError(error.status, error.message.replace(file, path.name), error.param) from None
    finally:
        removal.remove(Path(file))
    uploaded: UploadedState = {"object": "rwkv.state", **_to_json(info)}
    return json_response(http, uploaded)


async def list_(front: Frontend, http: HttpRequest) -> Response:
    """GET and POST /v1/state/list: those of one model. Raises ApiError."""
    body = authorized_json(front, http) or {"model": http.parameter("model")}
    found = (await ask_model(front, http, body, ListStartStates(uuid.uuid4().hex))).start_states
    listed = [_to_json(info) for info in found if not is_member(info.name)]
    found_states: ListedStates = {"object": "list", "data": listed}
    return json_response(http, found_states)


async def delete(front: Frontend, http: HttpRequest) -> Response:
    """DELETE and POST /v1/state/delete: the one named in the body or the URL. Raises ApiError."""
    body = authorized_json(front, http)
    if "state_id" not in body:
        body = {"state_id": http.parameter("state_id"), "model": http.parameter("model")}
    name = StateIdFields.from_json(body).state_id
    found = await forget(front, (await read_model(front, http, body)).model.model, name)
    return json_response(http, {"state_id": name, "deleted": bool(found)}, 200 if found else 404)


async def load(front: Frontend, http: HttpRequest) -> Response:
    """POST /loadstatemodel: a file inside of --models becomes the state of that name. Raises ApiError."""
    body = admin_json(front, http)
    fields, model = LoadStateFields.from_json(body), (await read_model(front, http, body)).model.model
    file = file_inside(front, fields.state_filename, "state_filename")
    description = {
        "original_filename": file.name,
        "size_bytes": file.stat().st_size,
        **fields.given(),
    }
    members = await members_of(front, model, fields.state_viewname)
    await put(front, model, fields.state_viewname, str(file), fields.state_layout, description)
    await forget_members(front, model, members)
    return json_response(http, {"status": "success"})


async def remove(front: Frontend, http: HttpRequest) -> Response:
    """POST /removestatemodel: the one of that name, without a name all of the model. Raises ApiError."""
    body = admin_json(front, http)
    name, model = RemoveStateFields.from_json(body).state_viewname, await read_model(front, http, body)
    if name is None:
        await front.ask(RemoveStartStates(uuid.uuid4().hex, to_model=model.model.model))
    elif not await forget(front, model.model.model, name):
        raise ApiError(404, f"There is no start state {name}; /v1/state/list lists them.")
    return json_response(http, {"status": "success"})


async def members_of(front: Frontend, model: str, name: str) -> list[str]:
    """The states that belong to a mixture of that name alone. Raises ApiError."""
    found = (await front.ask(ListStartStates(uuid.uuid4().hex, name, to_model=model))).start_states
    members = describe(found[0]).get("members", []) if found else []
    return [member for member in members if is_member(member)]


async def forget_members(front: Frontend, model: str, members: list[str]) -> None:
    for member in members:
        await front.ask(RemoveStartStates(uuid.uuid4().hex, member, to_model=model))


async def forget(front: Frontend, model: str, name: str) -> int:
    """Remove a start state, with those of its mixture; how many there were of the name. Raises ApiError."""
    members = await members_of(front, model, name)
    found = (await front.ask(RemoveStartStates(uuid.uuid4().hex, name, to_model=model))).found
    await forget_members(front, model, members)
    return found


async def put(
    front: Frontend, model: str, name: str, file: str, layout: StateLayout, description: Json
) -> StartStateInfo:
    encoded = json.dumps(description).encode()
    command = PutStartState(uuid.uuid4().hex, name, file, layout, encoded, to_model=model)
    return (await front.ask(command, READ_WITHIN)).start_states[0]


def _to_json(info: StartStateInfo) -> ListedState:
    own = describe(info)
    filename = own.get("original_filename", "")
    return {
        "state_id": info.name,
        "filename": filename,
        "original_filename": filename,
        "size_bytes": own.get("size_bytes", 0),
        "tensor_count": info.layers,
        "layers": info.layers,
        "heads": info.heads,
        "head_size": HEAD_SIZE,
        "created": int(info.created),
        "created_ms": int(info.created * 1000),
        "uploaded_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(info.created)),
        "default_temperature": own.get("temperature"),
        "default_top_p": own.get("top_p"),
        "default_think_type": own.get("think_type"),
        "default_chat_template_kwargs": own.get("chat_template_kwargs"),
    }
