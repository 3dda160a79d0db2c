"""Adapters of requests on a CUDA GPU in fp16, against weights merged by hand on the CPU in fp32."""

from pathlib import Path

import pytest
import torch
from adapter_files import FACTOR
from checkpoints import tiny
from cuda_gpu import needs_gpu, off
from engine_driver import PROMPTS, Driver
from plain_rwkv7 import plain_logits
from row_adapters import KINDS, SCALED, changes, merged_by_hand, write

from rwkv_batch.model.adapters.low_rank import low_rank
from rwkv_batch.model.adapters.parts import Scaling
from rwkv_batch.model.adapters.reader import read
from rwkv_batch.model.checkpoint import Checkpoint
from rwkv_batch.model.cuda.rwkv7 import RWKV7Cuda
from rwkv_batch.model.rwkv7 import RWKV7
from rwkv_batch.ops.low_rank import LowRankAdapter, readout_adapter
from rwkv_batch.wire.commands import LoadAdapter
from rwkv_batch.wire.protocol import Progress, Sampling

pytestmark = needs_gpu
TOLERANCE = 1e-2
CLOSE = 0.05  # of log probabilities in fp16, between the token drawn and the likeliest
WEIGHTS = tiny(vocab=400, width=256)
ONLY = {"targets": ("att.key", "ffn.value")}  # of an adapter that leaves the other matrices as they are


def packed(folder: Path, kind: str, seed: int, **options) -> LowRankAdapter:
    file = write(folder, WEIGHTS, kind, seed, **options)
    scaling = Scaling(FACTOR) if kind in SCALED else None
    return low_rank(read(file, WEIGHTS), WEIGHTS, scaling, 32, torch.float16, pinned=True)


@pytest.fixture
def model(tmp_path: Path) -> RWKV7Cuda:
    """With a LoRA, a DiSHA, a MiSS, and a LoRA of a few matrices in its slots 0 to 3."""
    model = RWKV7Cuda(WEIGHTS, "cuda")
    model.add_adapters(4, 32, 6000)
    assert model.adapters
    for slot, kind in enumerate(KINDS):
        model.adapters.load(slot, packed(tmp_path, kind, 1))
    model.adapters.load(3, packed(tmp_path, "lora", 2, **ONLY))
    return model


def references() -> list[Checkpoint]:
    """By slot; the last for rows without an adapter."""
    merged = [merged_by_hand(WEIGHTS, kind, 1) for kind in KINDS]
    return [*merged, merged_by_hand(WEIGHTS, "lora", 2, **ONLY), WEIGHTS]


@pytest.mark.parametrize("count", [1, 5, 24, 70])
def test_prompts_and_decode_steps_of_rows_with_different_adapters(model: RWKV7Cuda, count: int) -> None:
    draw = torch.Generator().manual_seed(count)
    adapters = [(row * 3) % 5 - 1 for row in range(count)]
    lengths = [1 + (row * 5) % 23 for row in range(count)]
    prompts = [torch.randint(1, 400, (length,), generator=draw) for length in lengths]
    steps = torch.randint(1, 400, (3, count), generator=draw)
    states, rows = model.new_states(count), range(count)
    found = [model.forward(torch.cat(prompts), lengths, rows, states, adapters=adapters)]
    found += [model.forward(step, [1] * count, rows, states, adapters=adapters) for step in steps]
    for slot, weights in enumerate(references()):
        of_slot = [row for row in rows if adapters[row] == (slot if slot < 4 else -1)]
        if not of_slot:
            continue
        reference = RWKV7(weights)
        own = reference.new_states(len(of_slot))
        places = range(len(of_slot))
        want = [
            reference.forward(
                torch.cat([prompts[row] for row in of_slot]), [lengths[row] for row in of_slot], places, own
            ),
            *(reference.forward(step[of_slot], [1] * len(of_slot), places, own) for step in steps),
        ]
        for logits, expected in zip(found, want, strict=True):
            assert off(logits[of_slot].cpu(), expected) < TOLERANCE, slot


