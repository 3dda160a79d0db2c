"""RWKV-6 and RWKV-7a on a CUDA GPU in fp16 against the reference in fp32, by prefill, graphs and engine."""

import pytest
import torch
from cuda_gpu import ROWS, needs_gpu, off, unflushed
from engine_driver import PROMPTS, Driver

from bench.make_checkpoint import random_rwkv6, random_rwkv7a
from rwkv_batch.engine.engine import Engine
from rwkv_batch.model.checkpoint import from_tensors
from rwkv_batch.model.rwkv6 import RWKV6
from rwkv_batch.model.rwkv7 import RWKV7
from rwkv_batch.runner.cuda_runner import CUDA_MODELS, CudaRunner
from rwkv_batch.runner.torch_runner import MODELS
from rwkv_batch.wire.protocol import Progress, Sampling

pytestmark = needs_gpu
LOGITS, STATES = 1e-2, 2e-2
MAKERS = {"rwkv6": random_rwkv6, "rwkv7a": random_rwkv7a}
REFERENCES = {"rwkv6": RWKV6, "rwkv7a": RWKV7}
SHAPES = [(3, 192, 500), (1, 64, 300), (4, 1024, 2000)]
CLOSE = 0.05  # of log probabilities in fp16, between the token drawn and the likeliest


def made(family, layers=3, width=192, vocab=500, **more):
    tensors = MAKERS[family](layers, width, vocab)
    return from_tensors(family, tensors | more)


def ids(count, vocab=500):
    return torch.randint(1, vocab, (count,))


@pytest.fixture(scope="module", params=MAKERS)
def pair(request):
    """A model on the GPU, and the reference."""
    checkpoint = made(request.param)
    return CUDA_MODELS[request.param](checkpoint, "cuda"), MODELS[request.param](checkpoint, "cuda")


@pytest.mark.parametrize("family", MAKERS)
@pytest.mark.parametrize(("layers", "width", "vocab"), SHAPES)
@pytest.mark.parametrize("wkv", [torch.float16, torch.float32])
def test_logits_and_states_are_those_of_the_reference(family, layers, width, vocab, wkv):
    """Through prefills of every length, decode steps, and both in one step."""
    checkpoint = made(family, layers, width, vocab)
    model, truth = CUDA_MODELS[family](checkpoint, "cuda"), REFERENCES[family](checkpoint, "cuda")
    states, wanted = model.new_states(9, wkv), truth.new_states(9)
    for lengths, slots in (
        ([17, 1, 15, 16], [2, 0, 3, 8]),
        ([1, 1, 1], [3, 2, 0]),
        ([63, 1], [5, 2]),
        ([300, 2, 1], [8, 0, 3]),
        ([1] * 5, [5, 8, 2, 0, 3]),
        ([1], [2]),
    ):
        tokens = ids(sum(lengths), vocab)
        logits = model.forward(tokens, lengths, slots, states)
        want = truth.forward(tokens, lengths, slots, wanted)
        assert logits.shape == want.shape and off(logits, want) < LOGITS
        assert off(states.wkv, wanted.wkv) < STATES and off(states.shift, wanted.shift) < STATES
    assert not states.memory[[1, 4, 6, 7]].any()


@pytest.mark.parametrize("rows", ROWS)
def test_decode_of_any_number_of_rows(pair, rows):
    model, truth = pair
    wanted = truth.new_states(rows + 5)
    wanted.wkv.normal_(std=0.3)
    wanted.shift.normal_()
    states = model.new_states(rows + 5, torch.float16)
    states.wkv.copy_(wanted.wkv)
    states.shift.copy_(wanted.shift)
    slots = torch.randperm(rows + 5)[:rows].tolist()
    for _ in range(3):
        tokens = ids(rows)
        logits = unflushed(model, tokens, [1] * rows, slots, states)
        assert off(logits, truth.forward(tokens, [1] * rows, slots, wanted)) < LOGITS
    states.flush(slots)
    assert off(states.wkv, wanted.wkv) < STATES


