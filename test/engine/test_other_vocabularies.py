"""Models whose ids are not those of the World vocabulary: ids work, and texts are refused."""

import logging
from itertools import chain
from pathlib import Path

import pytest
import torch
from checkpoints import refusal, tiny, write_pth
from engine_driver import SAMPLED, Driver

from bench.make_checkpoint import random_checkpoint
from rwkv_batch.config import EngineConfig
from rwkv_batch.engine import Engine
from rwkv_batch.evaluate.asks import EvaluationError
from rwkv_batch.evaluate.local import LocalModel
from rwkv_batch.model.rwkv7 import RWKV7
from rwkv_batch.quantize import main as quantize
from rwkv_batch.runner.loading import load_weights
from rwkv_batch.text import tokenizer
from rwkv_batch.text.tokenizer import VOCABULARY, Tokenizer, tokenizer_of
from rwkv_batch.wire.commands import Detokenize, SessionHistory, Tokenize
from rwkv_batch.wire.protocol import Accepted, CommandReply, Grammar, Progress, Rejected, Sampling

ROWS = 256
WEIGHTS = tiny(vocab=ROWS)
PROMPT = [34, 105, 110]
GREEDY = Sampling(temperature=0)


@pytest.fixture(autouse=True)
def real_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "FEWEST_ROWS", VOCABULARY)


@pytest.fixture
def driver():
    made = Driver(weights=WEIGHTS)
    yield made
    made.engine.close()


@pytest.mark.parametrize("rows", [VOCABULARY, 65_532, 65_536, 65_600, 66_560])
def test_worlds_ids_may_be_padded(rows: int) -> None:
    assert tokenizer_of(rows).encode("The") == Tokenizer().encode("The")


@pytest.mark.parametrize("rows", [12, 256, 20_095, 50_304, 65_529])
def test_with_fewer_rows_there_are_no_texts(rows: int) -> None:
    made = tokenizer_of(rows)
    assert not made.has_texts and made.token_bytes(5) == b"" and made.decode([5, 6]) == ""
    with pytest.raises(ValueError, match=f"{rows:,} tokens"):
        made.encode("The")


@pytest.mark.parametrize("rows", [66_561, 128_256, 151_936])
def test_a_model_of_which_some_ids_could_not_be_drawn_is_refused(rows: int) -> None:
    weights = tiny(width=64, vocab=rows)
    assert f"{rows:,} tokens" in refusal(lambda: load_weights(weights, EngineConfig(), None))


def drawn(count: int) -> list[int]:
    """What greedy decoding draws after the prompt."""
    model, ids = RWKV7(WEIGHTS), list(PROMPT)
    for _ in range(count):
        states = model.new_states(1)
        logits = model.forward(torch.tensor(ids), [len(ids)], [0], states)
        ids.append(int(logits[-1].argmax()))
    return ids[len(PROMPT) :]


def test_ids_give_ids_and_no_text(driver: Driver) -> None:
    fields = {"sampling": GREEDY, "max_tokens": 8, "return_ids": True, "top_logprobs": 2}
    events = driver.until(driver.add(PROMPT, **fields), (Progress,))
    rows = [row for event in events if isinstance(event, Progress) for row in event.rows]
    ids = [token for row in rows for token in row.ids]
    assert ids == drawn(8) and "".join(row.text for row in rows) == ""
    names = [entry.token.decode() for row in rows for entry in row.logprobs]
    assert names == [f"token_id:{token}" for token in ids]
    assert not driver.engine.info.texts


def test_ids_are_sent_as_they_are_drawn(driver: Driver) -> None:
    fields = {"sampling": GREEDY, "max_tokens": 8, "return_ids": True, "flush_tokens": 2}
    events = driver.until(driver.add(PROMPT, **fields), (Progress,))
    pieces = [row.ids for event in events if isinstance(event, Progress) for row in event.rows]
    assert [len(piece) for piece in pieces] == [2, 2, 2, 2] and [*chain(*pieces)] == drawn(8)


def test_a_session_goes_on_with_ids(driver: Driver) -> None:
    fields = {"sampling": GREEDY, "max_tokens": 4, "return_ids": True}
    driver.say(PROMPT, "a", **fields)
    driver.say([7], "a", **fields)
    turns = driver.ask(SessionHistory("history", "a")).turns
    assert [turn.prompt_tokens for turn in turns] == [PROMPT, [7]]
    assert [turn.prompt + turn.completion for turn in turns] == ["", ""]


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "The"},
        {"prompt": ""},
        {"prompt": "The", "session": "a"},
        {"prompt": PROMPT, "stop_strings": ["\n"]},
        {"prompt": PROMPT, "grammar": Grammar("regex", "a+")},
        {"prompt": "The", "sampling": SAMPLED, "max_tokens": 0},
    ],
)
def test_texts_are_refused_in_a_sentence(driver: Driver, fields: dict) -> None:
    (refused,) = driver.until(driver.add(**fields), (Rejected, Progress))
    assert isinstance(refused, Rejected) and refused.reason == "invalid"
    assert "256 tokens" in refused.message and "World" in refused.message


@pytest.mark.parametrize("command", [Tokenize("it", ["The"]), Detokenize("it", [34])])
def test_nothing_is_said_of_its_vocabulary(driver: Driver, command: Tokenize | Detokenize) -> None:
    driver.engine.command((b"test", "it"), command)
    (refused,) = driver.until("it", (Rejected, CommandReply))
    assert isinstance(refused, Rejected) and "World" in refused.message


def test_the_offline_engine_refuses_texts() -> None:
    engine = Engine(WEIGHTS, device="cpu", max_rows=1)
    for options in ({"prompts": ["The"]}, {"prompts": [PROMPT], "grammar": Grammar("regex", "a+")}):
        with pytest.raises(ValueError, match="World"):
            engine.generate(**options)
    assert engine.generate([PROMPT], max_tokens=4, stop_ids=[])[0].tokens == 4
    with pytest.raises(EvaluationError, match="World"):
        LocalModel(engine)
    engine.close()


def test_it_is_said_when_a_file_is_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = write_pth(tmp_path / "bytes.pth", random_checkpoint(1, 64, ROWS))
    said: list[str] = []
    with caplog.at_level(logging.WARNING):
        load_weights(file, EngineConfig(), None, assumed=said)
    assert "only token ids work" in said[0] and said[0] in caplog.text


def test_it_is_not_calibrated_by_a_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_pth(tmp_path / "bytes.pth", random_checkpoint(1, 64, ROWS))
    (tmp_path / "text.txt").write_text("The capital of France is Paris.", encoding="utf-8")
    run = [str(file), str(tmp_path / "out.safetensors"), "--weights", "int4"]
    assert quantize([*run, "--calibrate", str(tmp_path / "text.txt")]) == 2
    assert "World" in capsys.readouterr().err
    assert quantize(run) == 0


def test_a_model_with_worlds_ids_is_as_before() -> None:
    driver = Driver(weights=tiny(width=64, vocab=65_536))
    name = driver.add("The", max_tokens=2)
    assert isinstance(driver.until(name, (Progress,))[0], Accepted)
    assert driver.engine.info.texts
    driver.engine.close()
