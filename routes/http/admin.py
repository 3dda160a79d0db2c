"""What only the one who runs the server may do: load files that lie on its disk."""

import ipaddress
from pathlib import Path

from routes.http.errors import ApiError, Json
from routes.http.exchange import HttpRequest, authorized_json
from routes.http.frontend import Frontend


def admin_json(front: Frontend, http: HttpRequest) -> Json:
    """The JSON body of a request that carries --admin-password, or without one comes from this machine.

    Raises ApiError.
    """
    password = front.settings.admin_password
    if password is not None:
        return authorized_json(password, http)
    fields = authorized_json(front.settings.password, http)
    if not _is_local(http):
        raise ApiError(
            403,
            f"{http.path} is open to this machine only; start the server with --admin-password, and send it.",
        )
    return fields


def file_inside(front: Frontend, name: str, field: str, folders: bool = False) -> Path:
    """The file of that name inside of --models; `folders`: or the folder. Raises ApiError."""
    folder = front.settings.models
    if folder is None:
        raise ApiError(403, "Files are loaded from the folder of --models; start the server with it.")
    root = Path(folder).resolve()
    path = (root / name).resolve()
    if not path.is_relative_to(root):
        raise ApiError(400, f"`{field}`: {name[:200]} is not inside of the folder of --models.", param=field)
    if not (path.is_file() or (folders and path.is_dir())):
        message = f"`{field}`: there is no file {name[:200]} in the folder of --models."
        raise ApiError(404, message, param=field)
    return path


def _is_local(http: HttpRequest) -> bool:
    """A proxy on this machine says for whom it asks."""
    if http.headers.get("x-forwarded-for") or http.headers.get("forwarded"):
        return False
    try:
        return ipaddress.ip_address(http.client or "").is_loopback
    except ValueError:
        return False
