"""States fetched from the servers that have them, with the secret of the cluster.

A server answers GET /cluster/state?turn=N to those that know the secret (routes/native/cluster.py).
"""

import time
from http.client import HTTPConnection, HTTPException
from urllib.parse import urlencode

from rwkv_batch.state.entries import StoreError

CONNECT_SECONDS = 1.0  # at most: a host that is gone does not say so
PIECE = 1 << 20  # bytes that are read at a time
PATH = "/cluster/state"


class Peers:
    """The other servers. `own`: the address of this one. `model`: a further one's name, as they know it."""

    def __init__(self, own: str, secret: str, model: str = "") -> None:
        self.own, self._secret, self._model = own, secret, model

    def read(self, address: str, turn: int, most: int, seconds: float) -> bytes | None:
        """The state at the end of a turn, of at most so many bytes; None if that server does not have it.

        Raises StoreError when it does not answer in time, or refuses.
        """
        deadline = time.monotonic() + seconds
        host, _, port = address.rpartition(":")
        query = {"turn": turn} | ({"model": self._model} if self._model else {})
        connection: HTTPConnection | None = None
        try:
            connection = HTTPConnection(host.strip("[]"), int(port), timeout=min(CONNECT_SECONDS, seconds))
            connection.connect()
            _limit(connection, deadline)
            headers = {"Authorization": f"Bearer {self._secret}"}
            connection.request("GET", f"{PATH}?{urlencode(query)}", headers=headers)
            reply = connection.getresponse()
            if reply.status == 404:
                return None
            if reply.status != 200:
                raise StoreError(f"The server {address} refuses to give states ({reply.status}).")
            data = bytearray()
            while len(data) <= most:
                _limit(connection, deadline)
                piece = reply.read1(PIECE)
                if not piece:
                    return bytes(data)
                data += piece
            return None
        except (OSError, HTTPException, ValueError) as error:
            reason = str(error) or type(error).__name__
            raise StoreError(f"The server {address} gives no states ({reason}).") from None
        finally:
            if connection:
                connection.close()


def _limit(connection: HTTPConnection, deadline: float) -> None:
    """Raises TimeoutError when there is no time left."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("it has not sent all in time")
    if connection.sock:
        connection.sock.settimeout(left)