@pytest.mark.parametrize("lengths", [[2, 40], [3000, 3000]], ids=["graph", "launches"])
def test_a_prompt_goes_on_from_steps(pair, lengths):
    model, truth = pair
    states, wanted = model.new_states(3, torch.float16), truth.new_states(3)
    for rows, counts in (([0, 2], [5, 9]), ([0, 2], [1, 1]), ([2], [1]), ([0, 2], lengths), ([2], [1])):
        tokens = ids(sum(counts))
        logits = unflushed(model, tokens, counts, rows, states)
        assert off(logits, truth.forward(tokens, counts, rows, wanted)) < LOGITS
    states.flush([0, 2])
    assert off(states.wkv, wanted.wkv) < STATES


def test_captured_ahead_and_captured_when_needed_are_the_same(pair):
    model, _ = pair
    tokens, ahead, late = ids(6), model.new_states(6, torch.float16), model.new_states(6, torch.float16)
    model.capture(ahead, progress=False)
    assert not ahead.memory.any()  # capturing leaves no trace
    want = [model.forward(tokens, [1] * 6, range(6), ahead) for _ in range(3)]
    assert all(torch.equal(model.forward(tokens, [1] * 6, range(6), late), logits) for logits in want)


def test_a_merged_start_state_of_rwkv6():
    start = {f"blocks.{i}.att.time_state": torch.randn(3, 64, 64) for i in range(3)}
    checkpoint = made("rwkv6", **start)
    model, truth = CUDA_MODELS["rwkv6"](checkpoint, "cuda"), RWKV6(checkpoint, "cuda")
    tokens, states, wanted = ids(20), model.new_states(2), truth.new_states(2)
    want = truth.forward(tokens, [20], [1], wanted)
    for _ in range(2):
        assert off(model.forward(tokens, [20], [1], states), want) < LOGITS
        states.clear([1])


@pytest.mark.parametrize("family", MAKERS)
def test_a_text_is_likely_under_the_reference_and_the_same_beside_others(family):
    """Through the engine, whose steps on a GPU are queued before the draws of the step before are known."""
    checkpoint = made(family, 2, 128, 400)
    driver = Driver(weights=checkpoint, device="cuda", max_rows=8)
    assert isinstance(driver.engine.runner, CudaRunner)
    fields = {"sampling": Sampling(temperature=0), "max_tokens": 20, "top_logprobs": 0}
    prompts = [*PROMPTS, [(7 * i) % 390 + 1 for i in range(150)]]
    names = [driver.add(prompt, **fields) for prompt in prompts]
    said = [driver.said(name) for name in names]
    token_of = {driver.engine.tokenizer.token_bytes(token): token for token in range(1, 400)}
    truth = MODELS[family](checkpoint)
    for prompt, name in zip(prompts, names, strict=True):
        events = driver.until(name, (Progress,))
        rows = [row for event in events if isinstance(event, Progress) for row in event.rows]
        states, fed = truth.new_states(1), prompt
        for entry in [entry for row in rows for entry in row.logprobs]:
            expected = truth.forward(torch.tensor(fed), [len(fed)], [0], states)[0].log_softmax(0)
            fed = [token_of[entry.token]]
            assert abs(float(expected[fed[0]]) - entry.logprob) < CLOSE
            assert float(expected.max() - expected[fed[0]]) < CLOSE
    driver.engine.close()
    alone = Driver(weights=checkpoint, device="cuda", max_rows=1)
    assert alone.say(PROMPTS[0], **fields) == said[0]
    alone.engine.close()


@pytest.mark.parametrize("family", MAKERS)
def test_a_conversation_goes_on_from_a_stored_state(family):
    checkpoint = made(family, 2, 128, 400)
    stored = Driver(weights=checkpoint, device="cuda", max_rows=4, l1=0, l2=4).conversation("a")
    kept = Driver(weights=checkpoint, device="cuda", max_rows=4, l1=4).conversation("a")
    assert stored == kept and all(text for text, _ in stored)


def test_torch_operations_may_still_be_asked_for():
    engine = Engine(made("rwkv6", 2, 128, 65536), device="cuda", backend="torch", max_rows=4)
    assert not isinstance(engine.runner, CudaRunner)
    assert engine.generate(["hello"], max_tokens=4)
    engine.close()
