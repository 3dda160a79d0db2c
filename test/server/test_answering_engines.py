"""Front ends and supervisor over engines without a model: many requests of all kinds, each checked."""

import asyncio
import subprocess
import sys

import pytest
from serving import ROOT

from bench.soak import SoakConnection

pytestmark = pytest.mark.thorough


def test_each_of_many_requests_has_its_answer_while_engines_are_killed() -> None:
    command = [sys.executable, "-m", "bench.soak", "--requests", "1500", "--kill-every", "0.7"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1,500 requests" in done.stdout and " 0 engines killed" not in done.stdout


@pytest.mark.parametrize("reply", [b"no HTTP\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\nno size\r\n", b""])
def test_a_client_closes_a_connection_whose_reply_is_none(reply: bytes) -> None:
    """Else what is still open at the end would be taken for the server's."""

    async def ask() -> None:
        ended = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(reply)
            if not reply:
                writer.write_eof()
            await reader.read()
            writer.close()
            ended.set()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            connection = SoakConnection(server.sockets[0].getsockname()[1])
            with pytest.raises((EOFError, ValueError, IndexError)) as kept:
                await connection.post("/", {})
            async with asyncio.timeout(60):
                await ended.wait()
            assert kept.value.__traceback__  # which would keep it open

    asyncio.run(ask())
