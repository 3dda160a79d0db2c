"""What clients can name as a model: each model, with each of its adapters, and in each start state."""

from typing import NamedTuple
from urllib.parse import unquote

from routes.http.access import demand_access
from routes.http.errors import ApiError
from routes.http.exchange import HttpRequest
from routes.http.frontend import Frontend
from routes.http.model_field import LABEL
from routes.http.start_states import is_member
from rwkv_batch.wire.commands import ListAdapters, ListStartStates
from rwkv_batch.wire.supervision import EngineInfo


class Served(NamedTuple):
    """One of them."""

    name: str
    model: EngineInfo
    digest: str  # of what it is made of
    created: float  # seconds since 1970
    is_adapter: bool = False


async def list_served(front: Frontend, http: HttpRequest) -> list[Served]:
    """The default model first. Raises ApiError, first of all a 401."""
    demand_access(front, http)
    front.ready_engine()
    found: list[Served] = []
    states = {model.model: reply.start_states async for model, reply in front.ask_each(ListStartStates(""))}
    async for model, reply in front.ask_each(ListAdapters("")):
        name = model.model
        found.append(Served(name, model, model.fingerprint, front.started))
        found += [Served(f"{name}:{a.name}", model, a.digest, a.created, True) for a in reply.adapters]
        found += [
            Served(f"{name} {s.name}", model, s.digest.hex(), s.created)
            for s in states.get(name, [])
            if not is_member(s.name)
        ]
    return found


def by_every_name(served: list[Served]) -> dict[str, Served]:
    """All of them by their names, then by the short ones: LABEL, and an adapter's name alone."""
    names = {each.name: each for each in served}
    if served:
        names.setdefault(LABEL, served[0])
    for each in served:
        if each.is_adapter:
            names.setdefault(each.name.removeprefix(f"{each.model.model}:"), each)
    return names


async def served_in_path(front: Frontend, http: HttpRequest) -> Served:
    """What the end of the path names, behind `/models/`. Raises ApiError.

    Like the field `model`, it may be LABEL, and the name of an adapter alone.
    """
    served = await list_served(front, http)
    asked = unquote(http.path.split("/models/", 1)[1].rstrip("/"))
    found = by_every_name(served).get(asked)
    if found is None:
        names = ", ".join([each.name for each in served][:20])
        raise ApiError(
            404, f"There is no model {asked[:60]} here; this server has {names}.", code="model_not_found"
        )
    return found
