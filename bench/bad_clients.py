#!/usr/bin/env python3
"""What slow and bad clients cost: the tokens a second of good streams beside them, and memory.

The real front ends serve an engine that only answers (bench/frontends.py), a token a step to each row. Good
streams run all the time. In turns the bad clients come, stay for a measurement, and go. The table has what
the good streams got, what a new client waited for a short answer, and the memory of each process. Linux only:
it reads /proc. Each bad client is a file of its process, and of a front end: `ulimit -Hn` must be above what
a process has of them.

    python -m bench.bad_clients                       (12,000 bad clients; wants 16 cores; some 60 s)
    python -m bench.bad_clients --share 0.1           (a tenth of them)
    python -m bench.bad_clients --apart --clients 200 (each kind by itself: bytes of memory for each client)
"""

import argparse
import asyncio
import contextlib
import errno
import json
import multiprocessing
import os
import platform
import select
import socket
import statistics
import struct
import sys
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from bench.frontends import PATH, Host, word_of
from bench.startup import own_and_servers
from rwkv_batch.processes.limits import allow_open_files

PROMPT = "Hi"
WORD = word_of(PROMPT).encode()  # each token of every answer
ENDLESS, UNREAD = 1_000_000, 5_000  # tokens of a good stream, and of one that is not read
OPENING = 64  # connections that a process of bad clients has on their way at once
TICK = 1.0  # seconds, after which drips and slow reads come
SETTLE = 1.0  # seconds after bad clients have come or gone
PATIENCE = 60.0  # seconds until all of them have
LOST = 0.05  # of the good streams' tokens, at most
LINGER = struct.pack("ii", 1, 0)  # ends a connection by a reset, which leaves no port behind


class Kind(NamedTuple):
    """A way to be bad."""

    opening: bytes  # what it sends first
    reads: int | None = None  # bytes a second; None: all that comes
    drips: bytes = b""  # what it sends every second
    ends: bool = False  # it sends no more, and may still read
    resets: bool = False  # it ends its connection every second, and begins another one


def post(body: dict[str, object], *, length: int | None = None) -> bytes:
    """A request, whose body may be declared longer than it is."""
    data = json.dumps(body).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {length or len(data)}\r\n\r\n".encode() + data


def completion(tokens: int, stream: bool) -> dict[str, object]:
    return {"model": "fake", "prompt": PROMPT, "max_tokens": tokens, "stream": stream}


HALF = f"POST {PATH} HTTP/1.1\r\nHost: bench\r\nX-Much: ".encode()
STREAM = post(completion(UNREAD, True))
BODY = completion(4, False) | {"user": "x" * 10_000}
KINDS = {
    "silent": Kind(b""),
    "idle": Kind(b"GET /health HTTP/1.1\r\nHost: bench\r\n\r\n"),
    "half head": Kind(HALF),
    "endless head": Kind(HALF, drips=b"x" * 16384),
    "stalled body": Kind(post(BODY, length=1_000_000)),
    "body of 1 byte/s": Kind(post(BODY, length=1_000_000), drips=b"x"),
    "reader of 64 bytes/s": Kind(STREAM, reads=64),
    "reads nothing": Kind(STREAM, reads=0),
    "half-closed": Kind(post(completion(4, False)), ends=True),
    "resets": Kind(STREAM, resets=True),
}
WHOLE = {  # how many of a kind come at once
    "silent": 5000,
    "idle": 5000,
    "reader of 64 bytes/s": 900,
    "reads nothing": 100,
    "stalled body": 500,
    "body of 1 byte/s": 500,
}


# The bad clients


@dataclass
class BadClient:
    name: str
    kind: Kind
    socket: socket.socket
    connected: bool = False


@dataclass
class Came:
    """What has become of the bad clients of a process."""

    open: Counter[str] = field(default_factory=Counter)
    closed: Counter[str] = field(default_factory=Counter)  # by the server
    answers: Counter[str] = field(default_factory=Counter)  # kind and status

    def add(self, other: "Came") -> None:
        for name in ("open", "closed", "answers"):
            getattr(self, name).update(getattr(other, name))


