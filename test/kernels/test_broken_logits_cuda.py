"""Logits that are not finite end a row on a GPU, no matter which kernels run its steps."""

import math

import pytest
import torch
from checkpoints import tiny
from cuda_gpu import needs_gpu
from engine_driver import Driver

from bench.make_checkpoint import random_rwkv6, random_rwkv7a
from rwkv_batch.engine.landing import NOT_FINITE
from rwkv_batch.model.checkpoint import from_tensors
from rwkv_batch.model.quantization.quantize import quantize
from rwkv_batch.wire.protocol import Failed, Grammar, Progress, Rejected, Sampling

pytestmark = [*needs_gpu, pytest.mark.usefixtures("own_tuning")]
POISON, VOCAB = 66, 512
GREEDY = Sampling(temperature=0)
DRAWS_IT = Sampling(temperature=0, logit_bias={POISON: 1e4})
MODELS = {
    "fp16": {},
    "states in fp32": {"wkv": "fp32"},
    "int8": {},
    "int4": {},
    "torch": {"backend": "torch"},
    "rwkv6": {},
    "rwkv7a": {},
}


@pytest.fixture(scope="module", params=MODELS)
def driver(request: pytest.FixtureRequest, own_tuning: None) -> Driver:
    """A model in which one token makes logits NaN."""
    made = {"rwkv6": random_rwkv6, "rwkv7a": random_rwkv7a}.get(request.param)
    weights = from_tensors("made", made(3, 256, VOCAB)) if made else tiny(3, 256, VOCAB)
    if request.param in ("int8", "int4"):
        weights = quantize(weights, request.param, False)
    driver = Driver(weights=weights, device="cuda", max_rows=24, **MODELS[request.param])
    model = driver.engine.runner.model
    table = model.embedding.table if hasattr(model, "embedding") else model.weights.embedding
    with torch.inference_mode():
        table[POISON] = math.nan
    return driver


def assert_failed(driver: Driver, name: str) -> None:
    (*_, last) = driver.until(name, (Failed, Rejected, Progress))
    assert isinstance(last, Progress)
    (ended,) = last.rows
    assert (ended.finish_reason, ended.error) == ("error", NOT_FINITE)


@pytest.mark.parametrize("beside", [0, 1, 20])
@pytest.mark.parametrize(
    "fields",
    [
        {"sampling": GREEDY},
        {"sampling": Sampling(seed=1)},
        {"sampling": Sampling(top_p=0.5, presence_penalty=1.0)},
        {"sampling": Sampling(min_p=0.1, repetition_penalty=1.2)},
        {"sampling": GREEDY, "top_logprobs": 2},
        {"sampling": GREEDY, "prompt_logprobs": 1},
        {"sampling": GREEDY, "grammar": Grammar("regex", "[A-Z]{2}")},
    ],
)
def test_a_prompt_that_breaks_them_is_an_error_and_other_rows_go_on(driver: Driver, fields, beside) -> None:
    others = [driver.add([5, 6], max_tokens=40, sampling=GREEDY) for _ in range(beside)]
    assert_failed(driver, driver.add([7, POISON, 8], max_tokens=9, **fields))
    assert len({driver.said(name) for name in others}) <= 1
    assert driver.said(driver.add([5, 6], max_tokens=9, sampling=GREEDY))[1] == 9


@pytest.mark.parametrize("beside", [0, 1, 20])
def test_a_token_that_breaks_them_is_the_last_that_is_drawn(driver: Driver, beside: int) -> None:
    """Several steps may be launched together, those of one row by one launch."""
    assert driver.said(driver.add([5], max_tokens=60, sampling=GREEDY))[1] == 60
    others = [driver.add([5, 6], max_tokens=40, sampling=GREEDY) for _ in range(beside)]
    name = driver.add([5], sampling=DRAWS_IT, max_tokens=40, flush_tokens=1)
    assert_failed(driver, name)
    assert len(driver.text(name).encode()) <= 1
    assert all(driver.said(other)[1] == 40 for other in others)


def test_a_state_that_is_not_finite_shows_at_the_next_token(driver: Driver) -> None:
    """Of one head, and of all of them."""
    model_states = driver.engine.runner.states
    for broken in (model_states.wkv[:, 1, 0], model_states.wkv):
        name = driver.add([5], max_tokens=200, sampling=GREEDY, flush_tokens=1)
        while not driver.text(name):
            driver.step()
        with torch.inference_mode():
            broken.fill_(math.nan)
        assert_failed(driver, name)
        assert driver.said(driver.add([5], max_tokens=9, sampling=GREEDY))[1] == 9
