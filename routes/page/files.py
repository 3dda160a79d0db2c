"""The page that browsers get at /: its files, which are read once and served from memory.

They hold no data, so they need no password; every call that the page makes does.
"""

import hashlib
from pathlib import Path
from typing import NamedTuple

from robyn import Response

from routes.http.errors import ApiError
from routes.http.exchange import HttpRequest, static_response
from routes.http.frontend import Frontend

FOLDER = Path(__file__).parent / "static"
INDEX = "index.html"
VENDORED = "vendor"  # the folder of other people's modules
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Nothing of another host, nothing inline, and no text of a model as HTML (trusted types).
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
SAFE = {
    "Content-Security-Policy": POLICY,
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class PageFile(NamedTuple):
    """A file as it is served."""

    text: str
    media_type: str
    etag: str


def _read(path: Path) -> PageFile:
    data = path.read_bytes()
    digest = hashlib.sha256(data).hexdigest()[:32]
    return PageFile(data.decode(), MEDIA_TYPES[path.suffix], f'"{digest}"')


FILES = {
    path.relative_to(FOLDER).as_posix(): _read(path)
    for path in sorted([*FOLDER.iterdir(), *(FOLDER / VENDORED).iterdir()])
    if path.suffix in MEDIA_TYPES
}


def index(http: HttpRequest) -> Response:
    """The document itself."""
    return _serve(http, FILES[INDEX], {"Vary": "Accept"})


async def file(front: Frontend, http: HttpRequest) -> Response:
    """GET /page/{file}: what the document refers to. Raises ApiError 404."""
    return _file(front, http, "")


async def vendored(front: Frontend, http: HttpRequest) -> Response:
    """GET /page/vendor/{file}: a module of somebody else. Raises ApiError 404."""
    return _file(front, http, f"{VENDORED}/")


def _file(front: Frontend, http: HttpRequest, folder: str) -> Response:
    name = folder + http.path.rstrip("/").rpartition("/")[2]
    if not front.settings.page:
        raise ApiError(404, "There is no page here; the server was started with --no-page.")
    if name not in FILES or name == INDEX:
        raise ApiError(404, f"The page has no file {name[:60]}; it begins at /.")
    return _serve(http, FILES[name])


def _serve(http: HttpRequest, found: PageFile, extra: dict[str, str] | None = None) -> Response:
    return static_response(http, found.text, found.media_type, found.etag, SAFE | (extra or {}))


def prefers_html(accept: str) -> bool:
    """Whether an Accept header asks for HTML by name, and rates it above JSON. `*/*` alone does not."""
    weights = dict(_weight(part) for part in accept.split(",") if part.strip())
    return weights.get("text/html", 0.0) > weights.get("application/json", 0.0)


def _weight(part: str) -> tuple[str, float]:
    """A media type and its q; 0 where q is no number."""
    media, *parameters = (each.strip().lower() for each in part.split(";"))
    for parameter in parameters:
        if parameter.startswith("q="):
            try:
                return media, float(parameter[2:])
            except ValueError:
                return media, 0.0
    return media, 1.0
