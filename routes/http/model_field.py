"""What the field `model` of a request says: "<model>:<adapter> <start state>"; the last two may lack.

An adapter's name alone is one too, as in vLLM.

The only place where it is read. Clients of the native routes send any text, and one model answered them all:
while just one is served, such a text is only a label there. Otherwise a name that is not served is a 404.
"""

from typing import NamedTuple
from uuid import uuid4

from msgspec.structs import replace

from routes.http.errors import ApiError, Json, native_shape
from routes.http.exchange import HttpRequest
from routes.http.frontend import Frontend
from rwkv_batch.wire.commands import EngineCommand, ListAdapters, ListModels
from rwkv_batch.wire.protocol import CommandReply
from rwkv_batch.wire.supervision import EngineInfo

LABEL = "rwkv7"  # what the samples of all routes call the model: the default one, whichever that is
LABELS = (LABEL, "rwkv")  # the second is that of RWKV's own clients, which know no other


class Named(NamedTuple):
    """What `model` names."""

    model: EngineInfo
    adapter: str = ""
    state: str = ""  # a start state


async def read_model(front: Frontend, http: HttpRequest, fields: Json) -> Named:
    """What `model` names in a JSON body, or in other fields. Raises ApiError."""
    asked, default = fields.get("model"), front.ready_engine()
    if asked is None or asked == "":
        return Named(default)
    if not isinstance(asked, str):
        raise ApiError(400, "`model`: must be a string.", param="model")
    if found := _find(asked, front.models):
        return found
    if asked in LABELS:
        return Named(default)
    front.refuse_hidden(asked)
    if front.settings.models:  # one may have been loaded of which this front end does not know yet
        front.serve((await front.ask(ListModels(uuid4().hex))).models)
        if found := _find(asked, front.models):
            return found
    if len(front.models) == 1 and http.shape is native_shape:
        return Named(default)
    async for model, reply in front.ask_each(ListAdapters("")):
        if asked in [adapter.name for adapter in reply.adapters]:
            return Named(model, asked)
    served = ", ".join(list(front.models)[:20])
    message = f"There is no model {asked[:60]} here; this server has {served}."
    raise ApiError(404, message, param="model", code="model_not_found")


def with_defaults(model: EngineInfo, fields: Json) -> Json:
    """The body, and what the model was loaded with where the body does not say it."""
    own = model.defaults
    given = {"temperature": own.temperature, "top_p": own.top_p, "stop": own.stop}
    missing = {name: each for name, each in given.items() if each is not None and fields.get(name) is None}
    return fields | missing if missing else fields


async def ask_model(front: Frontend, http: HttpRequest, fields: Json, command: EngineCommand) -> CommandReply:
    """Have the model that `fields` name carry out the command. Raises ApiError."""
    name = (await read_model(front, http, fields)).model.model
    return await front.ask(replace(command, to_model=name))


def _find(asked: str, models: dict[str, EngineInfo]) -> Named | None:
    if asked in models:
        return Named(models[asked])
    names = [name for name in models if asked.startswith((f"{name} ", f"{name}:"))]
    if not names:
        return None
    name = max(names, key=len)
    adapter, _, state = asked.removeprefix(name).partition(" ")
    return Named(models[name], adapter.removeprefix(":"), state)
