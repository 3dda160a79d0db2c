"""A small OpenAI-compatible server that sends exactly what a test gives it."""

import asyncio
import json
import re
import threading
from collections.abc import Awaitable, Callable


class FakeServer:
    """Answers POST requests through `answer(writer, body)`, and keeps their heads and bodies."""

    def __init__(self) -> None:
        self.answer: Callable[[asyncio.StreamWriter, dict], Awaitable[None]] = self.refuse
        self.bodies: list[dict] = []
        self.heads: list[str] = []
        self.running = self.most_running = 0
        self.asked = threading.Semaphore(0)  # released once a request
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server = self._call(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port = self._server.sockets[0].getsockname()[1]

    def _call(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)

    async def refuse(self, writer: asyncio.StreamWriter, body: dict) -> None:
        respond(writer, 500, b"{}")

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        if head.startswith("GET /v1/models "):
            respond(writer, 200, b'{"object": "list", "data": [{"id": "fake-model"}]}')
        else:
            self.heads.append(head)
            body = json.loads(
                await reader.readexactly(int(re.findall(r"(?i)content-length: (\d+)", head)[0]))
            )
            self.bodies.append(body)
            self.running += 1
            self.most_running = max(self.most_running, self.running)
            self.asked.release()
            await self.answer(writer, body)
            self.running -= 1
        writer.close()

    def close(self) -> None:
        self._call(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        self._server.close()  # on the loop's thread: connections that end meanwhile close it too
        tasks = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def respond(writer: asyncio.StreamWriter, status: int, body: bytes, kind: str = "application/json") -> None:
    writer.write(
        f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    )


def open_stream(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")


def event(**fields) -> str:
    return f"data: {json.dumps(fields, ensure_ascii=False)}\n\n"


def chat(text: str, index: int = 0, finish: str | None = None) -> str:
    return event(
        choices=[{"index": index, "delta": {"content": text} if text else {}, "finish_reason": finish}]
    )


def usage(prompt: int, completion: int) -> str:
    return event(
        choices=[],
        usage={"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion},
    )


async def send(writer: asyncio.StreamWriter, *texts: str) -> None:
    """Each text as one chunk."""
    for text in texts:
        data = text.encode()
        writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        await writer.drain()


async def stream(writer: asyncio.StreamWriter, *texts: str) -> None:
    """A whole event stream."""
    open_stream(writer)
    await send(writer, *texts)
    writer.write(b"0\r\n\r\n")
