"""The error of a request, which every route may raise; routes/http/errors.py has its forms."""

import os
import sqlite3
from errno import EDQUOT, EIO, EMFILE, ENFILE, ENOMEM, ENOSPC, EROFS

OF_THE_DISK = (EDQUOT, EIO, EMFILE, ENFILE, ENOMEM, ENOSPC, EROFS)


class ApiError(Exception):
    """A request that cannot be served. `message` is one sentence that names the thing and the way out."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code


def disk_error(error: Exception) -> ApiError | None:
    """What a client gets where the disk refuses something, which may be otherwise soon (503)."""
    if isinstance(error, OSError) and error.errno in OF_THE_DISK:
        reason = os.strerror(error.errno)
    elif type(error) in (sqlite3.OperationalError, sqlite3.DatabaseError):  # the latter: EIO, too
        reason = str(error)
    else:
        return None
    return ApiError(503, f"The server cannot use its disk now ({reason}); try again later.")
