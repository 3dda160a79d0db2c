#!/usr/bin/env python3
"""Whether the usage of a key is what its clients have counted, over many requests of all kinds.

Starts a server with four front ends, sends requests by many clients at once, and compares. A tenth is
cancelled: half of these by /v1/server/stop, after which the client reads its stream to the end; half by
closing the connection. Such a client cannot know what was under way to it, so the server's access log says
what was counted for its request, and that must be no less than what it has received.

    python bench/key_usage.py --requests 10000 -- --device cpu
"""

import argparse
import json
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import httpx

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.serve_all import Server  # noqa: E402
from rwkv_batch.keys import records  # noqa: E402
from rwkv_batch.keys.records import Key  # noqa: E402

NAME = "bench"
LOGGED = re.compile(r" (\S+) key=(\S+) tokens=(\d+)\+(\d+)")
PROMPTS = ("What is {} + 3?", "What is the capital of France? ({})", "Say {} in French.")


class ClientCount(NamedTuple):
    """What a client has counted of one request. `left`: it has closed the connection of this request id."""

    kind: str
    prompt: int
    completion: int
    left: str = ""


class UsageDriver:
    """Sends requests with a key. Methods are for any number of threads."""

    def __init__(self, url: str, secret: str) -> None:
        self._url, self._headers = url, {"authorization": f"Bearer {secret}"}

    def send(self, number: int) -> ClientCount:
        """The request of this number, always the same."""
        dice = random.Random(number)
        kinds: list[Callable[[httpx.Client, str, int], ClientCount]] = [self._stop, self._leave]
        if dice.random() < 0.9:
            kinds = [self._chat, self._stream, self._rows, self._turn, self._message, self._response]
        prompt = dice.choice(PROMPTS).format(number)
        # A connection of its own, so that requests spread over the front ends.
        http = httpx.Client(
            base_url=self._url, headers=self._headers, timeout=600, trust_env=False, verify=False
        )
        with http:
            return dice.choice(kinds)(http, prompt, number)

    def usage(self) -> dict[str, int]:
        """What the server has counted."""
        found = httpx.get(f"{self._url}/v1/usage", headers=self._headers, timeout=60, trust_env=False)
        total: dict[str, int] = found.raise_for_status().json()["total"]
        return total

    def _chat(self, http: httpx.Client, prompt: str, number: int) -> ClientCount:
        body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 8}
        return _counted("chat", _post(http, "/v1/chat/completions", body))

    def _rows(self, http: httpx.Client, prompt: str, number: int) -> ClientCount:
        return _counted("rows", _post(http, "/v1/completions", {"prompt": prompt, "max_tokens": 5, "n": 3}))

    def _turn(self, http: httpx.Client, prompt: str, number: int) -> ClientCount:
        """The second turn of a session, as a chat whose state is stored."""
        body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 5}
        session = {"x-rwkv-session-id": f"s{number % 50}-{number}"}
        return _counted("turn", _post(http, "/v1/chat/completions", body, session))

    def _message(self, http: httpx.Client, prompt: str, number: int) -> ClientCount:
        body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 5}
        used = _post(http, "/v1/messages", body)["usage"]
        prompt_tokens = used["input_tokens"] + (used.get("cache_read_input_tokens") or 0)
        return ClientCount("message", prompt_tokens, used["output_tokens"])

    def _response(self, http: httpx.Client, prompt: str, number: int) -> ClientCount:
        used = _post(http, "/v1/responses", {"input": prompt, "max_output_tokens": 16})["usage"]
        return ClientCount("response", used["input_tokens"], used["output_tokens"])

    def _stream(self, http: httpx.Client, prompt: str, number: int) -> ClientCount:
        return self._read("stream", http, prompt, number, 12, lambda id_: None)

    def _stop(self, http: httpx.Client, prompt: str, number: int) -> ClientCount:
        def stop(id_: str) -> None:
            body = {"request_id": id_}
            httpx.post(
                f"{self._url}/v1/server/stop", json=body, headers=self._headers, timeout=60, trust_env=False
            ).raise_for_status()

        return self._read("stopped", http, prompt, number, 400, stop)

    def _leave(self, http: httpx.Client, prompt: str, number: int) -> ClientCount:
        return self._read("left", http, prompt, number, 400, None)

    def _read(
        self,
        kind: str,
        http: httpx.Client,
        prompt: str,
        number: int,
        most: int,
        begun: Callable[[str], None] | None,
    ) -> ClientCount:
        """Read a stream whose text does not end by itself. begun: called at its first text; None: leave."""
        id_, tokens, fed = f"{kind}-{number}", 0, 0
        body = {"prompt": prompt, "max_tokens": most, "stream": True, "return_token_ids": True}
        body |= {"stream_options": {"include_usage": True}, "logit_bias": {"0": -100}}
        headers = {"x-request-id": id_}
        with http.stream("POST", "/v1/completions", json=body, headers=headers) as reply:
            assert reply.status_code == 200, reply.read()
            for line in reply.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                if usage := event.get("usage"):
                    return ClientCount(kind, usage["prompt_tokens"], usage["completion_tokens"])
                for choice in event["choices"]:
                    fed = fed or len(choice.get("prompt_token_ids") or ())
                    before, tokens = tokens, tokens + len(choice.get("token_ids") or ())
                    if tokens and not before and begun:
                        begun(id_)
                if tokens and begun is None:
                    break
        return ClientCount(kind, fed, tokens, id_)


