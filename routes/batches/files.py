"""/v1/files: files of requests, and of what came of them."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from robyn import Headers, Response, StreamingResponse

from routes.batches.folder import (
    folder_of,
    id_in_path,
    open_folder,
    owner_of,
    page_of,
    quota_of,
    seen_by,
)
from routes.batches.shapes import DeletedFile, FileList, FileObject
from routes.guard.limits import FORM_ROOM
from routes.http.access import demand_access
from routes.http.errors import ApiError, openai_field
from routes.http.exchange import HttpRequest, HttpResponse, file_response, json_response
from routes.http.frontend import Frontend
from routes.http.schemas import RequestBody
from rwkv_batch.batches.records import StoredFile
from rwkv_batch.batches.store import BatchStore, FileInUse, QuotaExceeded, file_of

MOST_LISTED = 10_000
SHORTEST, LONGEST = 3600, 30 * 86400  # seconds after which a file may be asked to expire
IN_PIECES = 8 << 20  # bytes, from which on a file is sent in pieces
PIECE = 1 << 20


Seconds = Annotated[int, Field(ge=SHORTEST, le=LONGEST)]


class FileFields(RequestBody):
    """The form of /v1/files, besides the file."""

    field_error = staticmethod(openai_field)

    purpose: Literal["batch"]
    anchor: Annotated[Literal["created_at"], Field(alias="expires_after[anchor]")] = "created_at"
    seconds: Annotated[Seconds | None, Field(alias="expires_after[seconds]")] = None

    @property
    def expires(self) -> int | None:
        """In seconds since 1970."""
        return None if self.seconds is None else int(time.time()) + self.seconds


async def create(front: Frontend, http: HttpRequest) -> Response:
    """POST /v1/files: a file of requests in the multipart field `file`. Raises ApiError."""
    most = front.settings.max_state
    try:
        files, form = http.form(most + FORM_ROOM)
    except ApiError:
        demand_access(front, http)
        raise
    demand_access(front, http, {name: texts[-1] for name, texts in form.items()})
    store = await folder_of(front)
    if len(files) != 1:
        raise openai_field("file", "send one file as multipart/form-data")
    fields = FileFields.from_json({name: texts[-1] for name, texts in form.items()})
    ((filename, data),) = files.items()
    if len(data) > most:
        raise ApiError(413, f"The file has {len(data)} bytes and at most {most} are taken.", "file")
    name = Path(filename.replace("\\", "/")).name
    file = file_of(owner_of(http), name, fields.expires)

    def write(path: Path) -> int:
        return path.write_bytes(data)

    try:
        kept = await asyncio.to_thread(store.add_file, file, write, quota_of(front, http))
    except QuotaExceeded as error:
        raise ApiError(413, str(error), "file") from None
    return json_response(http, described(kept))


async def list_(front: Frontend, http: HttpRequest) -> Response:
    """GET /v1/files: the newest first. Raises ApiError."""
    store = await open_folder(front, http)
    purpose = http.parameter("purpose")
    files = await asyncio.to_thread(store.files, seen_by(http))
    found = [file for file in files if purpose in ("", file.purpose)]
    page, more = page_of(http, found, MOST_LISTED, MOST_LISTED)
    listed = [described(file) for file in page]
    body: FileList = {
        "object": "list",
        "data": listed,
        "has_more": more,
        "first_id": page[0].id if page else None,
        "last_id": page[-1].id if page else None,
    }
    return json_response(http, body)


async def one(front: Frontend, http: HttpRequest) -> Response:
    """GET and DELETE /v1/files/{id}. Raises ApiError."""
    store = await open_folder(front, http)
    file = await find(store, http, id_in_path(http, "/files/"))
    if http.method != "DELETE":
        return json_response(http, described(file))
    try:
        await asyncio.to_thread(store.remove_file, file.id)
    except FileInUse as error:
        raise ApiError(409, str(error)) from None
    gone: DeletedFile = {"id": file.id, "object": "file", "deleted": True}
    return json_response(http, gone)


async def content(front: Frontend, http: HttpRequest) -> HttpResponse:
    """GET /v1/files/{id}/content. Raises ApiError."""
    store = await open_folder(front, http)
    file = await find(store, http, id_in_path(http, "/files/"))
    path = store.path(file.id)
    try:
        if file.bytes <= IN_PIECES or http.note.old:
            return file_response(http, await asyncio.to_thread(path.read_bytes), file.filename)
        pieces = await asyncio.to_thread(FilePieces, path)
    except FileNotFoundError:  # it has been deleted since
        raise not_there(file.id) from None
    head = file_response(http, b"", file.filename)
    headers = Headers(dict(head.headers.to_dict()))
    return StreamingResponse(pieces, 200, headers, "application/octet-stream")  # type: ignore[arg-type]


class FilePieces:
    """The contents of a file, read as they are sent."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "rb")  # noqa: SIM115  closed at its end, or with this

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        if data := self._file.read(PIECE):
            return data
        self._file.close()
        raise StopIteration


async def find(store: BatchStore, http: HttpRequest, name: str, param: str | None = None) -> StoredFile:
    """The file of that id, if the client may see it. Raises ApiError 404."""
    file = await asyncio.to_thread(store.file, name)
    if file is None or seen_by(http) not in (None, file.owner):
        raise not_there(name, param)
    return file


def not_there(name: str, param: str | None = None) -> ApiError:
    """The 404 for a file of that id."""
    return ApiError(404, f"There is no file {name[:100]}; it was deleted, or has expired.", param)


def described(file: StoredFile) -> FileObject:
    found: FileObject = {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": file.created,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
    }
    if file.expires is not None:
        found["expires_at"] = file.expires
    return found
