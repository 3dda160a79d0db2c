"""States fetched from the servers that have them, with the secret of the cluster.

A server answers GET /cluster/state?turn=N to those that know the secret (routes/native/cluster.py).
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing
from http.client import HTTPConnection, HTTPException
from socket import socket
from typing import TypeVar
from urllib.parse import urlencode

from rwkv_batch.state.entries import StoreError

CONNECT_SECONDS = 1.0  # at most: a host that is gone does not say so
PIECE = 1 << 20  # bytes that are read at a time
PATH = "/cluster/state"
LATE = "it has not sent all in time"

T = TypeVar("T")


class Peers:
    """The other servers. `own`: the address of this one. `model`: a further one's name, as they know it."""

    def __init__(self, own: str, secret: str, model: str = "") -> None:
        self.own, self._secret, self._model = own, secret, model

    def read(self, address: str, turn: int, most: int, seconds: float) -> bytes | None:
        """The state at the end of a turn, of at most so many bytes; None if that server does not have it.

        Raises StoreError when it does not answer in time, or refuses.
        """
        try:
            return within(seconds, lambda: self._read(address, turn, most, seconds))
        except (OSError, HTTPException, ValueError, RuntimeError) as error:
            reason = str(error) or type(error).__name__
            raise StoreError(f"The server {address} gives no states ({reason}).") from None

    def _read(self, address: str, turn: int, most: int, seconds: float) -> bytes | None:
        """In a thread of its own. Raises OSError, HTTPException, ValueError, StoreError."""
        deadline = time.monotonic() + seconds
        host, _, port = address.rpartition(":")
        query = {"turn": turn} | ({"model": self._model} if self._model else {})
        connection = HTTPConnection(host.strip("[]"), int(port), timeout=min(CONNECT_SECONDS, seconds))
        with closing(connection):
            connection.connect()
            connected = connection.sock  # which the connection forgets where the reply ends with it
            _limit(connected, deadline)
            headers = {"Authorization": f"Bearer {self._secret}"}
            connection.request("GET", f"{PATH}?{urlencode(query)}", headers=headers)
            with connection.getresponse() as reply:
                if reply.status == 404:
                    return None
                if reply.status != 200:
                    raise StoreError(f"The server {address} refuses to give states ({reply.status}).")
                data = bytearray()
                while len(data) <= most:
                    _limit(connected, deadline)
                    piece = reply.read1(PIECE)
                    if not piece:
                        return bytes(data)
                    data += piece
        return None


def within(seconds: float, work: Callable[[], T]) -> T:
    """The result of work in a thread of its own. Raises TimeoutError after so long, and what `work` raises.

    Some of it may have no limit: a name is looked up by the system, and a head may come byte by byte. The
    thread ends when that does.
    """
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name="state peers", daemon=True).start()
    try:
        return result.result(seconds)
    except TimeoutError:
        raise TimeoutError(LATE) from None


def _limit(connected: socket, deadline: float) -> None:
    """Raises TimeoutError when there is no time left."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError(LATE)
    connected.settimeout(left)
