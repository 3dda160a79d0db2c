"""Start state commands: store one from a file, list them, forget them."""

from functools import partial
from pathlib import Path

from rwkv_batch.engine.rows.adapters import Adapters
from rwkv_batch.engine.rows.parts import EngineParts
from rwkv_batch.engine.rows.rows import refusal_of_file
from rwkv_batch.model.adapters.start_states import read_start_state
from rwkv_batch.model.files import CheckpointError
from rwkv_batch.state.entries import StoreError, message
from rwkv_batch.state.starts.contents import Offsets, StartContents, StoredStart
from rwkv_batch.wire.commands import (
    DescribeStartState,
    ListStartStates,
    PutStartState,
    RemoveStartStates,
    StartStateCommand,
)
from rwkv_batch.wire.protocol import RequestKey, StartStateInfo


class _NoState(StoreError):
    """The file holds none for this model."""


class StartStateCommands:
    """Carries commands out. Their replies are events, at once or from a later `StatePool.poll`."""

    def __init__(self, parts: EngineParts, adapters: Adapters) -> None:
        self._pool, self._rows, weights = parts.pool, parts.rows, parts.weights
        self._layers, self._width, self._heads = weights.layers, weights.width, weights.heads
        self._adapters = adapters

    def run(self, request: RequestKey, command: StartStateCommand) -> None:
        match command:
            case PutStartState(key=name):
                read = partial(self._read, command)
                self._pool.starts.put(name, read, command.description, partial(self._stored, request, name))
            case DescribeStartState(key=name, description=description):
                if self._pool.starts.find(name) is None:
                    self._rows.reply(request, None)
                    return
                done = partial(self._described, request)
                self._pool.starts.describe(name, description, done)
            case ListStartStates(name=name):
                found = map(self._pool.starts.find, self._pool.starts.names() if name is None else [name])
                infos = [self._info(start) for start in found if start]
                self._rows.reply(request, None, start_states=infos)
            case RemoveStartStates(name=name):
                names = self._pool.starts.names() if name is None else [name]
                self._pool.starts.remove(
                    names, lambda count, error: self._rows.reply(request, error, found=count)
                )

    def _described(self, request: RequestKey, error: str | None) -> None:
        self._rows.reply(request, error, found=1)

    def _read(self, command: PutStartState) -> StartContents:
        try:
            state = read_start_state(Path(command.path), self._layers, self._width, command.layout)
        except CheckpointError as error:
            raise _NoState(str(error)) from error
        offsets = None if state.offsets is None else Offsets(state.offsets)
        if offsets and (reason := self._adapters.no_offsets()):
            raise _NoState(f"{command.path} has a time_offset, {reason}.")
        return StartContents(state.shift, state.wkv, offsets, state.digest)

    def _stored(self, request: RequestKey, name: str, error: Exception | None) -> None:
        start = self._pool.starts.find(name)
        if isinstance(error, _NoState):
            self._rows.reply(request, refusal_of_file(error))
        elif error and not isinstance(error, StoreError):
            self._rows.reply(request, f"The start state could not be loaded ({type(error).__name__}).")
        else:
            infos = [self._info(start)] if start else []
            self._rows.reply(request, message(error), start_states=infos)

    def _info(self, start: StoredStart) -> StartStateInfo:
        head = start.session.head
        updated = start.session.updated
        return StartStateInfo(start.name, start.description, updated, self._layers, self._heads, head.digest)
