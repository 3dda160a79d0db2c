"""Sends generated requests to every route of a server of its own; exit code 1 if one is answered wrongly.

    make fuzz ARGS="--minutes 10 --seed 1 --threads 4"

They are made from /openapi.json: valid ones and broken ones. Wrong is a status of 500 or more, a reply that
the document does not describe, or none. At the end nothing may be left running: no request is listed, every
row is free for a new text, and the log shows no fault.
"""

import argparse
import itertools
import sys
import threading
import time
from collections import Counter

import httpx
import requests
from openapi_calls import calls, operations, send
from serving import Server, until
from tqdm import tqdm

ROWS = 8
CASES = 6  # of an operation in a round
SHOWN = 20  # failures
PATIENCE = 60  # seconds for a reply
CAUGHT = (requests.RequestException, BaseExceptionGroup)


class Fuzz:
    """What several threads send, and what became of it."""

    def __init__(self, url: str, ends: float, first: int) -> None:
        """`ends`: when they stop, by time.monotonic; `first`: the first seed."""
        self._url, self._ends = url, ends
        self._operations = operations(httpx.get(f"{url}/openapi.json", timeout=PATIENCE).json())
        self._rounds = ((number, each) for number in itertools.count(first) for each in self._operations)
        self._lock = threading.Lock()
        self.statuses: Counter[int] = Counter()
        self.covered: set[str] = set()
        self.failures: list[str] = []

    def work(self, progress: tqdm) -> None:
        """Send requests until it is time, or too many have failed."""
        while time.monotonic() < self._ends and len(self.failures) < SHOWN:
            with self._lock:
                number, operation = next(self._rounds)
                sent = list(calls(operation, number, CASES))  # hypothesis is not for threads
            for case in sent:
                try:
                    status = send(case, self._url).status_code
                    with self._lock:
                        self.statuses[status] += 1
                except CAUGHT as failure:
                    self.failures.append(f"{operation.label}, seed {number}: {failure}")
                progress.update()
            self.covered.add(operation.label)


def left_behind(server: Server) -> list[str]:
    """What is wrong with the server afterwards."""
    found = []

    def running() -> list[dict]:
        return httpx.get(f"{server.url}/v1/server/status", timeout=PATIENCE).json()["active_requests"]

    try:
        until(lambda: not running())
    except AssertionError:
        found.append(f"requests still run: {running()}")
    body = {"contents": ["Hi"] * ROWS, "max_tokens": 8, "stop_tokens": []}
    reply = httpx.post(f"{server.url}/v1/batch/completions", json=body, timeout=PATIENCE)
    if reply.status_code != 200 or len(reply.json()["choices"]) != ROWS:
        found.append(f"not every row is free: {reply.text[:300]}")
    faults = [line for line in server.log().splitlines() if " ERROR " in line or "Traceback" in line]
    return found + [f"the log shows: {line}" for line in faults[:SHOWN]]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=4)
    options = parser.parse_args()
    server = Server("--device", "cpu", "--max-rows", str(ROWS), "--frontends", "1")
    try:
        fuzz = Fuzz(server.url, time.monotonic() + options.minutes * 60, options.seed)
        with tqdm(unit=" requests") as progress:
            threads = [threading.Thread(target=fuzz.work, args=(progress,)) for _ in range(options.threads)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        failures = fuzz.failures + left_behind(server)
    finally:
        code = server.stop()
    if code:
        failures.append(f"the server ended with {code}")
    print(f"{sum(fuzz.statuses.values())} replies of {len(fuzz.covered)} operations:", dict(fuzz.statuses))
    print("\n\n".join(failures) or "nothing is wrong")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
