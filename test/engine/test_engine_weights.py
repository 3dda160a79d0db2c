"""Weight formats in the engine: the bundled model's answers, and models loaded while others serve."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from changing_driver import ChangingDriver
from checkpoints import write_pth
from models_driver import WEIGHTS, alone

from demo.training.samples import samples
from rwkv_batch.config import EngineConfig
from rwkv_batch.engine.engine import Engine
from rwkv_batch.model.checkpoint import Checkpoint
from rwkv_batch.model.quantization.packed_file import write
from rwkv_batch.model.quantization.quantize import quantize
from rwkv_batch.runner import loading
from rwkv_batch.state.staged import StagedStates
from rwkv_batch.text.tokenizer import Tokenizer
from rwkv_batch.wire.commands import LoadModel
from rwkv_batch.wire.protocol import CommandReply, Rejected, Sampling, SessionTurn

pytestmark = pytest.mark.thorough

LONG = 60


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_the_bundled_model_answers_as_before(name):
    """Translations, chats, stories, tool calls: see demo/samples.json."""
    engine = Engine(device="cpu", weights=name, prefix_cache_mb=0)
    known = samples()
    prompts = [engine.tokenizer.encode(sample.prompt) for sample in known]
    rows = engine.generate(prompts, max_tokens=256, sampling=Sampling(temperature=0.0))
    assert [row.text for row in rows] == [sample.answer for sample in known]
    assert engine.info.weights == name
    assert engine.info.weight_bytes < 0.6 * 4 * engine.info.parameters


def test_matrices_are_packed_on_the_cpu_where_a_gpu_has_no_room(monkeypatch):
    places = []

    def pack(*args: object, device: torch.device | str = "cpu") -> Checkpoint:
        places.append(str(device))
        if device != "cpu":
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return quantize(*args)

    monkeypatch.setattr(loading, "quantize", pack)
    config = EngineConfig(weights="int8", device="cpu")
    found = loading.load_weights(WEIGHTS["two"], config, None, packing=torch.device("cuda:0"))
    assert places == ["cuda:0", "cpu"] and found.weights == "int8" and found.packed


@pytest.fixture
def files(tmp_path) -> dict[str, Path]:
    plain = write_pth(tmp_path / "plain.pth", dict(WEIGHTS["two"].tensors))
    packed = tmp_path / "packed.safetensors"
    write(quantize(WEIGHTS["two"], "int4"), WEIGHTS["two"].fingerprint, packed)
    return {"plain": plain, "packed": packed}


@pytest.fixture
def driver(tmp_path) -> Iterator[ChangingDriver]:
    made = ChangingDriver("one", folder=tmp_path, weights="fp8")
    yield made
    made.settle()
    made.models.close()


@pytest.mark.parametrize(
    ("file", "asked", "given"),
    [("plain", "int8", "int8"), ("plain", "", "fp8"), ("packed", "", "int4"), ("packed", "int4", "int4")],
)
def test_a_loaded_model_is_in_the_format_asked_for_its_own_or_the_servers(driver, files, file, asked, given):
    reply = driver.change(LoadModel("l", str(files[file]), "two", weights=asked))
    assert isinstance(reply, CommandReply)
    assert [info.weights for info in reply.models] == ["fp8", given]
    text = driver.add("two", max_tokens=LONG)
    driver.finish(text)
    assert driver.text(text) == alone([5, 6, 7], quantize(WEIGHTS["two"], given), LONG)


def test_another_format_than_that_of_the_file_changes_nothing(driver, files):
    reply = driver.change(LoadModel("l", str(files["packed"]), "two", weights="int8"))
    assert isinstance(reply, Rejected) and "is in int4 already" in reply.message
    assert driver.served() == ["one"]


def test_a_session_is_not_continued_in_another_format(driver, files):
    first = write_pth(files["plain"].with_name("one.pth"), dict(WEIGHTS["one"].tensors))
    driver.finish(driver.add("one", turn=SessionTurn(target="s")))
    assert isinstance(driver.change(LoadModel("l", str(first), "one", weights="int8")), CommandReply)
    driver.settle()
    turn = driver.add("one", turn=SessionTurn(source="s", target="s"))
    driver.finish(turn)
    (refusal,) = driver.events[turn]  # and nothing before it, so that no stream has begun
    assert isinstance(refusal, Rejected) and refusal.reason == "conflict"
    assert "made by another model" in refusal.message


def test_a_prompt_whose_states_pass_the_numbers_of_fp16_is_answered_as_with_fp32():
    """12,000 equal tokens, which take numbers of the states to 77,000; fp16 ends at 65,504."""
    prompt = [95] * 12000 + Tokenizer().encode("\n\nUser: What is the capital of France?\n\nAssistant:")
    answers, largest = [], []
    for wkv in ("fp32", "fp16"):
        engine = Engine(device="cpu", wkv=wkv, max_rows=1)
        (row,) = engine.generate([prompt], max_tokens=12, stop_ids=[0], sampling=Sampling(temperature=0))
        answers.append(row.text)
        states = engine.runner.states
        parts = states.parts if isinstance(states, StagedStates) else [states]
        largest.append(max(float(part.wkv.abs().max()) for part in parts))
        engine.close()
    assert answers[0] and answers[0] == answers[1]
    assert largest[1] <= 65504 < largest[0]
