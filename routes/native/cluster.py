"""What servers that share a database ask of each other, with the secret of the cluster."""

import uuid
from typing import Annotated

from pydantic import Field
from robyn import Response

from routes.http.access import demand_access, demand_password
from routes.http.errors import ApiError, Json
from routes.http.exchange import HttpRequest, file_response
from routes.http.frontend import Frontend
from routes.http.model_field import ask_model
from routes.http.schemas import RequestBody
from rwkv_batch.wire.commands import FetchState


class FetchFields(RequestBody):
    """The URL parameters of /cluster/state."""

    turn: Annotated[int, Field(ge=1, lt=1 << 63)]


async def state(front: Frontend, http: HttpRequest) -> Response:
    """GET /cluster/state: the state at the end of a turn that this server has made. Raises ApiError."""
    secret = front.settings.cluster_secret
    if secret is None:
        demand_access(front, http)
        raise ApiError(404, "This server gives no states to others; start it with --cluster-secret-file.")
    demand_password(secret, http, None, "--cluster-secret-file")
    given: Json = {name: http.parameter(name) for name in ("turn", "model") if name in http.query}
    fields = FetchFields.from_json(given)
    found = await ask_model(front, http, given, FetchState(uuid.uuid4().hex, fields.turn))
    if not found.data:
        raise ApiError(404, f"This server has no state of the turn {fields.turn}.")
    return file_response(http, found.data, f"{fields.turn}.state")
