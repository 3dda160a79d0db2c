"""Stored sessions over HTTP: one is begun, forked, resumed and listed. And what they take on disk."""

import asyncio
import contextlib
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec
from answer import error_text
from tqdm import tqdm
from turn_load import TurnPlan, plan_for, run_one_by_one
from wire import Exchange, ExchangeError, Target


async def ask(target: Target, path: str, body: dict) -> None:
    """Send a request and read its reply. Raises ExchangeError unless the status is 200."""
    reply = bytearray()
    message = target.message("POST", path, {"Content-Type": "application/json"}, msgspec.json.encode(body))
    exchange = Exchange(message, lambda data, _: reply.extend(data))
    await exchange.run(target)
    if exchange.status != 200:
        raise ExchangeError(f"{path}: HTTP {exchange.status}: {error_text(bytes(reply))}")


def seconds_to_fork(target: Target, source: str, names: Iterable[str], connections: int) -> float:
    """Fork the session under every name, `connections` at a time. Raises ExchangeError."""
    left = iter(tqdm(names, unit="fork", disable=None, leave=False))

    async def connection() -> None:
        for name in left:
            await ask(target, "/v1/state/fork", {"session_id": source, "new_session_id": name})

    async def work() -> None:
        await asyncio.gather(*(connection() for _ in range(connections)))

    began = time.monotonic()
    asyncio.run(work())
    return time.monotonic() - began


def begin_session(target: Target, name: str, tokens: int) -> None:
    """Store a session of about so many tokens."""
    run_one_by_one(plan_for(target, 1, 1, 1, tokens, sessions=(name,)))


def stored_bytes(database: Path | None) -> dict[str, int]:
    """Bytes of a database, its log and the images in the folder beside it; 0 for what does not exist."""
    if database is None:
        return {}
    images = database.with_name(f"{database.name}.images")
    parts = {
        "file": [database],
        "log": [database.with_name(f"{database.name}-wal")],
        "images": list(images.iterdir()) if images.is_dir() else [],
    }
    return {part: sum(map(file_size, files)) for part, files in parts.items()}


def file_size(file: Path) -> int:
    with contextlib.suppress(FileNotFoundError):  # the server may remove it meanwhile
        return file.stat().st_size
    return 0


def resumption(target: Target, ids: tuple[str, ...]) -> TurnPlan:
    """A turn of each session, one by one. Two tokens, as the last one waits for the commit."""
    return plan_for(target, 1, len(ids), 2, sessions=ids)


def seconds_to_list(target: Target, limit: int) -> float:
    """Ask for the first sessions, at most `limit`. Raises ExchangeError."""
    began = time.monotonic()
    asyncio.run(ask(target, "/state/status", {"limit": limit}))
    return time.monotonic() - began
