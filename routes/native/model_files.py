"""/loadmodel and /removemodel, with the fields and replies of RWKV-Infer: files of --models are served.

A name that is served already is swapped: what runs ends with the old weights, new requests get the new ones.
"""

import re
import uuid
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, StringConstraints
from robyn import Response

from routes.http.admin import admin_json, checkpoint_inside, file_inside
from routes.http.errors import Json
from routes.http.exchange import HttpRequest, json_response
from routes.http.frontend import Frontend
from routes.http.schemas import RequestBody
from routes.native.schemas import Real
from rwkv_batch.config import ChatTemplateName, MoleRouter, WeightsName
from rwkv_batch.wire.commands import LoadModel, RemoveModel
from rwkv_batch.wire.protocol import CommandReply
from rwkv_batch.wire.supervision import ModelDefaults

ELSEWHERE = {  # strategies that do not mean in RWKV-Infer what they mean here
    "fp16": "RWKV-Infer runs bf16 under this name; here the large matrices are rounded to fp16",
    "bf16": "RWKV-Infer keeps the head in int8 under this name; here it is bf16 too",
    "int8": "in RWKV-Infer each input has a scale, or it is nf4; here each output has one",
    "fp8": "RWKV-Infer rounds activations too, and has one scale for a whole matrix; here weights alone are "
    "rounded, and each output has a scale",
    "int4": "RWKV-Infer means its nf4 by this; here it is 16 even steps for each 64 weights, and the head is "
    "not packed",
    "nf4": "RWKV-Infer packs the head too, and its last version has 16 even steps; here it is NF4 in blocks "
    "of 64, and the head is not packed",
}
CHANGED_WITHIN = 3600.0  # seconds; rows of the old weights may have to end first


def _unless_empty(value: object) -> object:
    return None if value == "" else value


EMPTY_IS_NONE = BeforeValidator(_unless_empty)
KINDS = ("lora", "dora", "pissa", "bone", "disha", "miss", "hybrid", "full", "auto")
NAME = re.compile(r"^[\w.+ -]*$")
LONGEST_NAME = 128  # bytes, as it is a part of the name of a file


def _fits_file(name: str) -> str:
    if not NAME.fullmatch(name):
        raise ValueError("may hold letters, digits, blanks and _ . + - only")
    if len(name.encode()) > LONGEST_NAME:
        raise ValueError(f"should have at most {LONGEST_NAME} bytes")
    return name


def _kind(mode: str) -> str:
    """The format that a text asks for, by the words that RWKV-Infer looks for in it."""
    if mode and not any(kind in mode.lower() for kind in KINDS):
        raise ValueError(f"should name a kind of adapter: {', '.join(KINDS)}")
    return mode


AdapterMode = Annotated[
    str, AfterValidator(_kind), Field(json_schema_extra={"enum": ["", *KINDS]}, max_length=64)
]
ViewName = Annotated[
    str,
    StringConstraints(strip_whitespace=True),
    AfterValidator(_fits_file),
    Field(json_schema_extra={"pattern": NAME.pattern}),
]
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
    model_strategy: Literal["", WeightsName] = ""  # the format of its large matrices; "": as --weights says
    adapter_filename: str = ""  # is merged into it
    adapter_mode: AdapterMode = ""  # the tensors say it
    adapter_scaling: OptionalReal = None  # of the adapter's training
    adapter_alpha: OptionalReal = None  # in place of it: divided by the rank it is the scaling
    adapter_init_filename: str = ""  # what PiSSA began with, which is taken out of the model
    mole_router: Annotated[MoleRouter | None, EMPTY_IS_NONE] = None  # the rule by which experts are chosen
    default_temperature: OptionalDraw = None
    default_top_p: OptionalShare = None
    template: Annotated[ChatTemplateName | None, EMPTY_IS_NONE] = None
    endtoken: str = ""  # a stop string of OpenAI routes, unless a request has others
    rope_theta: OptionalReal = None  # of attention, which no model here has
    rms_norm_eps: OptionalReal = None  # likewise


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
    init = fields.adapter_init_filename
    strategy = fields.model_strategy
    command = LoadModel(
        uuid.uuid4().hex,
        path=str(file),
        name=fields.model_viewname,
        adapter=adapter,
        adapter_scaling=fields.adapter_scaling if adapter else None,  # clients send it without one, too
        adapter_alpha=fields.adapter_alpha,
        adapter_init=init and str(file_inside(front, init, "adapter_init_filename")),
        mole_router=fields.mole_router,
        defaults=defaults,
        weights=strategy,
    )
    reply = await front.ask(command, CHANGED_WITHIN)
    return _changed(
        front, http, reply, f"{strategy}: {ELSEWHERE[strategy]}." if strategy in ELSEWHERE else ""
    )


async def remove(front: Frontend, http: HttpRequest) -> Response:
    """POST /removemodel: a model takes no more requests, and is freed when its rows have ended.

    Without a name it is the default one. Raises ApiError.
    """
    fields = ModelFields.from_json(admin_json(front, http))
    name = fields.model_viewname or front.ready_engine().model
    command = RemoveModel(uuid.uuid4().hex, name)
    return _changed(front, http, await front.ask(command, CHANGED_WITHIN))


def _changed(front: Frontend, http: HttpRequest, reply: CommandReply, remark: str = "") -> Response:
    front.serve(reply.models)
    body: Json = {"status": "success"}
    said = " ".join(filter(None, (reply.note, remark)))
    return json_response(http, body | ({"message": said} if said else {}))
