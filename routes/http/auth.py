"""Who may use a route: one password, sent as Bearer token, in the JSON body, or in the URL."""

import hmac
from collections.abc import Iterator
from urllib.parse import unquote, unquote_plus

from routes.http.errors import ApiError

UNAUTHORIZED = "Unauthorized: invalid or missing password"


def authorized(password: str | None, header: str | None, body: dict | None, query: list[str]) -> bool:
    """Whether a request may pass. `header` is Authorization; `query` holds the still percent-encoded
    `password` parameters.
    """
    if password is None:
        return True
    wanted = password.encode()
    matches = [hmac.compare_digest(given, wanted) for given in _given(header, body, query)]
    return any(matches)


def demand(password: str | None, header: str | None, body: dict | None, query: list[str]) -> None:
    """Raises ApiError 401 unless `authorized`."""
    if not authorized(password, header, body, query):
        raise ApiError(401, UNAUTHORIZED)


def _given(header: str | None, body: dict | None, query: list[str]) -> Iterator[bytes]:
    if header and header.startswith("Bearer "):
        yield header.removeprefix("Bearer ").strip().encode()
    if body and isinstance(body.get("password"), str):
        yield body["password"].encode()
    for text in query:  # what a person types into a URL and what a form sends differ in "+"
        yield unquote(text).encode()
        yield unquote_plus(text).encode()
