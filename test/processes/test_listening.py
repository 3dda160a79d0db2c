"""Where nobody can listen: one sentence, with the way out for its reason. A port is of one server."""

import errno
import select
import socket
import sys

import pytest
from serving import free_port

from rwkv_batch.processes import listening
from rwkv_batch.processes.listening import CannotListen, take


def test_an_address_of_another_machine_is_no_matter_of_the_port() -> None:
    with pytest.raises(CannotListen, match=r"192\.0\.2\.1:8000 .*; let --host be an address of this machine"):
        take("192.0.2.1", 8000)
    with pytest.raises(CannotListen, match=r"\[2001:db8::1\]:8000 .*; let --host be") as refused:
        take("2001:db8::1", 8000)
    assert "--port" not in str(refused.value)


def test_a_port_that_is_taken_is_no_matter_of_the_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(CannotListen, match=f":{port} .*; choose another --port, or stop") as refused:
            take("127.0.0.1", port)
    assert "--host" not in str(refused.value)


def test_a_port_for_root_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(socket.socket):
        def bind(self, address: object) -> None:
            raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(listening.socket, "socket", Refusing)
    with pytest.raises(CannotListen, match=r"127\.0\.0\.1:80 \(Permission denied\); ports below 1024"):
        take("127.0.0.1", 80)


def frontend(port: int) -> socket.socket:
    """Listens as Robyn does."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen()
    return listener


@pytest.mark.skipif(sys.platform != "linux", reason="nowhere else a port can be kept so")
def test_of_two_servers_that_start_at_once_one_is_refused() -> None:
    port = free_port()
    with take("127.0.0.1", port):
        for _ in range(2):
            with pytest.raises(CannotListen, match="choose another --port"):
                take("127.0.0.1", port)
    take("127.0.0.1", port).close()


@pytest.mark.skipif(sys.platform != "linux", reason="nowhere else a port can be kept so")
def test_front_ends_get_every_connection_to_a_port_that_is_taken() -> None:
    port = free_port()
    for _ in range(2):  # again, while the ends of connections of before are not forgotten
        with take("127.0.0.1", port), frontend(port) as one, frontend(port) as other:
            for _ in range(20):
                with socket.create_connection(("127.0.0.1", port), timeout=60):
                    (listener,) = select.select([one, other], [], [], 60)[0]
                    listener.accept()[0].close()
