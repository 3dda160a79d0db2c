"""What only the one who runs the server may do: load files that lie on its disk."""

import ipaddress
from pathlib import Path
from urllib.parse import urlsplit

from routes.http.access import authorized_json, demand_password
from routes.http.errors import ApiError, Json
from routes.http.exchange import HttpRequest
from routes.http.frontend import Frontend


def admin_json(front: Frontend, http: HttpRequest) -> Json:
    """The JSON body of a request that carries --admin-password, or without one comes from this machine.

    Raises ApiError.
    """
    password = front.settings.admin_password
    if password is not None:
        fields, problem = http.json if http.body else ({}, None)
        demand_password(password, http, fields, "--admin-password")
        if problem:
            raise problem
        return fields
    fields = authorized_json(front, http)
    http.caller.demand_operator()
    if not _is_local(http):
        raise ApiError(
            403,
            f"{http.path} is open to this machine only; start the server with --admin-password, and send it.",
        )
    return fields


def checkpoint_inside(front: Frontend, name: str, field: str) -> Path:
    """The path of a checkpoint in the models' folder: a file, or a Hugging Face folder. Raises ApiError."""
    root, path = _inside(front, name, field)
    if not path.is_dir() or path == root:
        return file_inside(front, name, field)
    for part in path.iterdir():
        if not part.resolve().is_relative_to(root):
            raise _outside(field, f"{name}/{part.name}")
    return path


def file_inside(front: Frontend, name: str, field: str) -> Path:
    """The file of that name inside of --models. Raises ApiError."""
    _, path = _inside(front, name, field)
    if not path.is_file():
        message = f"`{field}`: there is no file {name[:200]} in the folder of --models."
        raise ApiError(404, message, param=field)
    return path


def _inside(front: Frontend, name: str, field: str) -> tuple[Path, Path]:
    """The folder of --models, and a path in it. Raises ApiError."""
    folder = front.settings.models
    if folder is None:
        raise ApiError(403, "Files are loaded from the folder of --models; start the server with it.")
    root = Path(folder).resolve()
    try:
        path = (root / name).resolve()
        path.exists()
    except (OSError, ValueError):  # no path at all
        raise _outside(field, name) from None
    if not path.is_relative_to(root):
        raise _outside(field, name)
    return root, path


def _outside(field: str, name: str) -> ApiError:
    return ApiError(400, f"`{field}`: {name[:200]} is not inside of the folder of --models.", param=field)


def _is_local(http: HttpRequest) -> bool:
    """A proxy on this machine says for whom it asks, and a browser for which page."""
    if http.headers.get("x-forwarded-for") or http.headers.get("forwarded"):
        return False
    origin = http.headers.get("origin")
    return is_loopback(http.client or "") and (not origin or is_loopback(_host(origin)))


def _host(origin: str) -> str:
    try:
        return urlsplit(origin).hostname or ""
    except ValueError:
        return ""


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
        # a client of IPv4 at a socket of IPv6, as with --host ::
        mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
        return (mapped or address).is_loopback
    except ValueError:
        return False
