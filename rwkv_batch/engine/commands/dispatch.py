"""Which part of the engine carries a command out."""

from rwkv_batch.engine.commands.adapters import AdapterCommands
from rwkv_batch.engine.commands.requests import RequestCommands
from rwkv_batch.engine.commands.sessions import SessionCommands
from rwkv_batch.engine.commands.start_states import StartStateCommands
from rwkv_batch.engine.commands.text import TextCommands
from rwkv_batch.engine.row_adapters.adapters import Adapters
from rwkv_batch.engine.scheduling.scheduler import Scheduler
from rwkv_batch.engine.scheduling.sequence import Outbox, RequestKey
from rwkv_batch.engine.scheduling.turns import Turns
from rwkv_batch.model.checkpoint import Checkpoint
from rwkv_batch.text.tokenizer import Tokenizer
from rwkv_batch.wire.commands import (
    AdapterCommand,
    EngineCommand,
    RequestCommand,
    StartStateCommand,
    TextCommand,
)
from state_pool import StatePool


class Commands:
    """All of these parts."""

    def __init__(
        self,
        pool: StatePool,
        scheduler: Scheduler,
        turns: Turns,
        outbox: Outbox,
        requests: RequestCommands,
        adapters: Adapters,
        tokenizer: Tokenizer,
        weights: Checkpoint,
    ) -> None:
        self.requests = requests
        self.sessions = SessionCommands(pool, scheduler, turns, outbox, tokenizer)
        self.start_states = StartStateCommands(pool, outbox, weights, adapters)
        self.adapters = AdapterCommands(adapters, outbox)
        self.texts = TextCommands(tokenizer, outbox)

    def run(self, key: RequestKey, command: EngineCommand) -> None:
        """The reply goes to the outbox, at once or later. Raises entries.StoreError."""
        if isinstance(command, RequestCommand):
            self.requests.run(key, command)
        elif isinstance(command, StartStateCommand):
            self.start_states.run(key, command)
        elif isinstance(command, AdapterCommand):
            self.adapters.run(key, command)
        elif isinstance(command, TextCommand):
            self.texts.run(key, command)
        else:
            self.sessions.run(key, command)
