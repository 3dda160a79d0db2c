#!/usr/bin/env python3
"""Whether the usage of keys is what clients and the server's records say, over many requests of all kinds.

Starts a server with four front ends and two keys with limits, one of so many rows at once and one of so many
requests a minute, and sends requests with both by many clients at once. A client that gets 429 waits as
Retry-After says. A tenth is cancelled: a third of these by /v1/server/stop, after which the client reads its
stream to the end; the others by closing the connection, in a stream, in a turn of a session, or before a
whole reply has come. What must hold then:

- The audit log has one line for each request, with the tokens that its client has counted.
- A client that has closed the connection cannot know what was under way to it. Its line has no fewer tokens
  than it has received; without a line it has received nothing.
- /v1/usage has for each key, model and day the sum of these lines, to the token.
- The token log has for each turn that is stored the tokens of its line; that of a client which stayed is.
- No key had more requests than its limit allows, and rows of batches count as requests of their key.

    python bench/key_usage.py --requests 10000 -- --device cpu
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.serve_all import Server  # noqa: E402
from bench.startup import own_and_servers  # noqa: E402
from rwkv_batch.keys import records  # noqa: E402
from rwkv_batch.keys.records import Key  # noqa: E402

MINUTELY, AT_ONCE, OPERATOR = "minutely", "at-once", "operator"  # names of keys
MINUTE_SHARE = 5  # a fifth of the requests is of the key with a limit a minute
ROWS = 8  # at once, of the other key
EVERY, BATCH = 200, 5  # one request in so many is a batch, of so many rows
PROMPTS = ("What is {} + 3?", "What is the capital of France? ({})", "Say {} in French.")
ENDLESS = {"stop_tokens": [], "ignore_eos": True}  # the text does not end by itself
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TALLIED = ("requests", "prompt_tokens", "completion_tokens")
Tally = dict[tuple[str, ...], list[int]]  # these, by key, model and day
Line = dict[str, Any]  # of the audit log


class ClientCount(NamedTuple):
    """What a client knows of one request."""

    id: str
    kind: str
    prompt: int  # tokens; 0: it does not know
    completion: int  # tokens that it has received
    left: bool = False  # it has closed the connection
    session: str = ""  # in which it is a turn, the first one


class UsageDriver:
    """Sends requests with a key. Methods are for any number of threads. refused: answers 429 so far."""

    def __init__(self, url: str, secret: str) -> None:
        self._url, self._headers = url, {"authorization": f"Bearer {secret}"}
        self.refused = 0

    def send(self, number: int, batches: bool = False) -> list[ClientCount]:
        """The request of this number, always the same; of a batch each row. batches: whether some are."""
        dice = random.Random(number)
        kinds: list[Callable[[httpx.Client, str, str, random.Random], ClientCount]]
        kinds = [self._stopped, self._left_stream, self._left_turn, self._left_whole]
        weights = [2, 2, 1, 1]
        if dice.random() < 0.9:
            kinds = [self._chat, self._streamed, self._rows, self._turn, self._message, self._response]
            weights = [1] * 6
        prompt, kind = dice.choice(PROMPTS).format(number), dice.choices(kinds, weights)[0]
        with self._client() as http:
            if batches and number % EVERY == 0:
                return self._batch(http, number)
            return [kind(http, prompt, f"{kind.__name__[1:]}-{number}", dice)]

    def entries(self) -> list[dict[str, Any]]:
        """What the server has counted, by key, model and day."""
        with self._client() as http:
            data: list[dict[str, Any]] = http.get("/v1/usage").raise_for_status().json()["data"]
        return data

    def stored(self, sessions: Iterable[str]) -> dict[str, tuple[int, int]]:
        """Tokens of prompt and completion of the first turn of each of these, those that are stored."""
        found = {}
        with self._client() as http:
            for session in sessions:
                reply = http.get("/v1/state/history", params={"session_id": session})
                if reply.status_code != 404:
                    turn = reply.raise_for_status().json()["turns"][0]
                    found[session] = len(turn["prompt_tokens"]), len(turn["completion_tokens"])
        return found

    def _client(self) -> httpx.Client:
        """Each with a connection of its own, so that requests spread over the front ends."""
        return httpx.Client(
            base_url=self._url, headers=self._headers, timeout=600, trust_env=False, verify=False
        )

    def _chat(self, http: httpx.Client, prompt: str, id_: str, dice: random.Random) -> ClientCount:
        return _counted("chat", id_, self._post(http, CHAT, id_, _chat(prompt, 8)))

    def _rows(self, http: httpx.Client, prompt: str, id_: str, dice: random.Random) -> ClientCount:
        body = {"prompt": prompt, "max_tokens": 5, "n": 3}
        return _counted("rows", id_, self._post(http, TEXT, id_, body))

    def _turn(self, http: httpx.Client, prompt: str, id_: str, dice: random.Random) -> ClientCount:
        body = _chat(prompt, 5) | {"session_id": id_} | ENDLESS
        return _counted("turn", id_, self._post(http, CHAT, id_, body), id_)

    def _message(self, http: httpx.Client, prompt: str, id_: str, dice: random.Random) -> ClientCount:
        used = self._post(http, "/v1/messages", id_, _chat(prompt, 5))["usage"]
        prompt_tokens = used["input_tokens"] + (used.get("cache_read_input_tokens") or 0)
        return ClientCount(id_, "message", prompt_tokens, used["output_tokens"])

    def _response(self, http: httpx.Client, prompt: str, id_: str, dice: random.Random) -> ClientCount:
        used = self._post(http, "/v1/responses", id_, {"input": prompt, "max_output_tokens": 16})["usage"]
        return ClientCount(id_, "response", used["input_tokens"], used["output_tokens"])

    def _streamed(self, http: httpx.Client, prompt: str, id_: str, dice: random.Random) -> ClientCount:
        if dice.random() < 0.5:
            return self._read("streamed chat", http, id_, _chat(prompt, 12), lambda: False)
        return self._read("streamed", http, id_, {"prompt": prompt, "max_tokens": 12}, lambda: False)

    def _stopped(self, http: httpx.Client, prompt: str, id_: str, dice: random.Random) -> ClientCount:
        def stop() -> bool:
            with self._client() as another:
                another.post("/v1/server/stop", json={"request_id": id_}).raise_for_status()
            return False

        return self._read("stopped", http, id_, {"prompt": prompt, "max_tokens": 400}, stop)

    def _left_stream(self, http: httpx.Client, prompt: str, id_: str, dice: random.Random) -> ClientCount:
        return self._read("left stream", http, id_, {"prompt": prompt, "max_tokens": 400}, lambda: True)

    def _left_turn(self, http: httpx.Client, prompt: str, id_: str, dice: random.Random) -> ClientCount:
        """Some of these turns have ended and are stored by the time that it is seen."""
        body = _chat(prompt, dice.choice([2, 4, 40])) | {"session_id": id_}
        return self._read("left turn", http, id_, body, lambda: True)._replace(session=id_)

    def _left_whole(self, http: httpx.Client, prompt: str, id_: str, dice: random.Random) -> ClientCount:
        """It waits for a reply for so long, and goes unless that has come."""
        body = {"prompt": prompt, "max_tokens": 100} | ENDLESS
        patience = httpx.Timeout(60, read=dice.uniform(0.02, 0.5))
        with suppress(httpx.ReadTimeout):
            return _counted("whole", id_, self._post(http, TEXT, id_, body, patience))
        return ClientCount(id_, "left whole", 0, 0, left=True)

    def _batch(self, http: httpx.Client, number: int) -> list[ClientCount]:
        body = {"prompt": f"Count from {number}:", "max_tokens": 6}
        rows = [{"custom_id": str(row), "url": TEXT, "method": "POST", "body": body} for row in range(BATCH)]
        file = {"file": ("rows.jsonl", "\n".join(map(json.dumps, rows)).encode())}
        sent = http.post("/v1/files", files=file, data={"purpose": "batch"}).raise_for_status().json()
        made = {"input_file_id": sent["id"], "endpoint": TEXT}
        batch = http.post("/v1/batches", json=made).raise_for_status().json()
        while batch["status"] in ("validating", "in_progress", "finalizing"):
            time.sleep(0.5)
            batch = http.get(f"/v1/batches/{batch['id']}").raise_for_status().json()
        assert batch["status"] == "completed" and not batch["error_file_id"], batch
        text = http.get(f"/v1/files/{batch['output_file_id']}/content").raise_for_status().text
        answers = [json.loads(line)["response"] for line in text.splitlines()]
        return [_counted("row of a batch", each["request_id"], each["body"]) for each in answers]

    def _post(
        self,
        http: httpx.Client,
        path: str,
        id_: str,
        body: dict[str, Any],
        timeout: httpx.Timeout | None = None,
    ) -> dict[str, Any]:
        while True:
            named = {"x-request-id": id_}
            reply = http.post(path, json=body, headers=named, timeout=timeout or http.timeout)
            if self._may(reply):
                found: dict[str, Any] = reply.json()
                assert reply.status_code == 200 and not found.get("error"), reply.text  # it may come late
                return found

    def _may(self, reply: httpx.Response) -> bool:
        """Whether the request was within the limits of its key; else it has waited to send it again."""
        if reply.status_code != 429:
            return True
        self.refused += 1
        time.sleep(float(reply.headers["retry-after"]))
        return False

    def _read(
        self, kind: str, http: httpx.Client, id_: str, fields: dict[str, Any], begun: Callable[[], bool]
    ) -> ClientCount:
        """Read a stream. begun: is called at its first text; whether the client leaves then."""
        body = fields | ENDLESS | {"stream": True, "return_token_ids": True}
        body |= {"stream_options": {"include_usage": True}}
        while True:
            path = CHAT if "messages" in body else TEXT
            with http.stream("POST", path, json=body, headers={"x-request-id": id_}) as reply:
                if self._may(reply):
                    assert reply.status_code == 200, reply.read()
                    return _read_events(kind, id_, reply, begun)


def _read_events(kind: str, id_: str, reply: httpx.Response, begun: Callable[[], bool]) -> ClientCount:
    tokens = fed = 0
    for line in reply.iter_lines():
        if not line.startswith("data: {"):
            continue
        event = json.loads(line[6:])
        if usage := event.get("usage"):
            return ClientCount(id_, kind, usage["prompt_tokens"], usage["completion_tokens"])
        fed = fed or len(event.get("prompt_token_ids") or ())
        for choice in event["choices"]:
            fed = fed or len(choice.get("prompt_token_ids") or ())
            before, tokens = tokens, tokens + len(choice.get("token_ids") or ())
            if tokens and not before and begun():
                return ClientCount(id_, kind, fed, tokens, left=True)
    raise AssertionError(f"{id_} has ended without its usage")


def _chat(prompt: str, most: int) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt}], "max_tokens": most}


def _counted(kind: str, id_: str, reply: dict[str, Any], session: str = "") -> ClientCount:
    used = reply["usage"]
    return ClientCount(id_, kind, used["prompt_tokens"], used["completion_tokens"], session=session)


class SentShare(NamedTuple):
    """What one process has sent."""

    counts: list[ClientCount]
    refused: int  # answers 429


def send_all(url: str, secret: str, numbers: range, clients: int) -> SentShare:
    """These requests, so many at a time."""
    driver = UsageDriver(url, secret)
    with ThreadPoolExecutor(clients) as pool:
        sent = list(pool.map(lambda number: driver.send(number, batches=True), numbers))
    return SentShare([count for counts in sent for count in counts], driver.refused)


def audited(path: Path, names: Iterable[str]) -> list[Line]:
    """Lines of the audit log that are of these keys."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    return [line for line in found if line["key"] in names]


