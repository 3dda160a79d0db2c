"""GET / for programs: what the server is, and which routes it has."""

from collections.abc import Mapping

from robyn import Response

from routes.http.access import authorized
from routes.http.errors import Json
from routes.http.exchange import HttpRequest, json_response
from routes.http.frontend import Frontend
from rwkv_batch import __version__


def describe(front: Frontend, http: HttpRequest, endpoints: Mapping[str, list[str]]) -> Response:
    """endpoints: the methods of each path. Names the models only to those who may use them, as /health."""
    body: Json = {"name": "rwkv-batch", "version": __version__, "status": front.status}
    if authorized(front, http):
        body["models"] = list(front.models)
    return json_response(http, body | {"endpoints": endpoints}, extra={"Vary": "Accept"})
