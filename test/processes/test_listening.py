"""Where nobody can listen: one sentence, with the way out for its reason."""

import errno
import socket

import pytest

from rwkv_batch.processes import listening
from rwkv_batch.processes.listening import CannotListen, probe


def test_an_address_of_another_machine_is_no_matter_of_the_port() -> None:
    with pytest.raises(CannotListen, match=r"192\.0\.2\.1:8000 .*; let --host be an address of this machine"):
        probe("192.0.2.1", 8000)
    with pytest.raises(CannotListen, match=r"\[2001:db8::1\]:8000 .*; let --host be") as refused:
        probe("2001:db8::1", 8000)
    assert "--port" not in str(refused.value)


def test_a_port_that_is_taken_is_no_matter_of_the_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(CannotListen, match=f":{port} .*; choose another --port, or stop") as refused:
            probe("127.0.0.1", port)
    assert "--host" not in str(refused.value)


def test_a_port_for_root_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(socket.socket):
        def bind(self, address: object) -> None:
            raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(listening.socket, "socket", Refusing)
    with pytest.raises(CannotListen, match=r"127\.0\.0\.1:80 \(Permission denied\); ports below 1024"):
        probe("127.0.0.1", 80)
