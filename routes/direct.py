"""Replies in pieces to clients of HTTP/1.0, which know no chunks: they end where the connection does."""

import asyncio
import contextlib
import logging
import queue
import socket
import threading

from robyn import Headers, Response

from routes.guard.reads import Guard
from routes.http.errors import ApiError
from routes.http.exchange import HttpRequest, HttpResponse
from routes.http.frontend import ABANDONED_AFTER
from routes.http.replies import encode_json
from routes.http.stream import JobStream

log = logging.getLogger(__name__)


async def send_directly(guard: Guard, http: HttpRequest, reply: HttpResponse) -> HttpResponse:
    """Write a reply in pieces to the client from a thread of its own; else return it."""
    if isinstance(reply, Response):
        guard.release(http.note)
        return reply
    stream = reply.content
    assert isinstance(stream, JobStream)
    taken: queue.SimpleQueue[tuple[socket.socket, bytes] | None] = queue.SimpleQueue()
    try:
        # before Robyn lets go of the connection: then it can still answer if there can be no thread
        threading.Thread(target=_send, args=(taken, stream), name="direct", daemon=True).start()
        connection = await asyncio.get_running_loop().run_in_executor(None, guard.take, http.note)
    except BaseException as error:
        taken.put(None)
        stream.close()
        if not isinstance(error, RuntimeError):
            raise
        log.error("a reply to a client of HTTP/1.0 could not begin: %s", error)
        guard.release(http.note)
        busy = ApiError(503, "No thread can be started for this reply; try again later.")
        return Response(503, Headers({"Content-Type": "application/json"}), encode_json(http.shape(busy)))
    if connection is None:
        taken.put(None)
    else:
        head = "".join(f"{name}: {value}\r\n" for name, value in reply.headers.to_dict().items())
        taken.put(
            (connection, f"HTTP/1.1 {reply.status_code} OK\r\nConnection: close\r\n{head}\r\n".encode())
        )
    return Response(200, {}, "")  # which reaches nobody


def _send(taken: queue.SimpleQueue[tuple[socket.socket, bytes] | None], stream: JobStream) -> None:
    """In a thread: write the stream to the connection that comes, behind these bytes; None: to none."""
    with contextlib.closing(stream):
        if (found := taken.get()) is None:
            return
        connection, first = found
        with connection:
            try:
                connection.settimeout(ABANDONED_AFTER)
                connection.sendall(first)
                for piece in stream:
                    connection.sendall(piece)
                connection.shutdown(socket.SHUT_WR)
            except OSError:
                log.debug("the client has left")
