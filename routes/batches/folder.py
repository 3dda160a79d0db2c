"""The folder of files and batches, as routes see it: whose it is, and pages of lists.

What is asked of it may take as long as the disk does, so that is done by threads: `asyncio.to_thread`.
"""

import asyncio
import threading
from collections.abc import Sequence
from functools import cache
from typing import Protocol, TypeVar

from routes.callers.caller import Role
from routes.http.access import demand_access
from routes.http.errors import ApiError, openai_field
from routes.http.exchange import HttpRequest
from routes.http.frontend import Frontend
from rwkv_batch.batches.store import BatchesError, BatchStore

PAGE = 20  # batches of a page unless the client says otherwise
NO_BATCHES = "This server keeps no files and batches; who runs it can name a folder for them (--batch-dir)."


class Identified(Protocol):
    """What has an id."""

    @property
    def id(self) -> str: ...


Record = TypeVar("Record", bound=Identified)


async def open_folder(front: Frontend, http: HttpRequest) -> BatchStore:
    """The folder, for a client that may use it. Raises ApiError 401, and 404 where there is none."""
    demand_access(front, http)
    return await folder_of(front)


async def folder_of(front: Frontend) -> BatchStore:
    """Raises ApiError 404 where there is none, and 503 where it cannot be opened."""
    if front.settings.batch_dir is None:
        raise ApiError(404, NO_BATCHES)
    try:
        return await asyncio.to_thread(_opened, front.settings.batch_dir, front.settings.batch_bytes)
    except BatchesError as error:
        raise ApiError(503, str(error)) from None


_opening = threading.Lock()


def _opened(folder: str, quota: int) -> BatchStore:
    with _opening:
        return _kept(folder, quota)


@cache
def _kept(folder: str, quota: int) -> BatchStore:
    return BatchStore(folder, quota)


def owner_of(http: HttpRequest) -> str:
    """The key under which a client's files and batches are kept."""
    return http.caller.owner


def quota_of(front: Frontend, http: HttpRequest) -> int | None:
    """Bytes that files of the client's key may have together; None: as many as there is room for."""
    key = front.accounts.keys.named(http.caller.owner) if front.accounts else None
    return key.batch_bytes if key else None


def seen_by(http: HttpRequest) -> str | None:
    """Whose files and batches a client sees; None: all."""
    sees_all = http.caller.role is Role.OPERATOR and not http.caller.owner_asked
    return None if sees_all else http.caller.owner


def id_in_path(http: HttpRequest, kind: str) -> str:
    """The id behind `kind` ("/files/") in the path."""
    return http.path.split(kind, 1)[1].split("/")[0]


def page_of(http: HttpRequest, records: Sequence[Record], usual: int, most: int) -> tuple[list[Record], bool]:
    """The records that `limit`, `after` and `order` of the URL ask for, and whether more follow.

    records: the newest first. Raises ApiError 400.
    """
    limit = http.parameter("limit") or str(usual)
    if not (limit.isascii() and limit.isdigit() and len(limit) <= 5 and 1 <= int(limit) <= most):
        raise openai_field("limit", f"input should be a number from 1 to {most}")
    order = http.parameter("order") or "desc"
    if order not in ("asc", "desc"):
        raise openai_field("order", "input should be asc or desc")
    listed = list(records) if order == "desc" else list(reversed(records))
    if after := http.parameter("after"):
        places = [place for place, record in enumerate(listed) if record.id == after]
        if not places:
            raise openai_field("after", "input should be the id of one of the list")
        listed = listed[places[0] + 1 :]
    return listed[: int(limit)], len(listed) > int(limit)
