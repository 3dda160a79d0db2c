"""Replies in pieces to clients of HTTP/1.0, which know no chunks: they end where the connection does."""

import asyncio
import contextlib
import itertools
import logging
import queue
import socket
import struct
import threading

from robyn import Headers, Response

from routes.guard.reads import Guard
from routes.http.errors import ApiError
from routes.http.exchange import HttpRequest, HttpResponse
from routes.http.replies import encode_json
from routes.http.stream import JobStream

AT_ONCE = struct.pack("ii", 1, 0)  # a connection ends, and what is not sent yet with it

log = logging.getLogger(__name__)


async def send_directly(
    guard: Guard, http: HttpRequest, reply: HttpResponse, send_timeout: float
) -> HttpResponse:
    """Write a reply in pieces to the client from a thread of its own; else return it.

    send_timeout: seconds in which the client may read nothing of it; 0: without end.
    """
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
        connection.settimeout(send_timeout or None)
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
                for piece in itertools.chain((first,), stream):
                    while piece:  # the time is for each part of it that goes
                        piece = piece[connection.send(piece) :]
                connection.shutdown(socket.SHUT_WR)
            except TimeoutError:
                with contextlib.suppress(OSError):
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, AT_ONCE)
            except OSError:
                log.debug("the client has left")
