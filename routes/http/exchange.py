"""HTTP requests and responses of all routes: ids, CORS, JSON, the access log."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from urllib.parse import quote, unquote_plus

import msgspec
from robyn import Headers, Request, Response, StreamingResponse

from routes.callers.caller import Caller
from routes.guard.inbound import NOTE, Note
from routes.http.body import parse
from routes.http.contents import decode, read_form
from routes.http.errors import ApiError, ErrorShape, Json, anthropic_shape
from routes.http.ids import new_id
from routes.http.open_lists import as_header
from routes.http.replies import encode_json, timestamp
from routes.http.stream import JobStream

CORS = {
    "Access-Control-Allow-Origin": "*",
    "Access-Control-Allow-Methods": "GET, POST, PUT, PATCH, DELETE, OPTIONS",
    "Access-Control-Allow-Headers": "Content-Type, Authorization",
    "Access-Control-Expose-Headers": "x-request-id, x-model-fingerprint, x-ignored, retry-after, "
    "content-disposition, x-ratelimit-limit-requests, x-ratelimit-remaining-requests, "
    "x-ratelimit-reset-requests, x-ratelimit-limit-tokens, x-ratelimit-remaining-tokens, "
    "x-ratelimit-reset-tokens",
}
RETRY_AFTER = {429: "1", 503: "2"}  # seconds
MAX_ID = 128
LINE = "%s %s %d %.0f ms %s%s%s"  # of the access log
PROBES = ("/health", "/health/live", "/health/ready", "/metrics", "/stats")  # which come every few seconds

log = logging.getLogger("rwkv_batch.access")
HttpResponse = Response | StreamingResponse


@dataclass
class HttpRequest:
    """One request on its way through the front end."""

    method: str
    path: str
    id: str
    body: str | bytes  # as it was sent
    query: dict[str, list[str]]  # parameters of the URL, still percent-encoded
    headers: Headers
    began: float
    max_body: int  # bytes that a JSON body may have
    shape: ErrorShape  # the form of its errors
    client: str | None = None  # its IP address
    note: Note = field(default_factory=Note)  # of the guard
    fingerprint: str = ""  # of the model that has answered
    ignored: Sequence[str] = ()  # members of lists of the body that are left out
    # Is called once, with this and the status of the response. It holds no request: a request that it held
    # would stay, with its body, until cycles are looked for.
    count: Callable[["HttpRequest", int], None] = lambda http, status: None
    caller: Caller = field(default_factory=Caller)

    @classmethod
    def from_robyn(cls, request: Request, max_body: int, shape: ErrorShape) -> "HttpRequest":
        """Keeps the id that the client sent if it can stand in a log, otherwise makes one."""
        wanted = request.headers.get("x-request-id") or ""
        note = request.headers.get(NOTE)
        sane = 0 < len(wanted) <= MAX_ID and all("!" <= c <= "~" for c in wanted)
        return cls(
            request.method,
            request.url.path,
            wanted if sane else new_id(),
            request.body,
            request.query_params.to_dict(),
            request.headers,
            time.monotonic(),
            max_body,
            shape,
            request.ip_addr,
            msgspec.json.decode(note, type=Note) if note else Note(),
        )

    def data(self, most: int) -> bytes:
        """The body without its Content-Encoding, which may have `most` bytes then. Raises ApiError."""
        body = self.body if isinstance(self.body, bytes) else self.body.encode()
        declared = self.headers.get("content-length")
        if declared and declared.isdigit() and len(body) < int(declared):
            raise ApiError(400, f"The body ends after {len(body)} of the {declared} bytes of Content-Length.")
        return decode(body, self.headers.get("content-encoding") or "", most)

    def form(self, most: int) -> tuple[dict[str, bytes], dict[str, list[str]]]:
        """The files of a multipart form by their names, and all texts of its other fields. Raises ApiError.

        `most`: bytes that the body may have. Without a form both are empty.
        """
        content_type = self.note.content_type or self.headers.get("content-type") or ""
        return read_form(content_type, self.data(most))

    @cached_property
    def json(self) -> tuple[Json, ApiError | None]:
        """The body as a JSON object, and the error if it cannot be served: it may carry the password."""
        if self.note.content_type:
            return {}, ApiError(400, f"{self.path} takes a JSON object and not a form.")
        try:
            return parse(self.data(self.max_body), self.max_body)
        except ApiError as error:
            return {}, error

    def parameter(self, name: str) -> str:
        """A parameter of the URL, decoded; empty if it is missing. Raises ApiError 400 if it is not UTF-8."""
        given = self.query.get(name, [""])[-1]
        try:
            return unquote_plus(given, errors="strict")
        except UnicodeDecodeError:
            raise ApiError(400, f"The parameter {name} of the URL is not percent-encoded UTF-8.") from None


def json_response(
    http: HttpRequest,
    body: Mapping[str, object] | Sequence[Mapping[str, object]],
    status: int = 200,
    extra: dict[str, str] | None = None,
) -> Response:
    """`body` as JSON with everything that each reply carries; also writes the access log."""
    headers = _headers(http) | {"Content-Type": "application/json"} | (extra or {})
    if status in RETRY_AFTER:
        headers.setdefault("retry-after", RETRY_AFTER[status])
    log_access(http, status)
    return Response(status, Headers(headers), encode_json(body))


def text_response(http: HttpRequest, text: str, media_type: str = "text/plain; charset=utf-8") -> Response:
    """Text as it is; also writes the access log."""
    log_access(http, 200)
    return Response(200, Headers(_headers(http) | {"Content-Type": media_type}), text)


def empty_response(http: HttpRequest) -> Response:
    """204, which has no body; also writes the access log."""
    log_access(http, 204)
    return Response(204, Headers(_headers(http)), "")


def html_response(http: HttpRequest, html: str, policy: str) -> Response:
    """A page. `policy`: its Content-Security-Policy. It tells nobody its URL, which may hold the password."""
    headers = _headers(http) | {
        "Content-Type": "text/html; charset=utf-8",
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }
    log_access(http, 200)
    return Response(200, Headers(headers), html)


def static_response(
    http: HttpRequest, text: str, media_type: str, etag: str, extra: dict[str, str]
) -> Response:
    """A file that never changes while the server runs; 304 without it for a client that has it already."""
    known = [each.strip().removeprefix("W/") for each in (http.headers.get("if-none-match") or "").split(",")]
    status = 304 if etag in known or "*" in known else 200
    headers = _headers(http) | {"ETag": etag, "Cache-Control": "no-cache"} | extra
    if status == 200:
        headers["Content-Type"] = media_type
    log_access(http, status)
    return Response(status, Headers(headers), text if status == 200 else "")


def error_response(http: HttpRequest, error: ApiError, extra: dict[str, str] | None = None) -> Response:
    """`error` in the form of the request's family."""
    return json_response(http, http.shape(error), error.status, extra)