def compare(
    counts: list[ClientCount],
    lines: list[Line],
    entries: list[dict[str, Any]],
    stored: dict[str, tuple[int, int]],
) -> list[str]:
    """What does not hold, a sentence each. entries: of /v1/usage; stored: see UsageDriver.stored."""
    by_id = {line["id"]: line for line in lines}
    wrong = [] if len(by_id) == len(lines) else ["the audit log has two lines of one request"]
    known = {count.id for count in counts}
    wrong += [f"{id_} is in the audit log, and nobody has sent it" for id_ in by_id.keys() - known]
    for count in counts:
        line = by_id.get(count.id)
        used = (line["prompt_tokens"], line["completion_tokens"]) if line else (0, 0)
        received = count.prompt, count.completion
        exact = used == received
        if not (exact or (count.left and used[0] >= received[0] and used[1] >= received[1])):
            wrong.append(f"{count.id}: the client has counted {received}, and the audit log {used}")
        turn = stored.get(count.session)
        if turn is None and count.session and not count.left:
            wrong.append(f"{count.id} is not in the token log")
        if turn is not None and turn != used:
            wrong.append(f"{count.id}: the token log has {turn}, and the audit log {used}")
    tallies = tallied_lines(lines), tallied_entries(entries)
    if len({place[2] for tally in tallies for place in tally}) > 1:  # midnight has passed meanwhile
        tallies = tuple(without_days(tally) for tally in tallies)
    for place in tallies[0].keys() | tallies[1].keys():
        summed, used_of = (tally.get(place, [0, 0, 0]) for tally in tallies)
        if summed != used_of:
            wrong.append(f"{place}: the audit log has {summed}, and /v1/usage {used_of}")
    return wrong


