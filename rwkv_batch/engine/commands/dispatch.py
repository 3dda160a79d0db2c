"""Which part of the engine carries a command out."""

from collections.abc import Callable

from rwkv_batch.engine.commands.adapters import AdapterCommands
from rwkv_batch.engine.commands.requests import RequestCommands
from rwkv_batch.engine.commands.sessions import SessionCommands
from rwkv_batch.engine.commands.start_states import StartStateCommands
from rwkv_batch.engine.commands.text import TextCommands
from rwkv_batch.engine.rows.adapters import Adapters
from rwkv_batch.engine.rows.parts import EngineParts
from rwkv_batch.engine.rows.stored_turns import Turns
from rwkv_batch.wire.commands import (
    AdapterCommand,
    EngineCommand,
    RequestCommand,
    StartStateCommand,
    TextCommand,
)
from rwkv_batch.wire.protocol import GenerateRequest, RequestKey


class Commands:
    """All of these parts."""

    def __init__(
        self,
        parts: EngineParts,
        turns: Turns,
        adapters: Adapters,
        unqueued: Callable[[], list[GenerateRequest]],
    ) -> None:
        self.requests = RequestCommands(parts, unqueued)
        self.sessions = SessionCommands(parts, turns)
        self.start_states = StartStateCommands(parts, adapters)
        self.adapters = AdapterCommands(parts.rows, adapters)
        self.texts = TextCommands(parts)

    def run(self, key: RequestKey, command: EngineCommand) -> None:
        """The reply is an event, at once or later. Raises Refusal, entries.StoreError."""
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
