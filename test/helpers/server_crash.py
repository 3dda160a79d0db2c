"""A server of several engines whose processes are killed and stopped at random, and what is left of turns.

Clients take turns on the same sessions all the time. Each turn has a prompt of its own, so that histories
tell which turns were stored. One that was acknowledged is there once, with the text that was sent, behind
what had been acknowledged before it was asked for; one that was refused is not there; of any other it is not
known whether it was stored, but it is there once at most.
"""

import os
import random
import re
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count

import httpx
from host_crash import Tally
from serving import Server, alive, until

SESSIONS = [f"crash{number}" for number in range(6)]
CLIENTS = 4
EVENTS = ("kill engine", "kill database", "kill front end", "stop engine")
WEIGHTS = (4, 2, 1, 3)
PAUSE = (0.3, 1.5)  # seconds between two events
THINKS = 0.03  # seconds between two turns of a client, which leave the cores to processes that start
PATIENCE = 180.0  # seconds for a reply, of an engine that may be stopped
ENDED = 90.0  # seconds that processes without a supervisor may take to end
GREEDY = {"temperature": 0, "alpha_presence": 0, "alpha_frequency": 0, "max_tokens": 3}
PAGE = 200  # turns of a history that are asked for at once


@dataclass
class AskedTurn:
    """A turn that was asked for. Times are of the monotonic clock."""

    session: str
    asked: float
    answered: float = 0.0
    status: int = 0  # 0: the connection was lost
    text: str = ""


class ServerCrashes:
    """Clients of a server, and what is done to its processes. One `run`."""

    def __init__(self, server: Server, seed: int, stop_seconds: Sequence[float], tally: Tally) -> None:
        """stop_seconds: how long an engine may be stopped."""
        self.server, self.tally, self._draw, self._stop_seconds = (
            server,
            tally,
            random.Random(seed),
            stop_seconds,
        )
        self._numbers, self._over = count(), threading.Event()
        self._turns: dict[int, AskedTurn] = {}
        self._stopped: list[tuple[float, float]] = []  # when engines were
        self._threads: list[threading.Thread] = []
        self._timers: dict[threading.Timer, int] = {}  # which continue these processes

    def run(self, events: int) -> Iterator[None]:
        """Go on for so many events, one after the other, while clients take turns."""
        for number in range(CLIENTS):
            thread = threading.Thread(target=self._client, args=(random.Random(number),), daemon=True)
            thread.start()
            self._threads.append(thread)
        for _ in range(events):
            time.sleep(self._draw.uniform(*PAUSE))
            self._event()
            yield

    def stop(self) -> None:
        """Let the last turns end. Engines that are still stopped go on at once."""
        self._over.set()
        for timer, pid in self._timers.items():
            timer.cancel()
            _signal(pid, signal.SIGCONT)
        for thread in self._threads:
            thread.join()

    def _client(self, draw: random.Random) -> None:
        while not self._over.is_set():
            with httpx.Client(timeout=PATIENCE) as http, suppress(httpx.TransportError):
                while not self._over.is_set():
                    self._turn(http, draw.choice(SESSIONS))

    def _turn(self, http: httpx.Client, session: str) -> None:
        number = next(self._numbers)
        turn = self._turns[number] = AskedTurn(session, time.monotonic())
        body = GREEDY | {"contents": [f"User: <{number}>\n\nAssistant:"], "session_id": session}
        reply = http.post(self.server.url + "/state/chat/completions", json=body)
        turn.answered, turn.status = time.monotonic(), reply.status_code
        if reply.status_code == 200 and "choices" in (said := reply.json()):
            turn.text = said["choices"][0]["message"]["content"]
        elif reply.status_code == 200:
            turn.status = 500  # the reply had begun
        self._over.wait(THINKS)

    def _event(self) -> None:
        kind = self._draw.choices(EVENTS, WEIGHTS)[0]
        if kind.endswith("engine"):  # so that one is left
            until(lambda: len(self._ready()) > 1, PATIENCE)
        found, ready = self.server.children(), self._ready()
        engines = [name for name in found if name in ready]
        self.tally.events[kind] += 1
        names = {
            "kill database": [name for name in found if name.endswith(".db")],
            "kill front end": [name for name in found if name.startswith("frontend")],
        }.get(kind, engines)
        if not names:
            return
        pid = found[self._draw.choice(names)]
        if kind != "stop engine":
            _signal(pid, signal.SIGKILL)
            return
        seconds = self._draw.choice(self._stop_seconds)
        self._stopped.append((time.monotonic(), time.monotonic() + seconds))
        _signal(pid, signal.SIGSTOP)
        timer = threading.Timer(seconds, _signal, (pid, signal.SIGCONT))
        timer.daemon = True
        timer.start()
        self._timers[timer] = pid

    def _ready(self) -> set[str]:
        with suppress(httpx.TransportError):
            text = httpx.get(self.server.url + "/metrics", timeout=PATIENCE).text
            return set(re.findall(r'rwkv:engine_up\{engine="(engine-\d+)"\} 1\.0', text))
        return set()

    def check(self, server: Server) -> None:
        """The histories, as this server tells them, against what clients were told."""
        places: dict[int, list[tuple[str, int, str]]] = {}
        for session in SESSIONS:
            for place, turn in enumerate(_history(server, session)):
                (number,) = re.findall(r"<(\d+)>", turn["prompt"]) or ["-1"]
                places.setdefault(int(number), []).append((session, place, turn["completion"]))
        fail = self.tally.failures.append
        for number in places.keys() - self._turns.keys():
            fail(f"turn {number} was not asked for")
        newest: dict[str, list[tuple[float, int, int]]] = {session: [] for session in SESSIONS}
        for number, turn in self._turns.items():
            found = places.get(number, [])
            outcome = {200: "stored", 409: "refused"}.get(turn.status, "unknown")
            self.tally.turns[outcome] += 1
            if len(found) > 1:
                fail(f"turn {number} is there {len(found)} times")
            elif found and found[0][0] != turn.session:
                fail(f"turn {number} of {turn.session} is one of {found[0][0]}")
            elif outcome == "stored" and (not found or found[0][2] != turn.text):
                fail(f"turn {number} was acknowledged with {turn.text!r} and is {found}")
            elif outcome == "refused" and found:
                fail(f"turn {number} was refused and is stored")
            elif outcome == "stored":
                newest[turn.session].append((turn.answered, found[0][1], number))
                if not any(start < turn.answered and turn.asked < end for start, end in self._stopped):
                    self.tally.longest = max(self.tally.longest, turn.answered - turn.asked)
        for acknowledged in newest.values():
            for answered, place, number in acknowledged:
                for _, later, other in acknowledged:
                    if self._turns[other].asked > answered and later < place:
                        fail(f"turn {other} was asked for behind turn {number} and stands in front of it")


def kill_supervisor(server: Server) -> list[int]:
    """The processes that are left, which store and end by themselves."""
    left = [*server.children().values()]
    server.process.kill()
    server.process.wait()
    return left


def until_ended(pids: Sequence[int]) -> None:
    until(lambda: not any(map(alive, pids)), ENDED)


def _history(server: Server, session: str) -> list[dict]:
    found: list[dict] = []
    while True:
        asked = {"session_id": session, "after": len(found), "limit": PAGE}
        reply = httpx.get(server.url + "/v1/state/history", params=asked, timeout=PATIENCE)
        if reply.status_code == 404:
            return found
        assert reply.status_code == 200, reply.text
        turns = reply.json()["turns"]
        found += turns
        if len(turns) < PAGE:
            return found


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
