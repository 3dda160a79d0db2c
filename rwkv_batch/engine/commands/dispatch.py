"""Which part of the engine carries a command out."""

from dataclasses import dataclass

from rwkv_batch.engine.commands.adapters import AdapterCommands
from rwkv_batch.engine.commands.requests import RequestCommands
from rwkv_batch.engine.commands.sessions import SessionCommands
from rwkv_batch.engine.commands.start_states import StartStateCommands
from rwkv_batch.engine.commands.text import TextCommands
from rwkv_batch.engine.scheduling.sequence import RequestKey
from rwkv_batch.wire.commands import (
    AdapterCommand,
    EngineCommand,
    RequestCommand,
    StartStateCommand,
    TextCommand,
)


@dataclass(frozen=True)
class Commands:
    """All of these parts."""

    sessions: SessionCommands
    start_states: StartStateCommands
    requests: RequestCommands
    adapters: AdapterCommands
    texts: TextCommands

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
