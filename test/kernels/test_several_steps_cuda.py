"""Turns whose steps are launched together on a CUDA GPU say the same and leave the same states."""

import pytest
from ahead import without_time
from cuda_gpu import needs_gpu
from engine_driver import Driver

from rwkv_batch.bundled import unpack
from rwkv_batch.model.checkpoint import from_tensors
from rwkv_batch.runner import cuda_runner
from rwkv_batch.runner.protocol import Batch, Draws
from rwkv_batch.wire.protocol import Sampling

pytestmark = [*needs_gpu, pytest.mark.usefixtures("own_tuning")]
PROMPTS = ["one two three", "English: Good morning!\n\nChinese:", "Seven {}.", "User: {}?\n\nAssistant:"]


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        (1, {"sampling": Sampling(temperature=0)}),
        (1, {"stop_ids": [0, 24281]}),
        (1, {"stop_ids": [0], "stop_strings": ["e ", "。", "\n"]}),
        (3, {"max_tokens": 23}),  # all begin and end together, so that steps have the same rows
    ],
    ids=str,
)
def test_a_conversation_is_the_same(rows: int, options: dict, monkeypatch: pytest.MonkeyPatch):
    without_time(monkeypatch)
    launched: list[int] = []

    def conversations(most: int) -> list[tuple[str, int]]:
        monkeypatch.setattr(cuda_runner, "MOST_STEPS", most)
        weights = from_tensors("demo", unpack.tensors())
        driver = Driver(weights=weights, device="cuda", max_rows=4, l1=4)
        launched.clear()
        real = driver.engine.runner.run

        def run(batch: Batch) -> Draws:
            launched.append(batch.steps)
            return real(batch)

        monkeypatch.setattr(driver.engine.runner, "run", run)
        said = []
        for prompt in PROMPTS:
            fields = {"max_tokens": 40} | options
            names = [driver.add(prompt.format(row), f"s{row}", **fields) for row in range(rows)]
            said += [driver.said(name) for name in names]
        driver.engine.close()
        return said

    expected = conversations(1)
    assert set(launched) == {1}
    assert conversations(4) == expected
    assert max(launched) == 4
