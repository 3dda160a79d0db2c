"""Start states and mixtures on a CUDA GPU, where steps are queued ahead and states may lag."""

from pathlib import Path

import pytest
import torch
from cuda_gpu import needs_gpu
from engine_driver import PROMPTS, WEIGHTS, Driver

from rwkv_batch.model.checkpoint import from_tensors
from rwkv_batch.model.rwkv7 import RWKV7
from rwkv_batch.state.log.store import Store
from rwkv_batch.wire.commands import PutStartState
from rwkv_batch.wire.protocol import MixturePart, Progress, Sampling

pytestmark = [*needs_gpu, pytest.mark.usefixtures("own_tuning")]
LONG = [(7 * i) % 390 + 1 for i in range(150)]
CLOSE = 0.05  # of log probabilities in fp16, between the token drawn and the likeliest


def numbers(seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {f"blocks.{i}.att.time_state": torch.randn(2, 64, 64, generator=draw) for i in range(2)}


def engine(folder: Path, merged: int | None = None, **options) -> Driver:
    weights = from_tensors("m", WEIGHTS.tensors | (numbers(merged) if merged else {}))
    driver = Driver(weights=weights, device="cuda", max_rows=8, **options)
    for seed in (1, 2):
        torch.save(numbers(seed), folder / f"{seed}.pth")
        driver.ask(PutStartState(f"put {seed}", f"s{seed}", str(folder / f"{seed}.pth"), "vk", b""))
    return driver


def test_texts_are_those_of_a_model_that_has_the_state_merged(tmp_path: Path) -> None:
    driver, tuned = engine(tmp_path), engine(tmp_path, 1)
    for prompt in (*PROMPTS, LONG):
        assert driver.say(prompt, start_state="s1") == tuned.say(prompt)
    assert tuned.say(LONG) != driver.say(LONG)


@pytest.mark.parametrize("options", [{"l1": 4}, {"l1": 0, "l2": 4}, {"l1": 0, "l2": 0}])
def test_a_conversation_begins_in_it_wherever_its_state_comes_from(tmp_path: Path, options: dict) -> None:
    expected = engine(tmp_path, 1, l1=4).conversation("a")
    driver = engine(tmp_path, store=Store(tmp_path / "sessions.db"), **options)
    assert driver.conversation("a", start_state="s1") == expected


def test_all_weight_on_one_state_is_that_state_alone(tmp_path: Path) -> None:
    driver = engine(tmp_path)
    mixture = [MixturePart("s1", 0.0), MixturePart("s2", 2.0)]
    assert driver.say(LONG, mixture=mixture) == driver.say(LONG, start_state="s2")


@pytest.mark.parametrize("weights", [[1.0, 1.0], [3.0, 1.0], [1.5, -0.5]])
def test_what_is_drawn_is_likely_under_the_geometric_mean(tmp_path: Path, weights: list[float]) -> None:
    driver = engine(tmp_path)
    mixture = [MixturePart(f"s{seed}", weight) for seed, weight in zip((1, 2), weights, strict=True)]
    fields = {"sampling": Sampling(temperature=0), "max_tokens": 20, "top_logprobs": 0}
    names = [driver.add(LONG, mixture=mixture, **fields), driver.add(PROMPTS[2]), driver.add(LONG, **fields)]
    for name in names:
        driver.said(name)
    rows = [row for e in driver.until(names[0], (Progress,)) if isinstance(e, Progress) for row in e.rows]
    found = [entry for row in rows for entry in row.logprobs]
    text = driver.engine.tokenizer.token_bytes
    token_of = {text(token): token for token in range(1, 400)}
    models = [RWKV7(from_tensors("m", WEIGHTS.tensors | numbers(seed))) for seed in (1, 2)]
    states, fed = [model.new_states(1) for model in models], LONG
    assert len(found) == 20
    for entry in found:
        logits = [
            model.forward(torch.tensor(fed), [len(fed)], [0], state)[0].double()
            for model, state in zip(models, states, strict=True)
        ]
        mixed = sum(weight / sum(weights) * one for weight, one in zip(weights, logits, strict=True))
        expected = mixed.log_softmax(0)
        token = token_of[entry.token]
        assert abs(float(expected[token]) - entry.logprob) < CLOSE
        assert float(expected.max() - expected[token]) < CLOSE
        fed = [token]
