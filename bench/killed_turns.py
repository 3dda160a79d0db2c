"""Turns of many sessions while an engine is killed: which are lost, which fail, and how long clients wait."""

import asyncio
import os
import signal
import time
from contextlib import AsyncExitStack, suppress
from typing import NamedTuple

import httpx

TOKENS = 32  # of an answer
BEFORE, BEHIND = 3.0, 9.0  # seconds of turns before the kill, and behind it
PAGE = 200  # turns of a history that are asked for at once
PATIENCE = 60.0  # seconds for a reply
ASK = "/state/chat/completions"


class KilledTurns(NamedTuple):
    """What clients saw, and what is stored."""

    acknowledged: int
    failed: int  # errors, or connections that were lost
    lost: int  # turns that were acknowledged and are not in the history with their text
    twice: int  # that are there more than once
    gap: float  # seconds, the longest without an answer of a session, also behind its last one

    def __str__(self) -> str:
        return (
            f"{self.acknowledged} turns acknowledged, {self.failed} failed, {self.lost} lost, "
            f"{self.twice} twice; the longest time without an answer of a session was {self.gap:.2f} s"
        )


async def turns_under_kill(url: str, sessions: int, engine: int) -> KilledTurns:
    """Have as many clients take turns, each of its session, and kill -9 the process `engine` meanwhile."""
    async with AsyncExitStack() as stack:
        # A client each: one with many connections looks at all of them for each request.
        clients = [httpx.AsyncClient(base_url=url, timeout=PATIENCE, verify=False) for _ in range(sessions)]
        for client in clients:
            await stack.enter_async_context(client)
        end = time.monotonic() + BEFORE + BEHIND
        asyncio.get_running_loop().call_later(BEFORE, os.kill, engine, signal.SIGKILL)
        said = await asyncio.gather(*(_client(http, _name(n), end) for n, http in enumerate(clients)))
        stored = await asyncio.gather(*(_history(http, _name(n)) for n, http in enumerate(clients)))
    lost = twice = 0
    for (texts, _, _), turns in zip(said, stored, strict=True):
        for mark, text in texts.items():
            found = [turn["completion"] for turn in turns if mark in turn["prompt"]]
            lost += text not in found
            twice += len(found) > 1
    return KilledTurns(
        sum(len(texts) for texts, _, _ in said),
        sum(failed for _, failed, _ in said),
        lost,
        twice,
        max(gap for _, _, gap in said),
    )


def _name(number: int) -> str:
    return f"killed{number}"


async def _client(http: httpx.AsyncClient, session: str, end: float) -> tuple[dict[str, str], int, float]:
    """Texts by what marks their prompts, how many turns failed, and the longest time without an answer."""
    texts, failed, gap, number = dict[str, str](), 0, 0.0, 0
    last = time.monotonic()
    while time.monotonic() < end:
        number += 1
        mark = f"<{number}>"
        body = {
            "contents": [f"User: {mark}\n\nAssistant:"],
            "session_id": session,
            "max_tokens": TOKENS,
            "temperature": 0,
        }
        text = None
        with suppress(httpx.TransportError):
            reply = await http.post(ASK, json=body)
            choices = reply.json().get("choices") if reply.status_code == 200 else None
            text = choices[0]["message"]["content"] if choices else None
        if text is None:
            failed += 1
            continue
        texts[mark] = text
        last, gap = (now := time.monotonic()), max(gap, now - last)
    return texts, failed, max(gap, time.monotonic() - last)


async def _history(http: httpx.AsyncClient, session: str) -> list[dict[str, str]]:
    found: list[dict[str, str]] = []
    while True:
        asked = {"session_id": session, "after": len(found), "limit": PAGE}
        reply = await http.get("/v1/state/history", params=asked)
        if reply.status_code == 404:
            return found
        page = reply.raise_for_status().json()["turns"]
        found += page
        if len(page) < PAGE:
            return found
