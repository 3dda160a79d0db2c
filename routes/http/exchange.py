"""Requests and responses as all routes see them: ids, CORS, JSON, the access log."""

import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import quote, unquote_plus

import msgspec
from robyn import Headers, Request, Response, StreamingResponse

from routes.http.errors import ApiError, native_shape
from routes.http.stream import JobStream

CORS = {
    "Access-Control-Allow-Origin": "*",
    "Access-Control-Allow-Methods": "GET, POST, PUT, DELETE, OPTIONS",
    "Access-Control-Allow-Headers": "Content-Type, Authorization",
}
EXPOSED = {"Access-Control-Expose-Headers": "x-request-id, retry-after, content-disposition"}
RETRY_AFTER = {429: "1", 503: "2"}  # seconds
MAX_ID = 128

log = logging.getLogger("rwkv_batch.access")
Shape = Callable[[ApiError], dict]


@dataclass
class Call:
    """One request on its way through the front end. `shape` is how its errors are told."""

    method: str
    path: str
    id: str
    body: str | bytes
    query: dict[str, list[str]]  # parameters of the URL, still percent-encoded
    headers: Headers
    began: float
    shape: Shape = native_shape

    def header(self, name: str) -> str | None:
        return self.headers.get(name)

    @property
    def passwords(self) -> list[str]:
        """Those of the URL, still percent-encoded."""
        return self.query.get("password", [])

    def parameter(self, name: str) -> str:
        """A parameter of the URL, decoded; empty if it is not there. Raises ApiError 400 when it
        is no text.
        """
        given = self.query.get(name, [""])[-1]
        try:
            return unquote_plus(given, errors="strict")
        except UnicodeDecodeError:
            raise ApiError(400, f"The parameter {name} of the URL is not percent-encoded UTF-8.") from None


def read(request: Request) -> Call:
    wanted = request.headers.get("x-request-id") or ""
    sane = 0 < len(wanted) <= MAX_ID and all("!" <= c <= "~" for c in wanted)
    return Call(
        request.method,
        request.url.path,
        wanted if sane else uuid.uuid4().hex,
        request.body,
        request.query_params.to_dict(),
        request.headers,
        time.monotonic(),
    )


def json_response(call: Call, body: dict, status: int = 200, extra: dict[str, str] | None = None) -> Response:
    """`body` as JSON with everything that each reply carries; also writes the access log."""
    headers = _headers(call) | {"Content-Type": "application/json"} | (extra or {})
    if status in RETRY_AFTER:
        headers["retry-after"] = RETRY_AFTER[status]
    log_access(call, status)
    return Response(status, Headers(headers), msgspec.json.encode(body))


def error_response(call: Call, error: ApiError, extra: dict[str, str] | None = None) -> Response:
    return json_response(call, call.shape(error), error.status, extra)


def file_response(call: Call, data: bytes, name: str) -> Response:
    """`data` as a download under `name`, which may be any text."""
    plain = "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "_" for c in name)
    headers = _headers(call) | {
        "Content-Type": "application/octet-stream",
        "Content-Disposition": f"attachment; filename=\"{plain}\"; filename*=UTF-8''{quote(name, safe='')}",
    }
    log_access(call, 200)
    return Response(200, Headers(headers), data)


def stream_response(call: Call, stream: JobStream, media_type: str) -> StreamingResponse:
    """Whoever closes the stream writes the access log."""
    headers = Headers(_headers(call) | {"Content-Type": media_type})
    return StreamingResponse(stream, 200, headers, media_type)  # type: ignore[arg-type]  # any iterator will do


def preflight(call: Call) -> Response:
    """The answer to OPTIONS: browsers, also extensions, may call every route."""
    headers = _headers(call) | {"Access-Control-Max-Age": "86400"}
    if asked := call.header("access-control-request-headers"):
        extra = [
            name.strip()
            for name in asked.split(",")
            if name.strip().replace("-", "").replace("_", "").isalnum()
        ]
        known = {name.lower() for name in CORS["Access-Control-Allow-Headers"].split(", ")}
        headers["Access-Control-Allow-Headers"] = ", ".join(
            [
                CORS["Access-Control-Allow-Headers"],
                *(name for name in extra if name.isascii() and name.lower() not in known),
            ]
        )
    if call.header("access-control-request-private-network") == "true":
        headers["Access-Control-Allow-Private-Network"] = "true"
    log_access(call, 204)
    return Response(204, Headers(headers), "")


def log_access(call: Call, status: int, outcome: str = "") -> None:
    """One line per request, without texts and without the query, which may hold the password."""
    milliseconds = (time.monotonic() - call.began) * 1000
    level = logging.DEBUG if call.path == "/health" else logging.INFO  # probes come every second
    log.log(
        level,
        "%s %s %d %.0f ms %s%s",
        call.method,
        call.path,
        status,
        milliseconds,
        call.id,
        f" {outcome}" if outcome else "",
    )


def _headers(call: Call) -> dict[str, str]:
    return CORS | EXPOSED | {"x-request-id": call.id}
