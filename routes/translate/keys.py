"""Where the clients of translation services put their key: here it is the password, or one of --keys."""

from collections.abc import Iterator
from urllib.parse import unquote, unquote_plus

from routes.http.access import authorized, refuse_ended
from routes.http.errors import ApiError, ErrorShape, Json
from routes.http.exchange import HttpRequest
from routes.http.frontend import Frontend
from routes.translate.bodies import read_body, url_fields
from routes.translate.errors import deepl_shape, google_shape, plain_shape

FIELDS = ("api_key", "auth_key", "apiKey", "token", "key")
PARAMETERS = ("token", "key", "api_key", "auth_key")
HEADER = "x-goog-api-key"
SCHEME = "deepl-auth-key "
REFUSED = {deepl_shape: 403, google_shape: 403, plain_shape: 403}  # where it is not 401


def allowed_fields(
    front: Frontend,
    http: HttpRequest,
    *,
    required: bool = False,
    in_url: bool = False,
    always: bool = False,
) -> Json:
    """The fields of a request; without `required`, it may have no body.

    in_url: parameters of the URL are fields too. always: it needs a key without --protect-translate,
    too. Raises ApiError: first of all for a wrong key.
    """
    reads = http.body or (required and not in_url) or http.method == "GET"
    fields, problem = read_body(http) if reads else ({}, None)
    if in_url:
        try:
            fields = url_fields(http) | fields
        except ApiError as error:
            problem = error
    demand_key(front, http, fields, always)
    if problem:
        raise problem
    return fields


def demand_key(front: Frontend, http: HttpRequest, fields: Json, always: bool = False) -> None:
    """Raises ApiError unless the request has the password or a key in one of the places, or needs none.

    always: it needs one without --protect-translate, too.
    """
    if authorized(front, http, fields, _keys(http, fields)):
        return
    if always or front.settings.protect_translate:
        refuse_ended(http)
        taken = "no key" if front.accounts else "not the password"
        raise ApiError(_status(http.shape), f"Unauthorized: the key is {taken} of this server.")
    http.caller.is_anyone()


def _status(shape: ErrorShape) -> int:
    return next((status for each, status in REFUSED.items() if each is shape), 401)


def _keys(http: HttpRequest, fields: Json) -> Iterator[bytes]:
    header = (http.headers.get("authorization") or "").strip()
    if header.lower().startswith(SCHEME):
        yield header[len(SCHEME) :].strip().encode()
    yield header.encode()  # some send it without a scheme
    yield (http.headers.get(HEADER) or "").encode()
    for name in FIELDS:
        if isinstance(value := fields.get(name), str):
            yield value.encode(errors="surrogatepass")
    for name in PARAMETERS:
        for text in http.query.get(name, []):
            yield unquote(text).encode()
            yield unquote_plus(text).encode()