def tallied_lines(lines: list[Line]) -> Tally:
    tally: Tally = defaultdict(lambda: [0, 0, 0])
    for line in lines:
        place = tally[line["key"], line["model"], line["time"][:10]]
        for at, number in enumerate((bool(line["prompt_tokens"]), *(line[name] for name in TALLIED[1:]))):
            place[at] += number
    return {place: numbers for place, numbers in tally.items() if any(numbers)}


def tallied_entries(entries: list[dict[str, Any]]) -> Tally:
    return {(each["key"], each["model"], each["day"]): [each[name] for name in TALLIED] for each in entries}


def without_days(tally: Tally) -> Tally:
    found: Tally = defaultdict(lambda: [0, 0, 0])
    for (key, model, _), numbers in tally.items():
        found[key, model, ""] = [a + b for a, b in zip(found[key, model, ""], numbers, strict=True)]
    return dict(found)


def settled(drivers: dict[str, UsageDriver], audit: Path, counts: list[ClientCount]) -> list[str]:
    """`compare`, once the audit log and the usage have what had not been written. drivers: by name of key."""
    deadline = time.monotonic() + 60
    while True:
        sessions, stored = {count.session for count in counts} - {""}, {}
        entries: list[dict[str, Any]] = []
        for driver in drivers.values():
            entries += driver.entries()
            stored |= driver.stored(sessions - stored.keys())
        wrong = compare(counts, audited(audit, drivers), entries, stored)
        if not wrong or time.monotonic() > deadline:
            return wrong
        time.sleep(1)


