"""Which adapter a request asks for.

A request names it as `adapter` or, as the clients of rwkv_lightning_cuda do, `adapter_id`; or in `model`
behind the model's name and a colon ("rwkv7-g1-1.5b:capitals"). A start state may follow that
("rwkv7-g1-1.5b:capitals pirate").
"""

import uuid
from typing import NamedTuple

from msgspec.structs import replace

from routes.http.errors import ApiError, Json
from routes.http.frontend import Frontend
from routes.http.model_field import Named
from rwkv_batch.wire.commands import ListAdapters
from rwkv_batch.wire.protocol import AdapterInfo, GenerateRequest

FIELDS = ("adapter", "adapter_id")
MOST_SCALE = 100
NAMED = 20  # adapters that an error names


class ChosenAdapter(NamedTuple):
    """The adapter of a request, or none."""

    info: AdapterInfo | None = None
    scale: float = 1.0

    def begin(self, request: GenerateRequest) -> GenerateRequest:
        """The request, which runs with it."""
        if self.info is None:
            return request
        name, digest = self.info.name, self.info.digest
        return replace(request, adapter=name, adapter_digest=digest, adapter_scale=self.scale)


async def choose_adapter(front: Frontend, fields: Json, named: Named) -> ChosenAdapter:
    """Raises ApiError, 404 for an adapter that is not loaded."""
    given = [name for name in (named.adapter, *map(fields.get, FIELDS)) if name not in (None, "")]
    if not all(isinstance(name, str) for name in given):
        raise ApiError(400, "`adapter`: must be a string.", param="adapter")
    names = set(given)
    if len(names) > 1:
        raise ApiError(400, f"The request names the adapters {' and '.join(sorted(names))[:200]}; send one.")
    scale = _scale(fields.get("adapter_scale"))
    if not names:
        if scale != 1:
            raise ApiError(400, "`adapter_scale`: the request names no adapter.", param="adapter_scale")
        return ChosenAdapter()
    (name,), model = names, named.model.model
    found = await adapters_of(front, model, name)
    if not found:
        raise await missing(front, model, name)
    version = fields.get("adapter_version")
    if version not in (None, found[0].digest):
        message = f"The adapter {name} is of version {found[0].digest}, not {str(version)[:200]}."
        raise ApiError(409, message, param="adapter_version")
    return ChosenAdapter(found[0], scale)


def _scale(given: object) -> float:
    """By what the request multiplies the adapter's change. Raises ApiError 400."""
    if given is None:
        return 1.0
    if isinstance(given, bool) or not isinstance(given, int | float) or not abs(given) <= MOST_SCALE:
        message = f"`adapter_scale`: must be a number from -{MOST_SCALE} to {MOST_SCALE}."
        raise ApiError(400, message, param="adapter_scale")
    return float(given)


async def adapters_of(front: Frontend, model: str, name: str | None = None) -> list[AdapterInfo]:
    """Those that are loaded beside a model, or the one of that name. Raises ApiError."""
    return (await front.ask(ListAdapters(uuid.uuid4().hex, name, to_model=model))).adapters


async def missing(front: Frontend, model: str, name: str) -> ApiError:
    """The 404 for an adapter of that name, which says what there is."""
    loaded = await adapters_of(front, model)
    names = ", ".join(info.name for info in loaded[:NAMED])
    there = f"loaded are {names}" if loaded else "none is loaded"
    return ApiError(404, f"There is no adapter {name[:200]}; {there}.", "adapter", "model_not_found")
