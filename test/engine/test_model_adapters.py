"""Models that are loaded with an adapter while others serve, as RWKV-Infer's clients ask for it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from adapter_files import bone, disha, dora, lora, made, miss, mole
from changing_driver import ChangingDriver
from checkpoints import tiny, write_pth
from models_driver import PROMPT, alone

from rwkv_batch.engine.serving.changes import in_fields
from rwkv_batch.model.adapters.merge import merge
from rwkv_batch.model.adapters.parts import Scaling
from rwkv_batch.model.adapters.reader import read
from rwkv_batch.model.checkpoint import Checkpoint, load
from rwkv_batch.wire.commands import LoadModel
from rwkv_batch.wire.protocol import CommandReply, Rejected

BASE = tiny(layers=2, width=128, vocab=320, seed=3)
MATRICES = ("blocks.0.att.key", "blocks.1.ffn.value")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_pth(tmp_path_factory.mktemp("models") / "base.pth", dict(BASE.tensors))


@pytest.fixture
def driver() -> Iterator[ChangingDriver]:
    driver = ChangingDriver("one")
    yield driver
    driver.settle()
    driver.models.close()


def adapter_of(folder: Path, matrix) -> Path:
    return write_pth(folder / "adapter.pth", made(dict(BASE.tensors), matrix, MATRICES))


def loaded(driver: ChangingDriver, model: Path, adapter: Path, **fields) -> tuple[str, str]:
    """The note of the reply, and what the model says."""
    reply = driver.change(LoadModel("l", str(model), "new", adapter=str(adapter), **fields))
    assert isinstance(reply, CommandReply), reply
    asked = driver.add("new")
    driver.finish(asked)
    return reply.note, driver.text(asked)


def expected(model: Path, adapter: Path, scaling: Scaling | None = None, rule=None, **options) -> str:
    base: Checkpoint = load(model)
    return alone(PROMPT, merge(base, read(adapter, base, **options), scaling, rule))


@pytest.mark.parametrize("matrix", [bone("bone"), bone("disha"), disha], ids=["bone", "disha-3d", "disha-2d"])
def test_a_scaling_beside_what_has_none_changes_nothing_and_that_is_said(driver, model, tmp_path, matrix):
    adapter = adapter_of(tmp_path, matrix)
    note, text = loaded(driver, model, adapter, adapter_scaling=2.0)
    assert "nothing in it has a scaling" in note and "--" not in note
    assert text == expected(model, adapter)


@pytest.mark.parametrize("matrix", [lora, dora, miss])
def test_without_a_scaling_it_is_that_of_rwkv_infer(driver, model, tmp_path, matrix):
    adapter = adapter_of(tmp_path, matrix)
    note, text = loaded(driver, model, adapter)
    assert "2.0" in note and "`adapter_scaling`" in note
    assert text == expected(model, adapter, Scaling(2.0))


def test_alpha_is_divided_by_the_rank(driver, model, tmp_path):
    adapter = adapter_of(tmp_path, lora)
    assert loaded(driver, model, adapter, adapter_alpha=8.0) == ("", expected(model, adapter, Scaling(2.0)))


def test_what_pissa_began_with_is_taken_out(driver, model, tmp_path):
    adapter = adapter_of(tmp_path, lora)
    began = made(dict(BASE.tensors), lora, MATRICES, seed=7)
    init = write_pth(
        tmp_path / "init.pth", {name.replace(".lora_", ".init_lora_"): t for name, t in began.items()}
    )
    note, text = loaded(driver, model, adapter, adapter_init=str(init), adapter_scaling=2.0)
    assert "changes nothing" in note
    assert text == expected(model, adapter, init=init) != expected(model, adapter, Scaling(2.0))


@pytest.mark.parametrize(("bias", "rule"), [(False, "topk0"), (True, "shared")])
def test_the_rule_of_a_router_is_that_of_its_trainer(driver, model, tmp_path, bias, rule):
    adapter = write_pth(tmp_path / "mole.pth", mole("lora", 3, 2, bias))
    note, text = loaded(driver, model, adapter, adapter_scaling=2.0)
    assert "`mole_router`" in note and rule in note
    assert text == expected(model, adapter, Scaling(2.0), rule)


def test_the_rule_of_a_router_can_be_sent(driver, model, tmp_path):
    adapter = write_pth(tmp_path / "mole.pth", mole("bone", 3, 2))
    note, text = loaded(driver, model, adapter, mole_router="shared")
    assert note == "" and text == expected(model, adapter, None, "shared")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"mole_router": "topk0"}, "leave `mole_router` out"),
        (
            {"adapter_alpha": 4.0, "adapter_scaling": 2.0},
            "`adapter_alpha` and `adapter_scaling` say the same",
        ),
        (
            {"adapter": "", "adapter_alpha": 4.0},
            "`adapter_alpha` needs an adapter; give its file with `adapter_filename`",
        ),
    ],
)
def test_a_refusal_names_fields(driver, model, tmp_path, fields, words):
    adapter = str(adapter_of(tmp_path, lora))
    reply = driver.change(
        LoadModel(**{"id": "l", "path": str(model), "name": "new", "adapter": adapter} | fields)
    )
    assert isinstance(reply, Rejected) and words in reply.message and "--" not in reply.message


def test_an_adapter_in_place_of_a_model_is_refused_by_field(driver, tmp_path):
    reply = driver.change(LoadModel("l", str(adapter_of(tmp_path, lora)), "new"))
    assert isinstance(reply, Rejected) and "`adapter_filename`" in reply.message


def test_flags_without_a_field_stay():
    said = in_fields("give --adapter-alpha, or --weights with --adapter, and --adapter-cache-mb 4.")
    wanted = "give `adapter_alpha`, or `model_strategy` with `adapter_filename`, and --adapter-cache-mb 4."
    assert said == wanted
