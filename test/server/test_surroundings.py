"""A server whose log, signals, temporary folder or limits are not as usual."""

import os
import signal
import socket
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest
from serving import START_SECONDS, Server, alive, until

PROMPT = {
    "contents": ["User: What is the capital of France?\n\nAssistant:"],
    "temperature": 0,
    "max_tokens": 5,
}


def children(server: Server) -> list[int]:
    """Of the supervisor, the oldest first, whether or not there is a log."""
    threads = Path(f"/proc/{server.process.pid}/task")
    found = list[int]()
    for thread in threads.iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            found += map(int, (thread / "children").read_text().split())
    return sorted(pid for pid in found if alive(pid))


def asked(server: Server) -> httpx.Response:
    return httpx.post(server.url + "/v1/chat/completions", json=PROMPT, timeout=60)


def answers(server: Server) -> bool:
    reply = asked(server)
    assert reply.status_code == 200, reply.text
    return bool(reply.json()["choices"][0]["message"]["content"])


def test_a_full_disk_ignored_signals_and_a_long_temporary_folder_end_nothing():
    with tempfile.TemporaryDirectory() as folder:
        long = Path(folder) / ("long" * 30)
        long.mkdir()
        script = f"trap '' HUP INT; TMPDIR={long} exec \"$@\" >/dev/full 2>&1"
        server = Server("--device", "cpu", "--frontends", "1", through=script)
        assert answers(server)
        engine = children(server)[1]  # behind multiprocessing's own process
        for ignored in (signal.SIGHUP, signal.SIGINT):
            server.process.send_signal(ignored)
        os.kill(engine, signal.SIGKILL)  # a recovery says much
        until(lambda: not alive(engine))
        until(lambda: len(children(server)) == 3)
        # The front end may still learn that the first has died.
        until(lambda: asked(server).status_code == 200)
        assert list(long.iterdir()) == []
        pids = children(server)
        assert server.stop() == 0
        until(lambda: not any(alive(pid) for pid in pids))


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_a_signal_that_is_not_ignored_drains(number: signal.Signals):
    server = Server("--device", "cpu", "--frontends", "1", wait=False)
    until(lambda: "frontend-1 started" in server.log(), START_SECONDS)
    assert server.stop(number) == 0
    assert "draining" in server.log()


def test_a_server_without_streams_serves():
    server = Server("--device", "cpu", "--frontends", "1", through='exec "$@" <&- >&- 2>&-')
    assert answers(server)
    for pid in (server.process.pid, *children(server)[1:]):
        assert [os.readlink(f"/proc/{pid}/fd/{number}") for number in range(3)] == ["/dev/null"] * 3
    assert server.stop() == 0


SILENT = {
    "asked nothing": b"",
    "answered": b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n",
    "half a request": b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 900\r\n\r\n{",
}


def test_silent_connections_leave_room_for_requests():
    """More of them than files, while a stream runs; its client gets all of it."""
    server = Server("--device", "cpu", "--frontends", "1", through='ulimit -n 140; exec "$@"')
    endless = PROMPT | {"stop_tokens": [], "max_tokens": 100_000, "stream": True}
    try:
        with httpx.stream("POST", server.url + "/v1/chat/completions", json=endless, timeout=60) as stream:
            pieces = stream.iter_raw()
            next(pieces)
            for kind in ("asked nothing", "answered"):
                with ExitStack() as opened:
                    for _ in range(140):
                        one = socket.create_connection(("127.0.0.1", server.port))
                        opened.enter_context(one).sendall(SILENT[kind])
                    assert answers(server)
            for _ in range(100):
                assert next(pieces)
        with ExitStack() as opened:  # which cannot be told from requests that wait while there are some
            for _ in range(140):
                one = socket.create_connection(("127.0.0.1", server.port))
                opened.enter_context(one).sendall(SILENT["half a request"])
            assert answers(server)
    finally:
        assert server.stop() == 0, server.log()


def test_too_few_files_are_a_sentence():
    server = Server("--device", "cpu", wait=False, through='ulimit -n 64; exec "$@"')
    assert server.process.wait(START_SECONDS) == 2
    (line,) = server.log().splitlines()
    assert "64 files" in line and "ulimit -n" in line


def test_a_database_that_is_moved_away_takes_no_turns_until_it_is_back(tmp_path: Path):
    """They would be gone at the next start."""
    file, aside = tmp_path / "sessions.db", tmp_path / "aside.db"
    server = Server("--device", "cpu", "--frontends", "1", "--state-db", str(file))

    def turn() -> httpx.Response:
        body = PROMPT | {"session_id": "a"}
        return httpx.post(server.url + "/state/chat/completions", json=body, timeout=60)

    try:
        assert turn().status_code == 200
        file.rename(aside)
        refused = turn()
        assert refused.status_code == 503 and "moved or deleted" in refused.text
        assert answers(server)
        aside.rename(file)
        assert turn().status_code == 200
    finally:
        assert server.stop() == 0, server.log()
    assert "sessions.db has been moved or deleted while it is in use" in server.log()