def file_response(http: HttpRequest, data: bytes, name: str) -> Response:
    """`data` as a download under `name`, which may be any text."""
    plain = "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "_" for c in name)
    headers = _headers(http) | {
        "Content-Type": "application/octet-stream",
        "Content-Disposition": f"attachment; filename=\"{plain}\"; filename*=UTF-8''{quote(name, safe='')}",
    }
    log_access(http, 200)
    return Response(200, Headers(headers), data)


def stream_response(http: HttpRequest, stream: JobStream, media_type: str) -> StreamingResponse:
    """`stream` as a response. Its `closed` callback writes the access log."""
    headers = Headers(_headers(http) | {"Content-Type": media_type})
    return StreamingResponse(stream, 200, headers, media_type)  # type: ignore[arg-type]  # any iterator will do


def preflight(http: HttpRequest) -> Response:
    """The response to OPTIONS: browsers, also extensions, may call every route."""
    usual = CORS["Access-Control-Allow-Headers"]
    asked = [name.strip() for name in (http.headers.get("access-control-request-headers") or "").split(",")]
    names = [n for n in asked if n.isascii() and n.replace("-", "").replace("_", "").isalnum()]
    extra = [name for name in names if name.lower() not in usual.lower().split(", ")]
    headers = _headers(http) | {
        "Access-Control-Allow-Headers": ", ".join([usual, *extra]),
        "Access-Control-Max-Age": "86400",
    }
    if http.headers.get("access-control-request-private-network") == "true":
        headers["Access-Control-Allow-Private-Network"] = "true"
    log_access(http, 204)
    return Response(204, Headers(headers), "")


def log_access(http: HttpRequest, status: int, outcome: str = "") -> None:
    """One line per request, without texts and without the query, which may hold the password.

    Also counts the request.
    """
    http.count(http, status)
    level = logging.DEBUG if http.path in PROBES else logging.INFO
    if not log.isEnabledFor(level):
        return
    milliseconds = (time.monotonic() - http.began) * 1000
    key = f" key={http.caller.key.name}" if http.caller.key else ""
    served = http.caller.served
    if key and served.model:
        key += f" tokens={served.prompt_tokens}+{served.completion_tokens}"
    behind = f" {outcome}" if outcome else ""
    values = http.method, http.path, status, milliseconds, http.id, key, behind
    fields = {"fields": partial(_fields, http, status, outcome)}
    # As Logger.log does, which first looks for the line of the program that has called it.
    log.handle(log.makeRecord(log.name, level, "", 0, LINE, values, None, extra=fields))


def audit_entry(http: HttpRequest, status: int) -> dict[str, object]:
    """What the audit log keeps of a request that the engine has got."""
    return _fields(http, status) | {"time": timestamp()} | http.caller.served.hashes()


def _fields(http: HttpRequest, status: int, outcome: str = "") -> dict[str, object]:
    """A request, for programs; times in milliseconds."""
    caller, served = http.caller, http.caller.served
    fields: dict[str, object] = {
        "id": http.id,
        "method": http.method,
        "path": http.path,
        "status": status,
        "ms": round((time.monotonic() - http.began) * 1000, 1),
        "key": caller.key.name if caller.key else None,
    }
    if served.model:
        fields |= {
            "model": served.model,
            "fingerprint": http.fingerprint,
            "rows": served.rows,
            "prompt_tokens": served.prompt_tokens,
            "cached_tokens": served.cached_tokens,
            "completion_tokens": served.completion_tokens,
            "first_token_ms": round((served.first - http.began) * 1000, 1) if served.first else None,
        }
    return fields | ({"outcome": outcome} if outcome else {})


def _headers(http: HttpRequest) -> dict[str, str]:
    answered = {"x-model-fingerprint": http.fingerprint} if http.fingerprint else {}
    named = {"request-id": http.id} if http.shape is anthropic_shape else {}  # where its clients look for it
    left_out = {"x-ignored": as_header(http.ignored)} if http.ignored else {}
    return {**CORS, "x-request-id": http.id, **named, **answered, **left_out, **http.caller.headers}
