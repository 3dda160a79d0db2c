"""Changes of models that are asked for while another one is under way."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from changing_driver import ChangingDriver
from checkpoints import write_pth
from models_driver import WEIGHTS
from msgspec.structs import replace

from rwkv_batch.engine.serving.models import Member
from rwkv_batch.wire.commands import LoadModel, MayChangeModels, RemoveModel
from rwkv_batch.wire.protocol import CommandReply, Rejected

LONG = 150  # tokens of a row that runs through a swap


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: write_pth(folder / f"{name}.pth", dict(w.tensors)) for name, w in WEIGHTS.items()}


@pytest.fixture
def driver(tmp_path) -> Iterator[ChangingDriver]:
    made = ChangingDriver("one", folder=tmp_path)
    yield made
    made.settle()
    made.models.close()


def test_one_change_at_a_time(driver, files):
    driver.begin(LoadModel("l", str(files["two"]), "two"))
    second = driver.change(LoadModel("m", str(files["two"]), "three"))
    assert isinstance(second, Rejected) and second.reason == "conflict" and "two" in second.message
    driver.finish("l")
    assert driver.served() == ["one", "two"]


def test_the_next_change_waits_while_an_idle_model_that_was_replaced_ends(driver, files, monkeypatch):
    ends, close = threading.Event(), Member.close

    def held(self):
        assert ends.wait(60)
        close(self)

    monkeypatch.setattr(Member, "close", held)
    driver.change(LoadModel("l", str(files["two"]), "one"))
    driver.begin(LoadModel("m", str(files["one"]), "one"))
    driver.begin(RemoveModel("r", "one"))
    assert not driver.ended("m") and not driver.ended("r")
    ends.set()
    driver.wait(lambda: driver.ended("m") and driver.ended("r"))
    assert isinstance(driver.events["m"][-1], CommandReply)
    refused = driver.events["r"][-1]
    assert isinstance(refused, Rejected) and "being loaded now" in refused.message, "one at a time"


def test_a_change_beside_rows_of_a_replaced_model_is_told_of_them(driver, files):
    running = driver.add("one", max_tokens=LONG)
    driver.step()
    driver.change(LoadModel("l", str(files["two"]), "one"))
    refused = driver.change(LoadModel("m", str(files["two"]), "one"))
    told = driver.change(MayChangeModels("may"))
    assert not driver.ended(running)
    assert isinstance(refused, Rejected) and "still running rows now" in refused.message
    assert told == replace(refused, id="may")
    driver.settle()
    assert isinstance(driver.change(MayChangeModels("may again")), CommandReply)
