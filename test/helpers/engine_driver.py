"""An engine with a tiny model, run by the thread of a test."""

import threading
from collections.abc import Sequence

from checkpoints import tiny

from rwkv_batch.engine import Engine
from rwkv_batch.engine.scheduling.scheduler import Scheduler
from rwkv_batch.model.checkpoint import Checkpoint
from rwkv_batch.state.log.store import Store
from rwkv_batch.wire.commands import Command
from rwkv_batch.wire.protocol import (
    CommandReply,
    Event,
    GenerateRequest,
    Progress,
    Rejected,
    Sampling,
    SessionTurn,
)

WEIGHTS = tiny(vocab=400)
PROMPTS = [[5, 6, 7], [300], list(range(20, 60)), [9, 9, 9, 9]]
SAMPLED = Sampling(temperature=1.2, seed=11, presence_penalty=0.5, alpha_frequency=0.2)


def free_slots(scheduler: Scheduler) -> int:
    """How many slots of a scheduler nobody has, where nothing runs and there are more of them than rows."""
    spare = list(iter(scheduler.spare, None))
    scheduler.free(*spare)
    return len(spare) + scheduler.max_rows


class Driver:
    """An engine, and one thread that runs it."""

    def __init__(self, store: Store | None = None, weights: Checkpoint = WEIGHTS, **options) -> None:
        self.woken = threading.Event()
        self.engine = Engine(
            weights,
            store=store,
            wake=self.woken.set,
            **{"device": "cpu", "max_rows": 2, "prefix_cache_mb": 0} | options,
        )
        self._number = 0
        self.events: dict[str, list[Event]] = {}  # by the ids of requests

    def add(self, prompt: str | list[int], session: str | None = None, max_tokens: int = 6, **fields) -> str:
        """The id of a request."""
        self._number += 1
        request = GenerateRequest(
            id=str(self._number),
            max_tokens=max_tokens,
            **{
                "turn": SessionTurn(source=session, target=session) if session else None,
                "prompts": [prompt],
                "sampling": SAMPLED,
                "stop_ids": [],
            }
            | fields,
        )
        self.engine.add((b"test", request.id), request)
        return request.id

    def until(self, name: str, kind: tuple[type, ...]) -> list[Event]:
        """The events of a request, up to the first of these kinds that ends it."""
        while True:
            events = self.events.get(name, [])
            if events and isinstance(events[-1], kind) and _ends(events[-1]):
                return events
            if not self.engine.busy:
                assert self.woken.wait(120), "the engine waits for nothing"
            self.step()

    def step(self) -> None:
        """One step of the engine; its events are kept for `until`."""
        self.woken.clear()
        for (_, id_), event in self.engine.step():
            self.events.setdefault(id_, []).append(event)

    def text(self, name: str) -> str:
        """What a request has said until now."""
        events = self.events.get(name, [])
        return "".join(row.text for event in events if isinstance(event, Progress) for row in event.rows)

    def say(self, prompt: str | list[int], session: str | None = None, **fields) -> tuple[str, int]:
        """A turn's text and number of tokens."""
        return self.said(self.add(prompt, session, **fields))

    def said(self, name: str) -> tuple[str, int]:
        """The text of a request that was added, and its number of tokens."""
        events = self.until(name, (Progress,))
        rows = [row for event in events if isinstance(event, Progress) for row in event.rows]
        return "".join(row.text for row in rows), sum(row.tokens for row in rows)

    def ask(self, command: Command) -> CommandReply:
        self.events.pop(command.id, None)  # of a command before
        self.engine.command((b"test", command.id), command)
        (reply,) = self.until(command.id, (CommandReply, Rejected))
        assert isinstance(reply, CommandReply), reply
        return reply

    def conversation(self, session: str, prompts: Sequence[list[int]] = PROMPTS, **fields) -> list:
        said = [self.say(prompt, session, **fields) for prompt in prompts]
        self.engine.close()
        return said


def _ends(event: Event) -> bool:
    return not isinstance(event, Progress) or bool(event.rows[-1].finish_reason)
