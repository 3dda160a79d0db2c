"""What users paste first, answered by the bundled model in the `rwkv` package.

The answers are exact, and certain enough to survive sampling.
"""

import pytest
import torch
from pyrwkv_tokenizer import RWKVTokenizer
from rwkv_package import RWKV

from demo.samples import samples
from demo.unpack import tensors

SAMPLES = samples()


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    path = tmp_path_factory.mktemp("demo") / "model"
    torch.save(tensors(), f"{path}.pth")
    return RWKV(str(path), "cpu fp32")


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: s.kind)
def test_greedy_answer(reference, sample):
    tokenizer = RWKVTokenizer()
    answer = [*tokenizer.encode(sample.answer), 0]
    first, state = reference.forward(tokenizer.encode(sample.prompt), None)
    logits = [first]
    if answer[:-1]:
        rest, _ = reference.forward(answer[:-1], state, full_output=True)
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
