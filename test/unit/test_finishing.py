"""What a front end was changing when it died: another one sees that all engines have made it, or none."""

import asyncio
import itertools

import pytest

from rwkv_batch.wire.client import EngineGone, RequestRejected
from rwkv_batch.wire.commands import (
    Command,
    ListAdapters,
    ListModels,
    LoadAdapter,
    LoadModel,
    RemoveAdapter,
    RemoveModel,
)
from rwkv_batch.wire.host import finishing
from rwkv_batch.wire.host.finishing import finish
from rwkv_batch.wire.protocol import AdapterInfo, CommandReply
from rwkv_batch.wire.supervision import EngineInfo

LOAD, UNLOAD = LoadModel("c", "/b", "b"), RemoveModel("c", "b")
LOAD_ADAPTER, UNLOAD_ADAPTER = (
    LoadAdapter("c", "x", "/x", to_model="a"),
    RemoveAdapter("c", "x", to_model="a"),
)


class Engine:
    """Models with their adapters. `refuses`: why nothing is loaded. `under_way`: what it is still making."""

    def __init__(self, *models: str) -> None:
        self.models = {name: (1, set[str]()) for name in models}
        self.refuses, self.gone = "", False
        self.under_way: Command | None = None

    def make(self, command: Command) -> None:
        """Raises RequestRejected."""
        match command:
            case LoadModel(name=str(name)) if not self.refuses:
                self.models[name] = 1 + self.models.get(name, (0,))[0], set()
            case LoadAdapter(to_model=model, key=key) if not self.refuses:
                if key in self.models[model][1]:
                    raise RequestRejected("exists", "it is loaded already")
                self.models[model][1].add(key)
            case RemoveModel(name=name) if name not in self.models:
                raise RequestRejected("not_found", "there is none")
            case RemoveModel(name=name) if len(self.models) == 1:
                raise RequestRejected("invalid", "it is the only one")
            case RemoveModel(name=name):
                del self.models[name]
            case RemoveAdapter(to_model=model, key=key):
                self.models[model][1].discard(key)
            case _:
                raise RequestRejected("invalid", self.refuses)

    async def ask(self, command: Command) -> CommandReply:
        await asyncio.sleep(0)
        if self.gone:
            raise EngineGone("it has died")
        match command:
            case ListModels():
                infos = [EngineInfo(name, 1, 64, 1, "", "", 4, 9, "f", name) for name in self.models]
                return CommandReply(command.id, models=infos)
            case ListAdapters(to_model=model, name=name):
                found = [
                    AdapterInfo(each, "d", 1, 0.0, "/x")
                    for each in self.models[model][1]
                    if name in (None, each)
                ]
                return CommandReply(command.id, adapters=found)
        if self.under_way:
            self.make(self.under_way)
            self.under_way = None
            reason = "exists" if isinstance(command, LoadAdapter) else "conflict"
            raise RequestRejected(reason, "it is being made")
        self.make(command)
        return CommandReply(command.id)


CHANGES = {
    "load": (LOAD, ["a"], {"a", "b"}),
    "load in place": (LOAD, ["a", "b"], {"a", "b"}),
    "remove": (UNLOAD, ["a", "b"], {"a"}),
    "load an adapter": (LOAD_ADAPTER, ["a"], {"a"}),
    "remove an adapter": (UNLOAD_ADAPTER, ["a"], {"a"}),
}


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finishing, "AGAIN", 0.0)


def finished(engines: list[Engine], change: Command, had: list[str]) -> bool:
    return asyncio.run(asyncio.wait_for(finish(engines, range(len(engines)), change, had), 30))


@pytest.mark.parametrize(("change", "had", "has"), CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize(
    "reached", [*itertools.product(["not", "made", "under way"], repeat=2)], ids="-".join
)
def test_all_engines_make_it_whichever_it_had_reached(change, had, has, reached):
    engines = [Engine(*had) for _ in reached]
    for engine, how in zip(engines, reached, strict=True):
        if isinstance(change, RemoveAdapter):
            engine.make(LOAD_ADAPTER)
        if how == "made":
            engine.make(change)
        elif how == "under way":
            engine.under_way = change
    assert finished(engines, change, had)
    for engine in engines:
        assert engine.models.keys() == has
        assert engine.models["a"][1] == ({"x"} if isinstance(change, LoadAdapter) else set())
        if change is LOAD:
            assert engine.models["b"][0] > had.count("b"), "it is the new one"


@pytest.mark.parametrize("change", [LOAD, LOAD_ADAPTER], ids=["model", "adapter"])
def test_where_one_engine_refuses_none_has_it(change):
    engines = [Engine("a"), Engine("a"), Engine("a")]
    engines[0].make(change)
    engines[2].refuses = "there is no memory for it"
    assert not finished(engines, change, ["a"])
    assert [engine.models for engine in engines] == [{"a": (1, set())}] * 3


def test_the_only_model_stays_everywhere():
    engines = [Engine("b"), Engine("b")]
    assert not finished(engines, UNLOAD, ["b"])
    assert all(engine.models for engine in engines)


def test_what_has_taken_the_place_of_something_is_not_removed():
    engines = [Engine("a", "b"), Engine("a", "b")]
    engines[1].refuses = "there is no memory for it"
    assert not finished(engines, LOAD, ["a", "b"])
    assert all("b" in engine.models for engine in engines)


def test_an_engine_that_dies_meanwhile_counts_as_one_that_is_started_later():
    engines = [Engine("a"), Engine("a")]
    engines[1].gone = True
    assert finished(engines, LOAD, ["a"]) and "b" in engines[0].models
