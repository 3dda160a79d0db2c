"""The address at which the front ends of one server listen, and nobody else."""

import errno
import socket


class CannotListen(Exception):
    """The message says what to do."""


def take(host: str, port: int) -> socket.socket:
    """Take the port for this server's front ends; another server is refused until the socket is closed.

    Robyn would wait for an answer on the terminal where somebody listens, or share the port silently. Raises
    CannotListen if nobody could listen there.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    taken = socket.socket(family, socket.SOCK_STREAM)
    try:
        # as the server does: connections that have ended do not count
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind((host, port))
        taken.listen()
    except OSError as error:
        taken.close()
        raise _refusal(host, port, error) from None
    try:
        # From now on the port is shared with sockets of this user that ask for it, as those of front ends do.
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.shutdown(socket.SHUT_RD)  # it listens no more, and remains bound
        with socket.socket(family, socket.SOCK_STREAM) as frontend:
            frontend.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            frontend.bind((host, port))
    except OSError:
        taken.close()  # no Linux, where a socket cannot be kept so: two servers that start at once both begin
    return taken


def _refusal(host: str, port: int, error: OSError) -> CannotListen:
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    match error.errno:
        case errno.EADDRINUSE:
            way = "choose another --port, or stop what uses it"
        case errno.EACCES | errno.EPERM:
            way = "ports below 1024 are for root as a rule, so choose another --port"
        case _:
            way = "let --host be an address of this machine, such as 127.0.0.1, or 0.0.0.0 for all of them"
    return CannotListen(f"cannot listen on {where} ({error.strerror}); {way}")
