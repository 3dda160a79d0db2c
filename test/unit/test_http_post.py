"""The client of load generators, over a socket, against replies byte by byte."""

import asyncio

import pytest

from bench.http_post import HttpFailure, ReplyChunks, post

CHUNKED = b"5;name=value\r\nhello\r\n1\r\n\r\r\n0B\r\n, \r\n0\r\n\r\nab\r\n0\r\nTrailer: x\r\n\r\n"


def answered(reply: bytes) -> tuple[int, bytes]:
    """Status and body as they are read, or HttpFailure."""

    async def run() -> tuple[int, bytes]:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"{}")
            writer.write(reply)
            writer.close()

        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            async with post(f"http://127.0.0.1:{port}", "/x", b"{}") as found:
                return found.status, await found.read()

    return asyncio.run(run())


@pytest.mark.parametrize("size", [1, 2, 3, 7, len(CHUNKED)])
def test_chunks_may_be_cut_anywhere(size: int) -> None:
    chunks = ReplyChunks()
    found = [chunks.feed(CHUNKED[at : at + size]) for at in range(0, len(CHUNKED), size)]
    assert (b"".join(found), chunks.over) == (b"hello\r, \r\n0\r\n\r\nab", True)


@pytest.mark.parametrize("size", [b"", b"-3", b"+3", b"0x3", b"1_0", b"g", b"3 4"])
def test_what_is_no_size_of_a_chunk_is_refused(size: bytes) -> None:
    with pytest.raises(HttpFailure, match="no size of a chunk"):
        ReplyChunks().feed(size + b"\r\nabc\r\n")


def test_a_reply_is_read_behind_what_comes_before_it() -> None:
    early = b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n"
    assert answered(early + b"HTTP/1.1 200 OK\r\ncontent-LENGTH: 3\r\n\r\nabcd") == (200, b"abc")
    assert answered(b"HTTP/1.0 404 Not Found\r\n\r\nnone") == (404, b"none")


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        (b"hello 200 there\r\n\r\n", "the reply begins with 'hello 200 there'"),
        (b"HTTP/1.1\r\n\r\n", "the reply begins with 'HTTP/1.1'"),
        (b"HTTP/1.1 20 OK\r\n\r\nHTTP/1.1 200 OK\r\n\r\n", "the reply begins with 'HTTP/1.1 20 OK'"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\nabc", "Content-Length is '-1'"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nabc", "1 bytes are missing"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n", "incomplete chunked read"),
        (b"HTTP/1.1 200 OK\r\nx: y", "and ends"),
    ],
)
def test_a_reply_that_is_none_fails_with_its_reason(reply: bytes, why: str) -> None:
    with pytest.raises(HttpFailure, match=why):
        answered(reply)
