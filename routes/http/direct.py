"""Replies in pieces to clients of HTTP/1.0, which know no chunks: they end where the connection does."""

import asyncio
import contextlib
import logging
import socket
import threading

from robyn import Response

from routes.guard.reads import Guard
from routes.http.exchange import HttpRequest, HttpResponse
from routes.http.frontend import ABANDONED_AFTER
from routes.http.stream import JobStream

log = logging.getLogger(__name__)


async def send_directly(guard: Guard, http: HttpRequest, reply: HttpResponse) -> HttpResponse:
    """Write a reply in pieces to the client from a thread of its own; else return it."""
    if isinstance(reply, Response):
        guard.release(http.note)
        return reply
    stream = reply.content
    assert isinstance(stream, JobStream)
    try:
        connection = await asyncio.get_running_loop().run_in_executor(None, guard.take, http.note)
    except BaseException:
        stream.close()
        raise
    if connection is None:
        stream.close()
    else:
        head = "".join(f"{name}: {value}\r\n" for name, value in reply.headers.to_dict().items())
        first = f"HTTP/1.1 {reply.status_code} OK\r\nConnection: close\r\n{head}\r\n".encode()
        threading.Thread(target=_send, args=(connection, first, stream), name="direct", daemon=True).start()
    return Response(200, {}, "")  # which reaches nobody


def _send(connection: socket.socket, first: bytes, stream: JobStream) -> None:
    with connection, contextlib.closing(stream):
        try:
            connection.settimeout(ABANDONED_AFTER)
            connection.sendall(first)
            for piece in stream:
                connection.sendall(piece)
            connection.shutdown(socket.SHUT_WR)
        except OSError:
            log.debug("the client has left")