def test_offsets_beside_an_adapter(model: RWKV7Cuda) -> None:
    draw = torch.Generator().manual_seed(5)
    offsets = torch.randn(WEIGHTS.layers, WEIGHTS.width, generator=draw) / 2
    assert model.adapters
    model.adapters.load(3, readout_adapter("", offsets, torch.float16, pinned=True))
    prompts = [list(range(3, 40)), [7], list(range(50, 90)), [9, 8, 7], [5]]
    adapters = [3, 3, 0, -1, 0]
    states, lengths = model.new_states(5), [len(prompt) for prompt in prompts]
    tokens = torch.tensor([token for prompt in prompts for token in prompt])
    found = [model.forward(tokens, lengths, range(5), states, adapters=adapters)]
    for step in range(4):
        found.append(model.forward(torch.full((5,), 10 + step), [1] * 5, range(5), states, adapters=adapters))
    for step, logits in enumerate(found):
        fed = list(range(10, 10 + step))
        for of_slot, scaled in (([0, 1], offsets), ([3], None)):
            want = [
                plain_logits(dict(WEIGHTS.tensors), prompts[row] + fed, offsets=scaled) for row in of_slot
            ]
            assert off(logits[of_slot].cpu(), torch.stack(want)) < TOLERANCE, (of_slot, step)
    others = model.new_states(5)
    beside = model.forward(tokens, lengths, range(5), others, adapters=[-1, -1, 0, -1, 0])
    assert off(found[0][[2, 4]], beside[[2, 4]]) < 1e-3


def test_a_long_prompt_that_no_graph_takes(model: RWKV7Cuda) -> None:
    prompt = torch.arange(6000) % 399 + 1
    logits = model.forward(prompt, [len(prompt)], [0], model.new_states(1), adapters=[0])
    reference = RWKV7(references()[0])
    assert (
        off(logits.cpu(), reference.forward(prompt, [len(prompt)], [0], reference.new_states(1))) < TOLERANCE
    )


def test_another_adapter_in_the_slot(model: RWKV7Cuda, tmp_path: Path) -> None:
    states, step = model.new_states(2), torch.tensor([5, 6])
    model.forward(step, [1, 1], [0, 1], states, adapters=[0, -1])
    assert model.adapters
    model.adapters.load(0, packed(tmp_path, "lora", 7))
    states.clear([0, 1])
    logits = model.forward(step, [1, 1], [0, 1], states, adapters=[0, -1])
    reference = RWKV7(merged_by_hand(WEIGHTS, "lora", 7))
    assert off(logits[:1].cpu(), reference.forward(step[:1], [1], [0], reference.new_states(1))) < TOLERANCE


def test_requests_with_more_adapters_than_slots(tmp_path: Path) -> None:
    driver = Driver(weights=WEIGHTS, device="cuda", max_rows=8, max_adapters=2, max_adapter_rank=32)
    for seed in range(4):
        file = write(tmp_path, WEIGHTS, "lora", seed)
        driver.ask(LoadAdapter(f"load {seed}", str(seed), str(file), scaling=FACTOR))
    fields = {"sampling": Sampling(temperature=0), "max_tokens": 20, "top_logprobs": 0}
    cases = [(prompt, name) for prompt in PROMPTS for name in ("", "0", "1", "2", "3")]
    requests = [driver.add(prompt, adapter=name, **fields) for prompt, name in cases]
    text = driver.engine.tokenizer.token_bytes
    token_of = {text(token): token for token in range(400)}
    models = {"": RWKV7(WEIGHTS)} | {
        str(seed): RWKV7(merged_by_hand(WEIGHTS, "lora", seed)) for seed in range(4)
    }
    for (prompt, name), request in zip(cases, requests, strict=True):
        events = driver.until(request, (Progress,))
        entries = [
            e for event in events if isinstance(event, Progress) for row in event.rows for e in row.logprobs
        ]
        assert len(entries) == 20
        states, fed = models[name].new_states(1), prompt
        for entry in entries:
            expected = models[name].forward(torch.tensor(fed), [len(fed)], [0], states)[0].log_softmax(0)
            token = token_of[entry.token]
            assert abs(float(expected[token]) - entry.logprob) < CLOSE
            assert float(expected.max() - expected[token]) < CLOSE
            fed = [token]
    driver.engine.close()


def test_slots_are_counted_before_they_are_made() -> None:
    """No slots cost nothing."""
    model = RWKV7Cuda(WEIGHTS, "cuda")
    plain, held = model.step_bytes(8, 64), changes(WEIGHTS, "lora", 1)
    assert model.step_bytes(8, 64, 0, 64) == plain
    assert model.step_bytes(8, 64, 4, 64) - plain > 4 * 16 * sum(t.nbytes // 4 for t in held.values())
