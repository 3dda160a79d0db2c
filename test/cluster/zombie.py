#!/usr/bin/env python3
"""A server that is stopped while others go on with its sessions, and comes back.

    python test/cluster/zombie.py --server-python .venv/bin/python [--seconds 40] [--sessions 20]

Three servers of the bundled model behind HAProxy with one PostgreSQL, without Ray, whose packages it needs
all the same. One is stopped (SIGSTOP) in the middle of a turn of each session, and the others have a turn of
each. Then it goes on: its turns have to be refused, and each session has the turns that were answered, with
the texts of one long prompt.
"""

import argparse
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import httpx
from check import GREEDY, PATIENCE, ROOT, Load, compare, process, secret_file, until

# isort: split
import postgres_server  # `check` has said where these are
from serving import free_port

from deploy import check as tools
from deploy.cluster.haproxy import configuration
from deploy.cluster.sync_haproxy import Haproxy


@contextmanager
def by_hand(server_python: str, folder: Path) -> Iterator[tuple[str, dict[str, int]]]:
    """Three servers behind HAProxy: its address, and their process groups by their addresses."""
    programs = postgres_server.find()
    assert programs, "There is no PostgreSQL; install it."
    with ExitStack() as stack:
        database = postgres_server.PostgresServer(programs)
        stack.callback(database.close)
        groups = {}
        for number in range(3):
            address = f"127.0.0.1:{free_port()}"
            flags = f"--device cpu --threads 1 --frontends 1 --state-db {database.url}".split()
            flags += [
                "--image-store",
                str(folder / str(number)),
                "--cluster-secret-file",
                str(secret_file(folder)),
            ]
            command = [server_python, ROOT / "app.py", "--port", address.rpartition(":")[2], *flags]
            log = folder / f"server-{number}.log"
            started = process(*command, log=log, cwd=ROOT, start_new_session=True)
            groups[address] = stack.enter_context(started).pid
        port = free_port()
        user = "haproxy" if os.geteuid() == 0 else ""
        text = configuration([*groups], f"127.0.0.1:{port}", str(folder / "haproxy.sock"), user=user)
        (folder / "haproxy.cfg").write_text(text)
        haproxy = process(tools.tool("haproxy"), "-f", folder / "haproxy.cfg", log=folder / "haproxy.log")
        stack.enter_context(haproxy)
        for address in groups:
            until(partial(_is_ready, address), f"the server {address}", 300)
        until(partial(_is_ready, f"127.0.0.1:{port}"), "HAProxy")
        yield f"http://127.0.0.1:{port}", groups


@contextmanager
def standing_still(group: int) -> Iterator[None]:
    """The processes of a group. They go on whatever happens, as what is stopped does not end."""
    os.killpg(group, signal.SIGSTOP)
    try:
        yield
    finally:
        os.killpg(group, signal.SIGCONT)


def _is_ready(address: str) -> bool:
    with suppress(httpx.HTTPError):
        return httpx.get(f"http://{address}/health/ready", timeout=2).status_code == 200
    return False


def run(given: argparse.Namespace) -> str:
    """What is wrong, in a line each; none if nothing is."""
    began = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="rwkv-cluster-", dir="/tmp") as folder,
        by_hand(given.server_python, Path(folder)) as (url, groups),
    ):
        load, address = Load(url), next(iter(groups))
        sessions = [f"s{i}" for i in range(given.sessions)]

        def tell(what: str) -> None:
            print(f"{time.monotonic() - began:6.1f} s  {what}", flush=True)

        def each(number: int) -> None:
            with httpx.Client(base_url=url, timeout=PATIENCE) as client:
                for session in sessions:
                    load.turn(client, session, number)

        each(0)
        begun, ends = threading.Semaphore(0), dict[str, str]()

        def long_turn(session: str) -> None:
            body = GREEDY | {
                "session_id": session,
                "contents": ["User: Go on.\n\nAssistant:"],
                "stream": True,
            }
            body |= {"max_tokens": 1500, "stop_tokens": []}
            with (
                httpx.Client(base_url=f"http://{address}", timeout=None) as client,
                client.stream("POST", "/state/chat/completions", json=body) as reply,
            ):
                lines = reply.iter_lines()
                next(lines)
                begun.release()
                ends[session] = [line for line in lines if line][-2:][0]

        threads = [threading.Thread(target=long_turn, args=(session,)) for session in sessions]
        for thread in threads:
            thread.start()
        for _ in sessions:
            assert begun.acquire(timeout=PATIENCE), "a turn has not begun"
        stopped = time.monotonic()
        with standing_still(groups[address]):
            tell(f"{address} is stopped in the middle of {len(sessions)} turns")
            haproxy = Haproxy(Path(folder) / "haproxy.sock")
            until(lambda: haproxy.ask("show stat").count(",DOWN,"), "HAProxy's word")
            each(1)
            tell("the others have gone on with all sessions")
            time.sleep(max(0.0, stopped + given.seconds - time.monotonic()))
        tell(f"{address} goes on after {time.monotonic() - stopped:.0f} s")
        for thread in threads:
            thread.join()
        refused = sum("changed meanwhile" in end for end in ends.values())
        tell(f"{refused} of its {len(sessions)} turns are refused")
        until(lambda: _is_ready(address), "the server")
        with httpx.Client(base_url=f"http://{address}", timeout=PATIENCE) as client:
            for session in sessions:
                load.turn(client, session, 2)
        tell("it goes on with the sessions")
        lost, wrong = compare(url, load, 3)
    print(f"sessions {len(sessions)}, turns refused {refused}, lost or twice {lost}, wrong texts {wrong}")
    print(f"requests {load.requests}, of which {len(load.failed)} failed")
    bad = [
        f"{len(sessions) - refused} turns of a server that was stopped are not refused: {ends}"
        if refused != len(sessions)
        else "",
        f"{lost} turns are lost or stored twice" if lost else "",
        f"{wrong} texts are wrong" if wrong else "",
    ]
    return "\n".join(filter(None, bad))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--server-python", default=str(ROOT / ".venv/bin/python"), help="of the servers")
    parser.add_argument("--seconds", type=float, default=40.0, help="for which it is stopped")
    parser.add_argument("--sessions", type=int, default=20)
    sys.exit(run(parser.parse_args()) or 0)


if __name__ == "__main__":
    main()
