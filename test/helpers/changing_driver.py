"""A driver of models that come and go."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from models_driver import OPTIONS, ModelsDriver

from rwkv_batch.config import EngineConfig
from rwkv_batch.engine.serving.changes import ModelChanges
from rwkv_batch.wire.commands import LoadModel, MayChangeModels, RemoveModel
from rwkv_batch.wire.protocol import CommandReply, Failed, Rejected
from rwkv_batch.wire.supervision import Serving


class ChangingDriver(ModelsDriver):
    """A driver of models that come and go."""

    def __init__(
        self, *names: str, folder: Path | None = None, files: dict[str, Path] | None = None, **options
    ) -> None:
        """files: of which the models are, as far as they are read again."""
        super().__init__(*names, folder=folder, **options)
        database = str(folder / f"{names[0]}.db") if folder else None
        config = EngineConfig(**OPTIONS | {"state_db": database} | options)
        self.told: list[Serving] = []
        paths = {name: str(path) for name, path in (files or {}).items()}
        configs = tuple(replace(config, model_path=paths.get(name)) for name in names)
        self.changes = ModelChanges(self.models, configs, self.told.append, self.woken.set)
        self.holding: list[str] = []  # names of models that take no more requests, until another one does
        hold, self.models.hold = self.models.hold, lambda name: self.holding.append(name) or hold(name)

    def change(self, command: LoadModel | RemoveModel | MayChangeModels) -> CommandReply | Rejected | Failed:
        """The reply to a command, once it has come."""
        self.begin(command)
        self.wait(lambda: self.ended(command.id))
        return self.events[command.id][-1]

    def wait(self, done: Callable[[], object]) -> None:
        """Step only when the change asks for it, so that rows do not end meanwhile."""
        while not done():
            assert self.woken.wait(120), "the change waits for nothing"
            if self.models.busy:
                self.step()
            else:
                self.woken.clear()

    def begin(self, command: LoadModel | RemoveModel | MayChangeModels) -> None:
        self.changes.run((b"test", command.id), command)
        self.woken.set()  # the reply may be there

    def settle(self) -> None:
        """Step until no change is under way."""
        nothing = RemoveModel("settled", "no such model")
        while self.change(nothing).reason != "not_found":  # but that another change is under way
            self.step()

    def drained(self) -> bool:
        """Whether a model that was replaced has ended, as far as front ends have been told."""
        stages = [loading.stage for serving in self.told for loading in serving.loading]
        return "draining" in stages and self.told[-1].loading == []

    def served(self) -> list[str]:
        return [info.model for info in self.models.infos]
