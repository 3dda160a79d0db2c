"""Adapter commands: load one from a file, list them, forget one."""

from pathlib import Path

from rwkv_batch.engine.rows.adapters import Adapters, LoadedAdapter
from rwkv_batch.engine.rows.rows import Refusal, Rows
from rwkv_batch.model.adapters.parts import Scaling
from rwkv_batch.state.entries import StoreError
from rwkv_batch.wire.commands import AdapterCommand, ListAdapters, LoadAdapter, RemoveAdapter
from rwkv_batch.wire.protocol import RequestKey


class AdapterCommands:
    """Carries commands out. Their replies are events, at once or from a later `Adapters.poll`."""

    def __init__(self, rows: Rows, adapters: Adapters) -> None:
        self._rows, self._adapters = rows, adapters

    def run(self, request: RequestKey, command: AdapterCommand) -> None:
        match command:
            case LoadAdapter():
                self._load(request, command)
            case ListAdapters(name=name):
                self._rows.reply(request, None, adapters=self._adapters.infos(name))
            case RemoveAdapter(key=name):
                self._rows.reply(request, None, found=self._adapters.remove(name))

    def _load(self, request: RequestKey, command: LoadAdapter) -> None:
        if command.alpha is not None and command.scaling is not None:
            raise Refusal("invalid", "adapter_alpha and adapter_scaling say the same; give one of them.")
        given = command.alpha is not None or command.scaling is not None
        scaling = Scaling(command.scaling, command.alpha) if given else None

        def loaded(adapter: LoadedAdapter | None, error: Exception | None) -> None:
            known = error is None or isinstance(error, Refusal | StoreError)
            why = error if known else f"The adapter could not be loaded ({type(error).__name__})."
            self._rows.reply(request, why, adapters=[adapter.info] if adapter else [])

        self._adapters.load(command.key, Path(command.path), scaling, loaded)