def main(arguments: list[str]) -> int:
    own, flags = own_and_servers(arguments)
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=12, help="at a time in each process")
    parser.add_argument("--processes", type=int, default=2, help="of clients; the first has the minutely key")
    parser.add_argument("--per-minute", type=int, default=240, help="the limit of that key")
    options = parser.parse_args(own)
    with tempfile.TemporaryDirectory(prefix="rwkv-key-usage-") as scratch:
        folder = Path(scratch)
        keys, audit, limit = folder / "keys.json", folder / "audit.jsonl", options.per_minute
        secrets = {
            MINUTELY: records.add(keys, Key(MINUTELY, "", 0, 0.0, requests_per_minute=limit)),
            AT_ONCE: records.add(keys, Key(AT_ONCE, "", 0, 0.0, rows=ROWS)),
        }
        operator = records.add(keys, Key(OPERATOR, "", 0, 0.0, admin=True))
        more = ["--frontends", "4", "--keys", str(keys), "--audit-log", str(audit)]
        server = Server([*flags, *more, "--batch-dir", str(folder / "batches")], folder, operator)
        try:
            server.wait()
            print("the server is ready", flush=True)
            drivers = {name: UsageDriver(server.url, secret) for name, secret in secrets.items()}
            few, began = options.requests // MINUTE_SHARE, time.monotonic()
            others = max(1, options.processes - 1)
            shares = [(MINUTELY, range(few))]
            shares += [(AT_ONCE, range(few + n, options.requests, others)) for n in range(others)]
            with ProcessPoolExecutor(len(shares)) as processes:
                sent = [
                    processes.submit(send_all, server.url, secrets[name], numbers, options.clients)
                    for name, numbers in shares
                ]
                results = []
                for (name, _), share in zip(shares, sent, strict=True):
                    results.append(share.result())
                    seconds = time.monotonic() - began
                    print(
                        f"{seconds:.0f} s: {name}: {len(results[-1].counts)} requests, "
                        f"{results[-1].refused} answers 429",
                        flush=True,
                    )
            counts = [count for share in results for count in share.counts]
            wrong = settled(drivers, audit, counts)
            lines = audited(audit, drivers)
            entries = [entry for driver in drivers.values() for entry in driver.entries()]
        finally:
            with suppress(ProcessLookupError):
                server.stop()
    windows = int(seconds // 60) + 1  # minutes that may have begun
    if (taken := sum(line["key"] == MINUTELY for line in lines)) > limit * windows:
        wrong.append(f"{MINUTELY} had {taken} requests in {windows} minutes of {limit}")
    print(f"{len(counts)} requests in {seconds:.0f} s: {dict(Counter(c.kind for c in counts).most_common())}")
    for place, numbers in tallied_entries(entries).items():
        print(f"{' '.join(place)}: {dict(zip(TALLIED, numbers, strict=True))}")
    by_id = {line["id"]: line["completion_tokens"] for line in lines}
    left = [count for count in counts if count.left]
    print(
        f"of {len(left)} who closed their connection: {sum(count.completion for count in left)} tokens "
        f"received, {sum(by_id.get(count.id, 0) for count in left)} counted"
    )
    print("\n".join(wrong[:20]) or "all of it holds")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
