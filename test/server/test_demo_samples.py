"""What users paste first, answered by the bundled model in the `rwkv` package.

The answers are exact, and certain enough to survive sampling.
"""

import pytest
import torch

from demo.training.samples import samples

SAMPLES = samples()


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: s.kind)
def test_greedy_answer(reference, sample):
    tokenizer, model = reference.tokenizer, reference.model
    answer = [*tokenizer.encode(sample.answer), 0]
    first, state = model.forward(tokenizer.encode(sample.prompt), None)
    logits = [first]
    if answer[:-1]:
        rest, _ = model.forward(answer[:-1], state, full_output=True)
        logits.extend(rest.view(len(answer) - 1, -1))
    chances = torch.stack(logits).softmax(-1)
    assert chances.argmax(-1).tolist() == answer
    assert float(chances[range(len(answer)), answer].min()) > 0.95


def test_the_samples_cover_every_kind_of_task():
    assert {s.kind for s in SAMPLES} == {
        "translation",
        "chat",
        "story",
        "memory",
        "fim",
        "tool",
        "continuation",
    }
    assert len(SAMPLES) >= 25
