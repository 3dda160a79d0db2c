"""Models verify drafts: the logits and states of tokens one by one, with nothing fed twice."""

import pytest
import torch
from cpu_models import WAYS, maker

from bench.make_checkpoint import random_checkpoint, random_rwkv6, random_rwkv7a
from rwkv_batch.model.checkpoint import from_tensors
from rwkv_batch.model.torch_model import PackedBatch, TorchModel
from rwkv_batch.state.slots import DeviceStates

MADE = {"rwkv7": random_checkpoint, "rwkv6": random_rwkv6, "rwkv7a": random_rwkv7a}
IDS = torch.randint(1, 300, (60,), generator=torch.Generator().manual_seed(0))
# A prompt, a row of one token, and three rows with drafts, of which 2, 6 and no tokens are accepted.
ROWS = [
    (0, 5, 0, 0),
    (5, 1, 0, 0),
    (3, 5, 4, 2),
    (1, 7, 6, 6),
    (6, 3, 2, 0),
]  # slot, tokens, drafted, accepted


def begun(model: TorchModel, dtype: torch.dtype = torch.float32) -> DeviceStates:
    states = model.new_states(8, dtype)
    slots = [slot for slot, *_ in ROWS[1:]]
    model.forward(IDS[: 10 * len(slots)], [10] * len(slots), slots, states)
    return states


@pytest.mark.parametrize("family", MADE)
@pytest.mark.parametrize("way", WAYS)
def test_drafts_give_logits_and_states_of_tokens_one_by_one(family: str, way: str):
    model = maker(way)(from_tensors(family, MADE[family](2, 128, 300)))
    states, others = begun(model), begun(model)
    slots, lengths, drafted, accepted = (list(each) for each in zip(*ROWS, strict=True))
    pieces = list(IDS[40 - sum(lengths) :].split([*lengths, 20])[:-1])
    batch = PackedBatch(lengths, slots, drafted=drafted)
    logits, accept = model.verify(torch.cat(pieces), batch, states, range(len(ROWS)))
    accept(accepted)

    found = iter(logits.split(1))
    for (slot, length, draft, taken), piece in zip(ROWS, pieces, strict=True):
        known = length - draft
        want = model.forward(piece[:known], [known], [slot], others)
        assert torch.allclose(next(found), want, atol=1e-4)
        for place, token in enumerate(piece[known:]):
            if place == taken:
                state = others.read(slot)
            want = model.forward(token[None], [1], [slot], others)
            assert torch.allclose(next(found), want, atol=1e-4)
        if taken < draft:
            others.replace({slot: state})
    assert torch.allclose(states.wkv, others.wkv, atol=1e-5)
    assert torch.allclose(states.shift, others.shift, atol=1e-5)
    if way == "kernels" and family == "rwkv7":
        assert torch.equal(states.memory, others.memory), "bit for bit"


def test_states_in_fp16_are_rounded_behind_each_token_of_a_draft():
    model = maker("torch")(from_tensors("rwkv7", random_checkpoint(2, 128, 300)))
    states, others = begun(model, torch.float16), begun(model, torch.float16)
    logits, accept = model.verify(IDS[:5], PackedBatch([5], [3], drafted=[4]), states, [0])
    accept([4])
    want = torch.cat([model.forward(token[None], [1], [3], others) for token in IDS[:5]])
    assert torch.allclose(logits, want, atol=1e-5) and torch.equal(states.wkv, others.wkv)
