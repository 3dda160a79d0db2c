"""Who may use the server: the password, keys, and where a request has them.

Either is sent as Bearer token, as `x-api-key` or `api-key`, in the JSON body, or in the URL. Only after one
of these functions has let a caller in can its handler reach the engine (routes/callers/wire.py).
"""

import hmac
from collections.abc import Iterable, Iterator
from urllib.parse import unquote, unquote_plus

from routes.callers.caller import Role, not_allowed
from routes.http.errors import ApiError, Json
from routes.http.exchange import HttpRequest
from routes.http.frontend import Frontend
from rwkv_batch.keys.records import NAME

KEY_HEADERS = ("x-api-key", "api-key")  # of programs for Anthropic, and of those for Azure OpenAI
OWNER_HEADER = "x-rwkv-owner"  # by which the operator asks in the name of a key


def authorized(
    front: Frontend, http: HttpRequest, body: Json | None = None, more: Iterable[bytes] = ()
) -> bool:
    """Whether `http` or its JSON body has the password or a key, or none is needed.

    `more`: what else may be one of them. Raises ApiError 403 for an owner that only the operator may name.
    """
    password, accounts, caller = front.settings.password, front.accounts, http.caller
    if caller.vouched:
        return True
    if password is None and accounts is None:
        caller.is_operator()
        return True
    given = (*_given(http, body), *more)
    if password is not None and is_among(password, given):
        caller.is_operator()
    elif accounts and (key := next(filter(None, map(accounts.find, given)), None)):
        caller.key = key
        if key.ended:
            return False
        caller.is_key(key)
    else:
        return False
    if accounts:
        _choose_owner(http)
    return True


def demand_access(front: Frontend, http: HttpRequest, body: Json | None = None) -> None:
    """Raises ApiError 401 unless `http` or its JSON body has the password or a key; 403 if that has ended."""
    if not authorized(front, http, body):
        refuse_ended(http)
        raise ApiError(401, f"Unauthorized: invalid or missing {'key' if front.accounts else 'password'}")


def refuse_ended(http: HttpRequest) -> None:
    """Raises ApiError 403 for a key whose last day is over."""
    if (key := http.caller.key) and key.ended:
        raise ApiError(403, f"This key was taken until {key.ends}; ask for a new one.", code="key_ended")


def demand_operator(front: Frontend, http: HttpRequest, body: Json | None = None) -> None:
    """Raises ApiError 401 without the password or a key, 403 for a key that is not an admin's."""
    demand_access(front, http, body)
    http.caller.demand_operator()


def demand_password(password: str, http: HttpRequest, body: Json | None, flag: str) -> None:
    """Raises ApiError 401 unless `http` or its JSON body has the password of that flag."""
    if not is_among(password, [*_given(http, body)]):
        raise ApiError(401, f"Unauthorized: invalid or missing password, that of {flag}")
    http.caller.is_operator()


def authorized_json(front: Frontend, http: HttpRequest, required: bool = False) -> Json:
    """The JSON body of `http`; without `required`, a missing body is an empty object.

    Raises ApiError, first of all a 401.
    """
    fields, problem = http.json if http.body or required else ({}, None)
    demand_access(front, http, fields)
    if problem:
        raise problem
    return fields


def is_among(password: str, given: Iterable[bytes]) -> bool:
    """Compares in a time that says nothing of the password."""
    matches = [hmac.compare_digest(each, password.encode()) for each in given]
    return any(matches)


def _choose_owner(http: HttpRequest) -> None:
    if not (owner := http.headers.get(OWNER_HEADER) or ""):
        return
    caller = http.caller
    if caller.role is not Role.OPERATOR and owner != caller.owner:
        raise not_allowed(f"ask in the name of another ({OWNER_HEADER})")
    if not NAME.fullmatch(owner):
        raise ApiError(400, f"{OWNER_HEADER}: must be the name of a key.")
    caller.owner, caller.owner_asked = owner, True


def _given(http: HttpRequest, body: Json | None) -> Iterator[bytes]:
    header = http.headers.get("authorization") or ""
    scheme, _, token = header.partition(" ")
    if scheme.lower() == "bearer":  # in any case (RFC 9110, 11.1)
        yield token.strip().encode()
    for name in KEY_HEADERS:
        if key := http.headers.get(name):
            yield key.encode()
    if body and isinstance(body.get("password"), str):
        yield body["password"].encode(errors="surrogatepass")  # a body is checked after its password
    # What a person types into a URL and what a form sends differ in "+".
    for text in http.query.get("password", []):
        yield unquote(text).encode()
        yield unquote_plus(text).encode()
