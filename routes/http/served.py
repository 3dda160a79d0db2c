"""What clients can name as a model: each model, with each of its adapters, and in each start state."""

from typing import NamedTuple
from uuid import uuid4

from routes.http.frontend import Frontend
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


async def served(front: Frontend) -> list[Served]:
    """The default model first. Raises ApiError."""
    front.ready_engine()
    found: list[Served] = []
    for name, model in list(front.models.items()):
        adapters = (await front.ask(ListAdapters(uuid4().hex, to_model=name))).adapters
        states = (await front.ask(ListStartStates(uuid4().hex, to_model=name))).start_states
        found.append(Served(name, model, model.fingerprint, front.started))
        found += [Served(f"{name}:{a.name}", model, a.digest, a.created, True) for a in adapters]
        found += [
            Served(f"{name} {s.name}", model, s.digest.hex(), s.created)
            for s in states
            if not is_member(s.name)
        ]
    return found
