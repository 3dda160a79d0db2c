"""Who may use a route: one password, sent as Bearer token, in the JSON body, or in the URL."""

import hmac
from collections.abc import Iterator
from urllib.parse import unquote, unquote_plus

from routes.http.errors import ApiError, Json
from routes.http.exchange import HttpRequest


def authorized(password: str | None, header: str | None, body: Json | None, query: list[str]) -> bool:
    """Whether a request may pass. `header` is Authorization; `query` holds percent-encoded passwords."""
    if password is None:
        return True
    wanted = password.encode()
    matches = [hmac.compare_digest(given, wanted) for given in _given(header, body, query)]
    return any(matches)


def demand_password(password: str | None, http: HttpRequest, body: Json | None = None) -> None:
    """Raises ApiError 401 unless `http` or its JSON body carries the password."""
    if not authorized(password, http.headers.get("authorization"), body, http.passwords):
        raise ApiError(401, "Unauthorized: invalid or missing password")


def authorized_json(password: str | None, http: HttpRequest) -> Json:
    """The JSON body of `http`; a missing body is an empty object. Raises ApiError, first of all a 401."""
    fields, problem = http.json if http.body else ({}, None)
    demand_password(password, http, fields)
    if problem:
        raise problem
    return fields


def _given(header: str | None, body: Json | None, query: list[str]) -> Iterator[bytes]:
    if header and header.startswith("Bearer "):
        yield header.removeprefix("Bearer ").strip().encode()
    if body and isinstance(body.get("password"), str):
        yield body["password"].encode(errors="surrogatepass")  # a body is checked after its password
    for text in query:  # what a person types into a URL and what a form sends differ in "+"
        yield unquote(text).encode()
        yield unquote_plus(text).encode()
