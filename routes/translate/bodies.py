"""The body of a request: JSON, or a form, or the parameters of the URL."""

from collections.abc import Mapping
from urllib.parse import parse_qs

from routes.http.errors import ApiError, Json
from routes.http.exchange import HttpRequest

FORM, MULTIPART = "application/x-www-form-urlencoded", "multipart/form-data"
MOST_FIELDS = 10_000  # of a form


def read_body(http: HttpRequest) -> tuple[Json, ApiError | None]:
    """The fields, and the error if they cannot be read: they may carry the key.

    A field that a form has several times is a list.
    """
    kind = (
        (http.note.content_type or http.headers.get("content-type") or "").partition(";")[0].strip().lower()
    )
    try:
        if http.method in ("GET", "HEAD"):
            return url_fields(http), None
        if kind == FORM and not _is_json(http):
            return _form(http), None
        if kind == MULTIPART:
            _data(http)
            return _fields(http.form(http.max_body)[1]), None
    except ApiError as error:
        return {}, error
    return http.json


def url_fields(http: HttpRequest) -> Json:
    """The parameters of the URL; one that is there several times is a list. Raises ApiError 400."""
    return {name: http.parameter(name) for name in http.query} | _repeated(http)


def _is_json(http: HttpRequest) -> bool:
    """Whether it is JSON all the same, as curl sends with -d."""
    return http.data(http.max_body).lstrip()[:1] in (b"{", b"[")


def _repeated(http: HttpRequest) -> Json:
    """Parameters of the URL that are there several times."""
    query = "&".join(
        f"{name}={text}" for name, texts in http.query.items() if len(texts) > 1 for text in texts
    )
    return _parsed(query)


def _data(http: HttpRequest) -> bytes:
    """Raises ApiError 413."""
    data = http.data(http.max_body)
    if len(data) > http.max_body:
        raise ApiError(413, f"The body has {len(data)} bytes and at most {http.max_body} are taken.")
    return data


def _form(http: HttpRequest) -> Json:
    try:
        return _parsed(_data(http).decode())
    except UnicodeDecodeError as error:
        raise ApiError(400, f"The body is not UTF-8: byte {error.start} cannot be decoded.") from None


def _parsed(text: str) -> Json:
    try:
        found = parse_qs(text, keep_blank_values=True, errors="strict", max_num_fields=MOST_FIELDS)
    except UnicodeDecodeError:
        raise ApiError(400, "The form is not percent-encoded UTF-8.") from None
    except ValueError:
        raise ApiError(
            400, f"The form has more than {MOST_FIELDS} fields; send fewer texts at once."
        ) from None
    return _fields(found)


def _fields(found: Mapping[str, list[str]]) -> Json:
    return {name: texts if len(texts) > 1 else texts[0] for name, texts in found.items()}
