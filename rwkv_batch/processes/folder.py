"""The folder of a running server: for the socket between its processes, and for what they count."""

import os
import shutil
import socket
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

SOCKET = "engine"  # in that folder
PLACES = ("/tmp", "/var/tmp", "/dev/shm", "/run")


class NoFolder(Exception):
    """The message says what to do."""


@contextmanager
def runtime_folder(places: Iterable[str] | None = None) -> Iterator[Path]:
    """A new folder for its owner alone, until the end. Raises NoFolder.

    It is in the first of these places that can be written and whose path is short enough for a socket. If
    Python finds no place for temporary files, as none of its own can be written, it gets this one.
    """
    folder = _make(_places() if places is None else places)
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        os.environ["TMPDIR"] = str(folder)  # of all processes that are started
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _places() -> list[str]:
    named = [os.environ.get(name) for name in ("TMPDIR", "TEMP", "TMP", "XDG_RUNTIME_DIR")]
    return [place for place in (*named[:3], *PLACES, named[3], os.curdir) if place]


def _make(places: Iterable[str]) -> Path:
    refused: dict[str, str] = {}
    for place in places:
        try:
            folder = Path(tempfile.mkdtemp(prefix="rwkv-", dir=os.path.abspath(place)))
        except OSError as error:
            refused[place] = error.strerror or str(error)
            continue
        try:
            with socket.socket(socket.AF_UNIX) as probe:
                probe.bind(os.fsencode(folder / SOCKET))
            (folder / SOCKET).unlink()
            return folder
        except OSError as error:  # the path is too long, or the file system has no sockets
            refused[place] = error.strerror or str(error)
            shutil.rmtree(folder, ignore_errors=True)
    tried = ", ".join(f"{place} ({reason})" for place, reason in refused.items())
    raise NoFolder(
        f"no folder can hold the server's temporary files and its socket: {tried}; name one with TMPDIR that "
        "can be written and has a short path"
    )
