"""Where the clients of translation services put their key: here it is the password."""

from collections.abc import Iterator
from urllib.parse import unquote, unquote_plus

from routes.http.errors import ApiError, ErrorShape, Json
from routes.http.exchange import HttpRequest, authorized
from routes.translate.errors import deepl_shape, google_shape, plain_shape

FIELDS = ("api_key", "auth_key", "apiKey", "token", "key")
PARAMETERS = ("token", "key", "api_key", "auth_key")
HEADERS = ("x-goog-api-key", "api-key")
SCHEME = "deepl-auth-key "
REFUSED = {deepl_shape: 403, google_shape: 403, plain_shape: 403}  # where it is not 401


def demand_key(password: str | None, http: HttpRequest, fields: Json) -> None:
    """Raises ApiError unless the request carries the password in one of the places."""
    if not authorized(password, http, fields, _keys(http, fields)):
        raise ApiError(_status(http.shape), "Unauthorized: the key is not the password of this server.")


def _status(shape: ErrorShape) -> int:
    return next((status for each, status in REFUSED.items() if each is shape), 401)


def _keys(http: HttpRequest, fields: Json) -> Iterator[bytes]:
    header = (http.headers.get("authorization") or "").strip()
    if header.lower().startswith(SCHEME):
        yield header[len(SCHEME) :].strip().encode()
    yield header.encode()  # some send it without a scheme
    for name in HEADERS:
        yield (http.headers.get(name) or "").encode()
    for name in FIELDS:
        if isinstance(value := fields.get(name), str):
            yield value.encode(errors="surrogatepass")
    for name in PARAMETERS:
        for text in http.query.get(name, []):
            yield unquote(text).encode()
            yield unquote_plus(text).encode()
