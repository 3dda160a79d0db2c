"""/loadmodel and /removemodel, with the fields and replies of RWKV-Infer: files of --models are served.

A name that is served already is swapped: what runs ends with the old weights, new requests get the new ones.
"""

import uuid
from typing import Annotated, Literal

from pydantic import BeforeValidator, ConfigDict, Field, StringConstraints
from robyn import Response

from routes.http.admin import admin_json, checkpoint_inside, file_inside
from routes.http.errors import Json
from routes.http.exchange import HttpRequest, json_response
from routes.http.frontend import Frontend
from routes.http.schemas import RequestBody
from routes.native.schemas import Real
from rwkv_batch.config import ChatTemplateName
from rwkv_batch.wire.commands import LoadModel, RemoveModel
from rwkv_batch.wire.protocol import CommandReply
from rwkv_batch.wire.supervision import ModelDefaults

CHANGED_WITHIN = 3600.0  # seconds; rows of the old weights may have to end first


def _unless_empty(value: object) -> object:
    return None if value == "" else value


EMPTY_IS_NONE = BeforeValidator(_unless_empty)
ViewName = Annotated[str, StringConstraints(strip_whitespace=True, max_length=128, pattern=r"^[\w.+ -]*$")]
OptionalReal = Annotated[Real | None, EMPTY_IS_NONE]
OptionalDraw = Annotated[Annotated[Real, Field(ge=-1000, le=1000)] | None, EMPTY_IS_NONE]
OptionalShare = Annotated[Annotated[Real, Field(ge=0, le=1)] | None, EMPTY_IS_NONE]


class ModelFields(RequestBody):
    """The base of both bodies. A field that is not known is refused."""

    model_config = ConfigDict(extra="forbid")

    password: str | None = None  # has been checked
    model_viewname: ViewName = ""  # by which requests choose it; "": the file's name


class LoadModelFields(ModelFields):
    """The body of /loadmodel. Numbers may be texts."""

    model_filename: Annotated[str, Field(min_length=1)]  # a file or Hugging Face folder inside of --models
    model_strategy: Literal["", "bf16", "fp16"] = ""  # weights are not quantized: the server's own precision
    adapter_filename: str = ""  # is merged into it
    adapter_mode: Literal["", "lora", "dora", "pissa", "bone", "disha", "miss"] = ""  # the tensors say it
    adapter_scaling: OptionalReal = None
    default_temperature: OptionalDraw = None
    default_top_p: OptionalShare = None
    template: Annotated[ChatTemplateName | None, EMPTY_IS_NONE] = None
    endtoken: str = ""  # a stop string of OpenAI routes, unless a request has others


async def load(front: Frontend, http: HttpRequest) -> Response:
    """POST /loadmodel: a file inside of --models is served, under a name of its own or in place of another.

    Raises ApiError.
    """
    fields = LoadModelFields.from_json(admin_json(front, http))
    file = checkpoint_inside(front, fields.model_filename, "model_filename")
    adapter = fields.adapter_filename and str(file_inside(front, fields.adapter_filename, "adapter_filename"))
    defaults = ModelDefaults(
        fields.default_temperature,
        fields.default_top_p,
        fields.endtoken.replace("\\n", "\n") or None,  # as RWKV-Infer's clients write a line feed
        fields.template,
    )
    scaling = fields.adapter_scaling if adapter else None
    command = LoadModel(uuid.uuid4().hex, str(file), fields.model_viewname, adapter, scaling, defaults)
    return _changed(front, http, await front.ask(command, CHANGED_WITHIN))


async def remove(front: Frontend, http: HttpRequest) -> Response:
    """POST /removemodel: a model takes no more requests, and is freed when its rows have ended.

    Without a name it is the default one. Raises ApiError.
    """
    fields = ModelFields.from_json(admin_json(front, http))
    name = fields.model_viewname or front.ready_engine().model
    command = RemoveModel(uuid.uuid4().hex, name)
    return _changed(front, http, await front.ask(command, CHANGED_WITHIN))


def _changed(front: Frontend, http: HttpRequest, reply: CommandReply) -> Response:
    front.serve(reply.models)
    body: Json = {"status": "success"}
    return json_response(http, body | ({"message": reply.note} if reply.note else {}))
