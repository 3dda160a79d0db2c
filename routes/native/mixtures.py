"""The routes about mixtures of start states (MRSS), as RWKV-Infer's clients ask for them.

A mixture has the name of its first state; its description says which the others are, and their weights.
"""

import json
import uuid
from typing import Annotated, Any

from pydantic import Field
from robyn import Response

from routes.http.admin import admin_json, file_inside
from routes.http.errors import ApiError
from routes.http.exchange import HttpRequest, json_response
from routes.http.frontend import Frontend
from routes.http.model_field import read_model
from routes.http.start_states import MEMBER, describe, weights_of
from routes.native.start_states import StateDefaults, StateLayout, StateName, forget_members, members_of, put
from rwkv_batch.wire.commands import DescribeStartState, ListStartStates


class LoadMixtureFields(StateDefaults):
    """The body of /mrss_loadstatemodel. Numbers and truth values may be texts."""

    state_viewname: StateName
    state_filenames: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]
    contain_originalstate: bool = False  # whether the state before any token is one of them, the last
    state_gatingweight: list[Any] | None = None  # null: all alike
    state_layout: StateLayout = "vk"


class WeightFields(StateDefaults):
    """The body of /mrss_set_gatingweight."""

    state_viewname: StateName  # alone, or behind the model's name
    state_gatingweight: list[Any]


async def load(front: Frontend, http: HttpRequest) -> Response:
    """POST /mrss_loadstatemodel: files of --models become the mixture of that name. Raises ApiError."""
    body = admin_json(front, http)
    fields, info = LoadMixtureFields.from_json(body), (await read_model(front, http, body)).model
    files = [file_inside(front, name, "state_filenames") for name in fields.state_filenames]
    name, count = fields.state_viewname, len(files) + fields.contain_originalstate
    if count > (most := info.slots):
        raise ApiError(400, f"`state_filenames`: {count} states cannot run at once; at most {most} rows can.")
    given = [1.0] * count if fields.state_gatingweight is None else fields.state_gatingweight
    weights = weights_of(given, count, "state_gatingweight")
    others = [f"{name}{MEMBER}{uuid.uuid4().hex}" for _ in files[1:]]
    description = {
        "original_filename": files[0].name,
        "size_bytes": sum(file.stat().st_size for file in files),
        **fields.given(),
        "members": [name, *others, *([""] if fields.contain_originalstate else [])],
        "weights": weights,
    }
    model = info.model
    before, stored = await members_of(front, model, name), list[str]()
    try:
        for member, file in zip(others, files[1:], strict=True):
            await put(front, model, member, str(file), fields.state_layout, {})
            stored.append(member)
        await put(
            front, model, name, str(files[0]), fields.state_layout, description
        )  # from here on it is used
    except ApiError:
        await forget_members(front, model, stored)
        raise
    await forget_members(front, model, before)
    return json_response(http, {"status": "success"})


async def set_weights(front: Frontend, http: HttpRequest) -> Response:
    """POST /mrss_set_gatingweight: other weights for the requests to come. Raises ApiError."""
    body = admin_json(front, http)
    fields, named = WeightFields.from_json(body), await read_model(front, http, body)
    name, model = fields.state_viewname, named.model.model
    for served in front.models:  # the view may stand behind the model's name
        if body.get("model") is None and name.startswith(f"{served} "):
            name, model = name.removeprefix(f"{served} "), served
            break
    found = (await front.ask(ListStartStates(uuid.uuid4().hex, name, to_model=model))).start_states
    own = describe(found[0]) if found else {}
    if "members" not in own:
        raise ApiError(404, f"There is no mixture {name}; /mrss_loadstatemodel makes one.")
    own["weights"] = weights_of(fields.state_gatingweight, len(own["members"]), "state_gatingweight")
    own |= fields.given()
    await front.ask(DescribeStartState(uuid.uuid4().hex, name, json.dumps(own).encode(), to_model=model))
    return json_response(http, {"status": "success"})