class BadClients:
    """Those of one process, which is a loop over their sockets."""

    def __init__(self, port: int, address: str) -> None:
        """address: where they come from; each has ports of its own."""
        self._port, self._address = port, address
        self._poll = select.epoll()
        self._clients: dict[int, BadClient] = {}
        self._waiting: list[str] = []  # kinds of those that are to connect
        self._opening = 0
        self._next_tick = 0.0
        self.came = Came()

    def run(self, control: Connection) -> None:
        """Do what comes by the pipe: counts of kinds to open, "count" or "close", until None."""
        self._poll.register(control.fileno(), select.EPOLLIN)
        wanted = 0
        while True:
            for number, events in self._poll.poll(0.05):
                if number == control.fileno():
                    message = control.recv()
                    if message is None:
                        return
                    if message == "close":
                        self._close_all()
                        control.send(self.came)
                        self.came = Came()
                    elif message == "count":
                        control.send(self.came)
                    else:
                        self._waiting = [name for name, count in message.items() for _ in range(count)]
                        wanted = len(self._waiting)
                elif client := self._clients.get(number):
                    self._look(client, events)
            while self._waiting and self._opening < OPENING:
                self._connect(self._waiting.pop())
            if wanted and not self._waiting and not self._opening:
                wanted = 0
                control.send("opened")
            if time.monotonic() >= self._next_tick:
                self._next_tick = time.monotonic() + TICK
                self._tick()

    def _connect(self, name: str) -> None:
        kind = KINDS[name]
        made = socket.socket()
        made.setblocking(False)
        if kind.reads is not None:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        made.bind((self._address, 0))
        made.connect_ex(("127.0.0.1", self._port))
        client = BadClient(name, kind, made)
        self._clients[made.fileno()] = client
        self._poll.register(made.fileno(), select.EPOLLOUT | select.EPOLLRDHUP)
        self._opening += 1

    def _look(self, client: BadClient, events: int) -> None:
        if not client.connected:
            if problem := client.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                return self._gone(client, f"no connection ({errno.errorcode[problem]})")
            client.connected = True
            self._opening -= 1
            self.came.open[client.name] += 1
            with contextlib.suppress(OSError):
                client.socket.send(client.kind.opening)
                if client.kind.ends:
                    client.socket.shutdown(socket.SHUT_WR)
            reads = select.EPOLLIN if client.kind.reads is None else 0
            self._poll.modify(client.socket, reads | select.EPOLLRDHUP)
            return None
        if events & select.EPOLLIN and client.kind.reads is None:
            return self._read(client, 65536)
        if events & (select.EPOLLHUP | select.EPOLLERR | select.EPOLLRDHUP):
            return self._gone(client)
        return None

    def _read(self, client: BadClient, most: int) -> None:
        try:
            data = client.socket.recv(most)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data.startswith(b"HTTP/1.1 "):
            self.came.answers[f"{client.name}: {data[9:12].decode()}"] += 1
        if not data:
            self._gone(client)

    def _gone(self, client: BadClient, why: str = "") -> None:
        """The server has closed it."""
        if not client.connected:
            self._opening -= 1
        else:
            self.came.open[client.name] -= 1
        self.came.closed[f"{client.name} {why}".strip()] += 1
        self._end(client)

    def _end(self, client: BadClient) -> None:
        del self._clients[client.socket.fileno()]
        with contextlib.suppress(OSError):
            client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER)
        client.socket.close()

    def _tick(self) -> None:
        for client in list(self._clients.values()):
            if not client.connected:
                continue
            if client.kind.drips:
                with contextlib.suppress(OSError):
                    client.socket.send(client.kind.drips)
            if client.kind.reads:
                self._read(client, client.kind.reads)
            elif client.kind.resets:
                self.came.open[client.name] -= 1
                self._end(client)
                self._waiting.append(client.name)

    def _close_all(self) -> None:
        self._waiting = []
        for client in list(self._clients.values()):
            self._end(client)
        self._opening = 0


def be_bad(port: int, address: str, control: Connection) -> None:
    """One process of bad clients."""
    allow_open_files()
    BadClients(port, address).run(control)


