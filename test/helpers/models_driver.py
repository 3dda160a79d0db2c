"""Several engines with tiny models in one process, run by the thread of a test."""

import threading
from pathlib import Path

from checkpoints import tiny

from rwkv_batch.engine.engine import Engine
from rwkv_batch.engine.serving.models import Models
from rwkv_batch.wire.commands import Command
from rwkv_batch.wire.protocol import (
    CommandReply,
    Event,
    Failed,
    GenerateRequest,
    Progress,
    Rejected,
    Sampling,
)

WEIGHTS = {"one": tiny(vocab=400, seed=1), "two": tiny(vocab=400, seed=2)}
GREEDY = Sampling(temperature=0.0)
OPTIONS = {"device": "cpu", "max_rows": 4, "prefix_cache_mb": 0}
PROMPT = [5, 6, 7]


def engine(name: str, wake=lambda: None, folder: Path | None = None, model=None, **options) -> Engine:
    """An engine with the weights of that name, or with others."""
    database = {"state_db": str(folder / f"{name}.db")} if folder else {}
    options = OPTIONS | database | {"model_name": name} | options
    return Engine(model or WEIGHTS[name], wake=wake, **options)


def alone(prompt: list[int], weights, max_tokens: int = 12) -> str:
    """What the model says to a prompt when nothing else runs."""
    it = Engine(weights, **OPTIONS)
    (row,) = it.generate([prompt], max_tokens=max_tokens, stop_ids=[], sampling=GREEDY)
    it.close()
    return row.text


class ModelsDriver:
    """Models, and one thread that steps them."""

    def __init__(self, *names: str, folder: Path | None = None, **options) -> None:
        self.woken = threading.Event()
        self.models = Models([engine(name, self.woken.set, folder, **options) for name in names])
        self.events: dict[str, list[Event]] = {}
        self._number = 0

    def add(self, model: str, prompt: list[int] = PROMPT, max_tokens: int = 12, **fields) -> str:
        """The id of a request."""
        self._number += 1
        given = {"prompts": [prompt], "sampling": GREEDY, "stop_ids": [], "to_model": model} | fields
        request = GenerateRequest(id=str(self._number), max_tokens=max_tokens, **given)
        self.models.add((b"test", request.id), request)
        return request.id

    def step(self) -> None:
        """A step of one model, or waiting until there is something to do."""
        if not self.models.busy:
            assert self.woken.wait(120), "the models wait for nothing"
        self.woken.clear()
        for (_, id_), event in [*self.models.launch(), *self.models.land()]:
            self.events.setdefault(id_, []).append(event)

    def ended(self, id_: str) -> bool:
        """Whether the last event of a request or command is there."""
        last = self.events[id_][-1] if id_ in self.events else None
        if isinstance(last, Progress):
            return last.rows[-1].finish_reason is not None
        return isinstance(last, Rejected | Failed | CommandReply)

    def finish(self, *ids: str) -> None:
        """Step until all of these have ended."""
        while not all(map(self.ended, ids)):
            self.step()

    def text(self, id_: str) -> str:
        """What a request has said until now."""
        found = [e for e in self.events.get(id_, []) if isinstance(e, Progress)]
        return "".join(row.text for event in found for row in event.rows)

    def ask(self, command: Command) -> Event:
        """The reply to a command."""
        self.models.command((b"test", command.id), command)
        self.finish(command.id)
        return self.events[command.id][-1]