def send_all(url: str, secret: str, numbers: range, clients: int) -> list[ClientCount]:
    """These requests, so many at a time."""
    driver = UsageDriver(url, secret)
    with ThreadPoolExecutor(clients) as pool:
        return list(pool.map(driver.send, numbers))


def _post(http: httpx.Client, path: str, body: dict, headers: dict[str, str] | None = None) -> dict:
    reply = http.post(path, json=body, headers=headers)
    assert reply.status_code == 200, reply.text
    found: dict = reply.json()
    return found


def _counted(kind: str, reply: dict) -> ClientCount:
    return ClientCount(kind, reply["usage"]["prompt_tokens"], reply["usage"]["completion_tokens"])


def in_log(text: str, name: str = NAME) -> dict[str, tuple[int, int]]:
    """Prompt and completion tokens of requests by their ids, as the access log says them."""
    found = LOGGED.findall(text)
    return {id_: (int(prompt), int(completion)) for id_, key, prompt, completion in found if key == name}


def compare(counts: list[ClientCount], usage: dict[str, int], log: str, name: str = NAME) -> list[str]:
    """What does not agree; and for those who have left, what the log says in place of what they know."""
    logged, wrong = in_log(log, name), []
    prompt = completion = 0
    for count in counts:
        if not count.left:
            prompt, completion = prompt + count.prompt, completion + count.completion
            continue
        in_all = logged.get(count.left)
        if in_all is None or in_all[0] != count.prompt or in_all[1] < count.completion:
            wrong.append(f"{count.left}: it has received {count.completion}, and the log says {in_all}")
        else:
            prompt, completion = prompt + in_all[0], completion + in_all[1]
    expected = {"requests": len(counts), "prompt_tokens": prompt, "completion_tokens": completion}
    wrong += [
        f"{key}: {usage[key]} are counted, and {n} were" for key, n in expected.items() if usage[key] != n
    ]
    return wrong


def settled(driver: UsageDriver, log: Callable[[], str], counts: list[ClientCount]) -> list[str]:
    """`compare`, once all who have left are in the log and the front ends have written what they had."""
    deadline = time.monotonic() + 60
    while (wrong := compare(counts, driver.usage(), log())) and time.monotonic() < deadline:
        time.sleep(0.2)
    return wrong


def main(arguments: list[str]) -> int:
    own, flags = arguments, list[str]()
    if "--" in arguments:
        own, flags = arguments[: arguments.index("--")], arguments[arguments.index("--") + 1 :]
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=16, help="at a time in each process")
    parser.add_argument("--processes", type=int, default=2, help="of clients")
    options = parser.parse_args(own)
    with tempfile.TemporaryDirectory(prefix="rwkv-key-usage-") as scratch:
        folder = Path(scratch)
        secret = records.add(folder / "keys.json", Key(NAME, "", 0, 0.0, admin=True))
        more = ["--frontends", "4", "--log-level", "INFO", "--keys", str(folder / "keys.json")]
        server = Server([*flags, *more], folder, secret)
        try:
            server.wait()
            driver, began = UsageDriver(server.url, secret), time.monotonic()
            shares = [range(n, options.requests, options.processes) for n in range(options.processes)]
            with ProcessPoolExecutor(options.processes) as processes:
                sent = [
                    processes.submit(send_all, server.url, secret, share, options.clients) for share in shares
                ]
                counts = [count for share in sent for count in share.result()]
            seconds = time.monotonic() - began

            def log() -> str:
                return (folder / "server.log").read_text(encoding="utf-8", errors="replace")

            wrong, usage, logged = settled(driver, log, counts), driver.usage(), in_log(log())
        finally:
            with suppress(ProcessLookupError):
                server.stop()
    kinds = Counter(count.kind for count in counts)
    left = [(count.completion, logged.get(count.left, (0, 0))[1]) for count in counts if count.left]
    print(f"{len(counts)} requests in {seconds:.0f} s: {dict(kinds.most_common())}")
    print(f"usage: {usage}")
    print(
        f"of {len(left)} who closed their connection: {sum(each for each, _ in left)} tokens received, "
        f"{sum(each for _, each in left)} counted"
    )
    print("\n".join(wrong[:20]) or "equal")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