class BadProcesses:
    """All bad clients, in a few processes."""

    def __init__(self, port: int, count: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        for number in range(count):
            ours, theirs = spawn.Pipe()
            arguments = (port, f"127.0.0.{number + 2}", theirs)
            spawn.Process(target=be_bad, args=arguments, daemon=True).start()
            self._pipes.append(ours)

    async def come(self, kinds: dict[str, int]) -> None:
        """Returns when all have connected."""
        shares = len(self._pipes)
        for number, pipe in enumerate(self._pipes):
            pipe.send({name: (count + number) // shares for name, count in kinds.items()})
        await self._each("opened")

    async def ask(self, what: str) -> Came:
        """Of "count" and "close": what has become of them."""
        for pipe in self._pipes:
            pipe.send(what)
        together = Came()
        for came in await self._each(what):
            assert isinstance(came, Came)
            together.add(came)
        return together

    def stop(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)

    async def _each(self, what: str) -> list[object]:
        """A message of each process. They are awaited one after the other, in a thread."""
        try:
            async with asyncio.timeout(PATIENCE):
                return [await asyncio.to_thread(pipe.recv) for pipe in self._pipes]
        except TimeoutError:
            sys.exit(f"bad clients did not answer ({what}) within {PATIENCE:g} s")


# The good ones


class Good:
    """The good streams, and one client that asks for short answers on new connections."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.tokens = 0
        self.ended = 0  # streams that should not have
        self.gaps: list[float] = []  # seconds between reads of a stream
        self.waits: list[float] = []  # seconds for a short answer
        self.refused = 0

    async def stream(self) -> None:
        """Read one for ever."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        writer.write(post(completion(ENDLESS, True)))
        rest, before = b"", time.monotonic()
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                now = time.monotonic()
                self.gaps.append(now - before)
                before = now
                rest += data
                self.tokens += rest.count(WORD)
                rest = rest[max(rest.rfind(WORD) + len(WORD), len(rest) - len(WORD) + 1) :]
        self.ended += 1

    async def ask(self) -> None:
        """Ask one question after the other."""
        request = post(completion(4, False)).replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1)
        while True:
            began = time.monotonic()
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
                writer.write(request)
                whole = await asyncio.wait_for(reader.read(), 30)
                writer.close()
                good = whole.startswith(b"HTTP/1.1 200") and whole.count(WORD) == 4
            except (OSError, TimeoutError):
                good = False
            self.refused += not good
            self.waits.append(time.monotonic() - began)
            await asyncio.sleep(0.05)


class BesideBad(NamedTuple):
    """What a measurement has seen."""

    rate: float  # tokens a second of all good streams
    gap: float  # seconds between reads of a stream, P99
    wait: float  # seconds for a short answer, median
    worst: float  # and the longest
    refused: int

    def line(self, name: str) -> str:
        wait, worst = f"{self.wait * 1000:.0f}", f"{self.worst * 1000:.0f}"
        return f"| {name} | {self.rate:,.0f} | {self.gap * 1000:.0f} | {wait} | {worst} | {self.refused} |"


async def measure(good: Good, seconds: float) -> BesideBad:
    good.gaps, good.waits, good.refused = [], [], 0
    tokens, began = good.tokens, time.monotonic()
    await asyncio.sleep(seconds)
    taken = time.monotonic() - began
    gaps = sorted(good.gaps) or [seconds]
    waits = sorted(good.waits) or [seconds]
    p99 = gaps[int(0.99 * (len(gaps) - 1))]
    return BesideBad((good.tokens - tokens) / taken, p99, statistics.median(waits), waits[-1], good.refused)


# Memory


class Memory:
    """What the processes of the server have had resident, in MB, and the kernel for sockets."""

    def __init__(self, host: Host) -> None:
        self._pids = {"supervisor": host.supervisor} | host.processes()
        self.before = self.read()
        self.peak = dict(self.before)

    def read(self) -> dict[str, float]:
        found = {name: _resident(pid) for name, pid in self._pids.items()}
        pages = _socket_pages()
        return found | {"sockets (kernel)": pages * os.sysconf("SC_PAGE_SIZE") / 1e6}

    async def watch(self) -> None:
        while True:
            for name, now in self.read().items():
                self.peak[name] = max(self.peak[name], now)
            await asyncio.sleep(0.25)


def _resident(pid: int) -> float:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmRSS"):
                return int(line.split()[1]) * 1024 / 1e6
    return 0.0


def _socket_pages() -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/net/sockstat").read_text(encoding="utf-8").splitlines():
            if line.startswith("TCP:"):
                return int(line.split()[line.split().index("mem") + 1])
    return 0


def listeners(port: int) -> int:
    """How many sockets listen at a port."""
    lines = Path("/proc/net/tcp").read_text(encoding="utf-8").splitlines()[1:]
    return sum(f[1].endswith(f":{port:04X}") and f[3] == "0A" for f in map(str.split, lines))


# The run


async def in_turns(host: Host, bad: BadProcesses, options: argparse.Namespace) -> int:
    """The good streams without and with the bad clients."""
    good = Good(host.port)
    tasks = [asyncio.ensure_future(good.stream()) for _ in range(options.good)]
    tasks.append(asyncio.ensure_future(good.ask()))
    await asyncio.sleep(SETTLE)
    memory = Memory(host)
    tasks.append(asyncio.ensure_future(memory.watch()))
    kinds = {name: round(count * options.share) for name, count in WHOLE.items()}
    without, beside, came = list[BesideBad](), list[BesideBad](), Came()
    print(f"\n{options.good} good streams beside {sum(kinds.values()):,} bad clients\n")
    print("| turn | tokens/s | gap, P99 ms | short answer, ms | longest, ms | refused |")
    print("|---|---:|---:|---:|---:|---:|")
    for number in range(options.rounds):
        without.append(await measure(good, options.seconds))
        print(without[-1].line(f"{number + 1}, without"), flush=True)
        began = time.monotonic()
        await bad.come(kinds)
        opened = time.monotonic() - began
        await asyncio.sleep(SETTLE)
        beside.append(await measure(good, options.seconds))
        print(beside[-1].line(f"{number + 1}, beside ({opened:.1f} s to connect)"), flush=True)
        came = await bad.ask("count")
        await bad.ask("close")
        await asyncio.sleep(SETTLE)
    lost = 1 - statistics.median(t.rate for t in beside) / statistics.median(t.rate for t in without)
    print(f"\nThe good streams lose {lost:.1%} (medians); {good.ended} of them ended.\n")
    print("| bad clients | open after the last turn | closed by the server | answers |")
    print("|---|---:|---:|---|")
    for name in kinds:
        closed = sum(count for kind, count in came.closed.items() if kind.startswith(name))
        answers = ", ".join(f"{n} of {k[-3:]}" for k, n in came.answers.items() if k.startswith(name + ":"))
        print(f"| {name} | {came.open[name]:,} | {closed:,} | {answers} |")
    after = memory.read()
    print("\n| resident, MB | before | peak | after |")
    print("|---|---:|---:|---:|")
    for name, before in memory.before.items():
        print(f"| {name} | {before:,.1f} | {memory.peak[name]:,.1f} | {after[name]:,.1f} |")
    grown = sum(memory.peak[n] - b for n, b in memory.before.items() if n.startswith("frontend"))
    print(f"\nAll front ends together grow by {grown:,.0f} MB.")
    for task in tasks:
        task.cancel()
    return int(lost >= LOST or good.ended > 0)


async def apart(options: argparse.Namespace) -> int:
    """Each kind by itself, at a server that has just been started."""
    print("\n| kind | front ends, kB each | kernel, kB each | engine, kB each | open | closed | answers |")
    print("|---|---:|---:|---:|---:|---:|---|")
    for name in KINDS:
        with Host(options.frontends, 1, *options.flags, step_ms=options.step_ms) as host:
            await listening(host, options.frontends)
            bad, memory = BadProcesses(host.port, options.processes), Memory(host)
            watching = asyncio.ensure_future(memory.watch())
            await bad.come({name: options.clients})
            await asyncio.sleep(options.seconds)
            came = await bad.ask("close")
            watching.cancel()
            bad.stop()
        grown: defaultdict[str, float] = defaultdict(float)
        for process, before in memory.before.items():
            grown[process.partition("-")[0]] += (memory.peak[process] - before) * 1000 / options.clients
        closed, answers = sum(came.closed.values()), ", ".join(f"{n}x {k}" for k, n in came.answers.items())
        cells = " | ".join(f"{grown[kind]:.1f}" for kind in ("frontend", "sockets (kernel)", "engine"))
        print(f"| {name} | {cells} | {came.open[name]} | {closed} | {answers} |", flush=True)
    return 0


async def listening(host: Host, frontends: int) -> None:
    """Returns when all front ends do, and one has been asked for something."""
    while listeners(host.port) < frontends:
        await asyncio.sleep(0.05)
    good = Good(host.port)
    asking = asyncio.ensure_future(good.ask())
    while len(good.waits) < 10:
        await asyncio.sleep(0.05)
    asking.cancel()


async def run(options: argparse.Namespace) -> int:
    if options.apart:
        return await apart(options)
    with Host(options.frontends, 1, *options.flags, step_ms=options.step_ms) as host:
        await listening(host, options.frontends)
        bad = BadProcesses(host.port, options.processes)
        try:
            return await in_turns(host, bad, options)
        finally:
            bad.stop()


def main(arguments: list[str]) -> int:
    own, flags = own_and_servers(arguments)
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], epilog="What follows -- are flags of app.py."
    )
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--good", type=int, default=64, help="streams that are read as they come")
    parser.add_argument("--share", type=float, default=1.0, help="of the 12,000 bad clients")
    parser.add_argument("--rounds", type=int, default=3, help="of a turn without and one beside them")
    parser.add_argument("--seconds", type=float, default=4.0, help="of a turn")
    parser.add_argument("--step-ms", type=float, default=10.0, help="of the engine; 0: as fast as it can")
    parser.add_argument("--frontends", type=int, default=max(2, min(8, cores // 4)))
    parser.add_argument("--processes", type=int, default=max(1, min(4, cores // 4)), help="of bad clients")
    parser.add_argument("--apart", action="store_true", help="measure each kind by itself")
    parser.add_argument("--clients", type=int, default=200, help="of a kind, with --apart")
    options = parser.parse_args(own)
    options.flags = flags
    allow_open_files()
    system = f"Python {platform.python_version()}, Linux {platform.release()}"
    print(f"{cores} cores, {options.frontends} front ends, a step of {options.step_ms:g} ms, {system}")
    return asyncio.run(run(options))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
