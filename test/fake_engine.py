"""The engine's end of the wire without a model: it echoes prompts, one character a token, and does mischief when asked.

What a prompt begins with decides: "hang" (accepted, then silence), "slow" (20 ms a token), "trickle" (4 characters, then
silence), "late" (0.7 s before the first token), "overloaded", "invalid", "fail" (accepted, then failed), "broken" (some
text, then failed), "flood" (a piece each
5 ms, no end), "mute" (not even accepted); anything else is echoed at once.
"""
import contextlib
import itertools
import threading
import time
from collections.abc import Callable

import zmq

from rwkv_batch.protocol import (
    Accepted,
    Cancel,
    EngineInfo,
    Event,
    Failed,
    GenerateRequest,
    Progress,
    Rejected,
    RowDelta,
    decode_to_engine,
    encode,
)

INFO = EngineInfo(model="fake-rwkv", layers=1, width=64, parameters=1, dtype="float32", device="cpu", slots=8, vocabulary=65536)


class FakeEngine:
    """Listens on `address` until closed. `requests` and `cancelled` fill as messages come."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.requests: list[GenerateRequest] = []
        self.cancelled: list[str] = []
        self._changed = threading.Condition()
        self._due: list[tuple[float, bytes, Event]] = []  # events to send, each at its time
        self._closed = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def __enter__(self) -> "FakeEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        self._thread.join()

    def wait_for(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Whether `condition` became true as messages arrived, within `seconds`."""
        with self._changed:
            return self._changed.wait_for(condition, seconds)

    def request(self, prompt: str) -> GenerateRequest:
        """The newest request with this prompt."""
        return next(r for r in reversed(self.requests) if prompt in r.prompts)

    def _run(self) -> None:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
            router.setsockopt(zmq.LINGER, 0)
            router.bind(self.address)
            while not self._closed:
                if router.poll(5):
                    identity, data = router.recv_multipart()
                    self._take(identity, decode_to_engine(data))
                now = time.monotonic()
                ready = [entry for entry in self._due if entry[0] <= now]
                self._due = [entry for entry in self._due if entry[0] > now]
                for identity in dict.fromkeys(entry[1] for entry in ready):
                    with contextlib.suppress(zmq.ZMQError):
                        router.send_multipart([identity, encode([event for _, to, event in ready if to == identity])])

    def _take(self, identity: bytes, message: GenerateRequest | Cancel) -> None:
        with self._changed:
            if isinstance(message, Cancel):
                self.cancelled.append(message.id)
                self._due = [entry for entry in self._due if entry[2].id != message.id]
            else:
                self.requests.append(message)
                now = time.monotonic()
                self._due += [(now + delay, identity, event) for delay, event in script(message)]
            self._changed.notify_all()


def script(request: GenerateRequest) -> list[tuple[float, Event]]:
    """The events that answer `request`, with their delays in seconds, in order."""
    key, first = request.id, str(request.prompts[0])
    if first.startswith("mute"):
        return []
    for reason in ("overloaded", "invalid"):
        if first.startswith(reason):
            return [(0, Rejected(key, reason, f"The fake engine finds this {reason}."))]
    events: list[tuple[float, Event]] = [(0, Accepted(key, [len(p) for p in request.prompts]))]
    if first.startswith("hang"):
        return events
    if first.startswith("fail"):
        return [*events, (0, Failed(key, "The fake engine failed."))]
    start = 0.7 if first.startswith("late") else 0.0
    pace = 0.02 if first.startswith("slow") else 0.0
    for row in range(len(request.prompts) * request.n):
        prompt = request.prompts[row // request.n]
        deltas = row_deltas(row, prompt if isinstance(prompt, str) else str(prompt), request)
        if first.startswith("trickle"):
            deltas = deltas[:4]
        if first.startswith("flood"):
            return events + [(0.005 * i, Progress(key, [delta])) for i, delta in enumerate(deltas[:-1])]
        drawn = itertools.accumulate(delta.tokens for delta in deltas)
        events += [(start + pace * tokens, Progress(key, [delta])) for tokens, delta in zip(drawn, deltas, strict=True)]
        if first.startswith("broken"):
            return [*events[:3], (0.01, Failed(key, "The fake engine broke down."))]
    return events


def row_deltas(row: int, text: str, request: GenerateRequest) -> list[RowDelta]:
    """`text` cut at max_tokens and at stop strings, in pieces of `flush_tokens`."""
    stop = min((at for s in request.stop_strings if (at := text.find(s)) >= 0), default=len(text))
    reason = "stop" if stop <= request.max_tokens else "length"
    text = text[: min(stop, request.max_tokens)]
    size = request.flush_tokens or max(1, len(text))
    pieces = [text[i: i + size] for i in range(0, len(text), size)]
    return [*(RowDelta(row, piece, len(piece)) for piece in pieces), RowDelta(row, "", 0, reason)]
