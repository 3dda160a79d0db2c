"""Whether anybody can listen at an address."""

import errno
import socket


class CannotListen(Exception):
    """The message says what to do."""


def probe(host: str, port: int) -> None:
    """Raise CannotListen if nobody could listen there.

    Robyn would wait for an answer on the terminal instead, or share the port silently.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            # as the server does: connections that have ended do not count
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            listener.listen()
    except OSError as error:
        where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        match error.errno:
            case errno.EADDRINUSE:
                way = "choose another --port, or stop what uses it"
            case errno.EACCES | errno.EPERM:
                way = "ports below 1024 are for root as a rule, so choose another --port"
            case _:
                way = (
                    "let --host be an address of this machine, such as 127.0.0.1, or 0.0.0.0 for all of them"
                )
        raise CannotListen(f"cannot listen on {where} ({error.strerror}); {way}") from None
