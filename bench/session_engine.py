"""An engine for benchmarks of sessions, with the text of its requests and when it came."""

import argparse
import os
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ |= {
    "LRU_CACHE_CAPACITY": "64",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
}  # as app.py sets them for the engine

import torch

from bench.make_checkpoint import SIZES, random_checkpoint
from rwkv_batch.engine.engine import Engine
from rwkv_batch.model import checkpoint
from rwkv_batch.model.checkpoint import Checkpoint
from rwkv_batch.state.log.store import Store
from rwkv_batch.wire.commands import SessionHistory
from rwkv_batch.wire.protocol import (
    CommandReply,
    Failed,
    GenerateRequest,
    Progress,
    Rejected,
    RequestKey,
    Sampling,
    SessionTurn,
    TokenLogprob,
    TurnInfo,
)

GREEDY = Sampling(temperature=0)


class Bench:
    """An engine, and the text of its requests."""

    def __init__(self, options: argparse.Namespace, folder: str, l1: int | None, l2: int | None) -> None:
        self.woken = threading.Event()
        self.store = Store(Path(folder) / "sessions.db")
        self.engine = Engine(
            weights(options),
            device=options.device,
            weights=options.weights,
            threads=options.threads,
            l1=l1,
            l2=l2,
            store=self.store,
            prefix_cache_mb=512,
            wake=self.woken.set,
        )
        self.texts: dict[RequestKey, str] = {}
        self.logprobs: dict[RequestKey, list[TokenLogprob]] = {}  # of requests that ask for them
        self.replies: dict[RequestKey, CommandReply] = {}
        self.first: dict[RequestKey, float] = {}  # when the first text came
        self.ended: set[RequestKey] = set()
        self._number = 0
        info = self.engine.info
        print(
            f"{info.model}: {info.layers} layers, width {info.width}, {info.dtype} on {info.device}; "
            f"{len(self.engine.runner.states.read(0)) / 1e6:.2f} MB a state"
        )

    def start(
        self, prompt: str | list[int], session: str | None = None, max_tokens: int = 2, **fields
    ) -> RequestKey:
        self._number += 1
        key = (b"bench", str(self._number))
        turn = SessionTurn(source=session, target=session, separator="\n\n") if session else None
        self.texts[key] = ""
        self.engine.add(
            key,
            GenerateRequest(
                id=key[1],
                prompts=[prompt],
                max_tokens=max_tokens,
                turn=turn,
                **{"sampling": GREEDY, "flush_tokens": 1} | fields,
            ),
        )
        return key

    def step(self) -> None:
        """One step of the engine, once it has something to do."""
        if not self.engine.busy:
            self.woken.wait()
        self.woken.clear()
        for key, event in self.engine.step():
            if isinstance(event, Failed | Rejected):
                sys.exit(f"a request failed: {event.message}")
            if isinstance(event, Progress):
                self.first.setdefault(key, time.perf_counter())
                self.texts[key] += "".join(d.text for d in event.rows)
                self.logprobs.setdefault(key, []).extend(entry for d in event.rows for entry in d.logprobs)
                if event.rows[-1].finish_reason:
                    self.ended.add(key)
            if isinstance(event, CommandReply):
                self.replies[key] = event

    def wait_for_tier(self, session: str, tier: str) -> None:
        """Until its state is there, and images that are worth writing are written."""
        found = self.engine.pool.find(session)
        assert found
        while self.engine.pool.tier(found) != tier or self.engine.pool.images.waiting:
            time.sleep(1e-3)  # an image is written without a wake
            self.engine.step()

    def history(self, session: str) -> list[TurnInfo]:
        """The turns of a session."""
        key = b"bench", f"history of {session}"
        self.engine.command(key, SessionHistory(key[1], session))
        while key not in self.replies:
            self.step()
        return self.replies.pop(key).turns

    def run(self, key: RequestKey) -> float:
        """Until the request has ended; seconds from now to its first text."""
        began = time.perf_counter()
        while key not in self.ended:
            self.step()
        return self.first[key] - began


def weights(options: argparse.Namespace) -> Checkpoint | str | None:
    """What the engine loads: random weights of a published size, a file, or the bundled model."""
    if options.size is None:
        return options.model_path
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tensors = random_checkpoint(*SIZES[options.size], device=device)
    return checkpoint.from_tensors(f"random-{options.size}", tensors)
