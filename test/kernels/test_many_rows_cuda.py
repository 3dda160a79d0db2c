"""Thousands of rows on a CUDA GPU, and graphs that come behind the first steps."""

import pytest
import torch
from checkpoints import tiny
from cuda_gpu import needs_gpu, off, unflushed

from rwkv_batch.engine.engine import Engine
from rwkv_batch.model.cuda.rwkv7 import RWKV7Cuda
from rwkv_batch.model.rwkv7 import RWKV7
from rwkv_batch.wire.protocol import Sampling

pytestmark = [*needs_gpu, pytest.mark.many_launches]
WEIGHTS = tiny(layers=3, width=192, vocab=500, seed=1)


@pytest.mark.parametrize("rows", [1025, 1300, 4000])
@pytest.mark.parametrize("wkv", [torch.float16, torch.float32])
def test_thousands_of_rows_are_those_of_the_reference(rows: int, wkv: torch.dtype) -> None:
    model, truth = RWKV7Cuda(WEIGHTS, "cuda"), RWKV7(WEIGHTS, "cuda")
    wanted, states = truth.new_states(rows + 3), model.new_states(rows + 3, wkv)
    wanted.wkv.normal_(std=0.3)
    wanted.shift.normal_()
    states.shift.copy_(wanted.shift)
    states.wkv.copy_(wanted.wkv)
    slots = torch.randperm(rows + 3)[:rows].tolist()
    for lengths in ([1] * rows, [1] * rows, [1] * (rows - 1) + [40], [1] * rows):
        tokens = torch.randint(1, 500, (sum(lengths),))
        logits = unflushed(model, tokens, lengths, slots, states)
        assert off(logits, truth.forward(tokens, lengths, slots, wanted)) < 1e-2
    states.flush(slots)
    assert off(states.wkv, wanted.wkv) < 2e-2


@pytest.mark.parametrize("method", ["many", "beside"])
def test_hundreds_of_rows_by_each_method_of_a_time_mix(method: str) -> None:
    """With the inner low-rank sides in a launch of their own, and in that of r, k and v."""
    model, truth, rows = RWKV7Cuda(WEIGHTS, "cuda"), RWKV7(WEIGHTS, "cuda"), 300
    if method not in model.gemms.candidates("in", rows):
        pytest.skip("this GPU has no kernel for it")
    model.autotuner.chosen[f"in {rows}"] = method
    states, wanted = model.new_states(rows), truth.new_states(rows)
    for _ in range(4):
        tokens = torch.randint(1, 500, (rows,))
        found = unflushed(model, tokens, [1] * rows, range(rows), states)
        assert off(found, truth.forward(tokens, [1] * rows, range(rows), wanted)) < 1e-2


def test_thousands_of_rows_draw_what_one_draws_by_itself() -> None:
    prompts = [[20 + (i * j) % 400 for j in range(1, 30)] for i in range(2100)]
    asked = {"max_tokens": 6, "stop_ids": [], "sampling": Sampling(temperature=0.0)}
    options = {"device": "cuda", "l1": 0, "prefix_cache_mb": 0, "batch_invariant": True}
    together = Engine(WEIGHTS, max_rows=2100, **options).generate(prompts, **asked)
    few, some = Engine(WEIGHTS, max_rows=4, **options), [0, 1, 1023, 1024, 1025, 2099]
    assert [together[i].text for i in some] == [few.generate([prompts[i]], **asked)[0].text for i in some]


class TestGraphsThatComeLater:
    def test_steps_give_the_same_bits_before_and_after(self) -> None:
        model = RWKV7Cuda(WEIGHTS, "cuda")
        states = model.new_states(40, torch.float16)
        model.capture(states, progress=False, late=True)
        shapes = [[1], [1] * 3, [1] * 40, [5, 1, 9], [100, 30]]
        tokens = [torch.randint(1, 500, (sum(lengths),)) for lengths in shapes]

        def run() -> list[torch.Tensor]:
            states.clear(range(40))
            return [
                model.forward(ids, lengths, range(len(lengths)), states)
                for ids, lengths in zip(tokens, shapes, strict=True)
            ]

        before, held, pieces = run(), states.memory.clone(), 0
        while model.improve(idle=False):
            pieces += 1
        assert pieces == 8 + 13  # of decode steps, and of prefills of up to 512 tokens
        assert torch.equal(states.memory, held)  # captures touch no state
        assert all(torch.equal(a, b) for a, b in zip(before, run(), strict=True))

    @pytest.mark.usefixtures("own_tuning")
    def test_captures_between_steps_change_no_text(self) -> None:
        """Each step is followed by a piece, while rows are in flight."""
        prompts = [[20 + (i * j) % 400 for j in range(1, 40)] for i in range(24)]
        asked = {"max_tokens": 40, "stop_ids": [], "sampling": Sampling(temperature=0.0)}
        options = {"device": "cuda", "max_rows": 16, "l1": 0, "prefix_cache_mb": 0}
        want = [row.text for row in Engine(WEIGHTS, **options).generate(prompts, **asked)]
        late = Engine(WEIGHTS, **options, capture_late=True)
        step, pieces = late.step, []

        def step_and_improve():
            events = step()
            pieces.append(late.runner.improve(False))
            return events

        late.step = step_and_improve
        assert [row.text for row in late.generate(prompts, **asked)] == want
        assert sum(pieces) > 10

    def test_what_is_timed_while_idle_is_kept(self, tmp_path) -> None:
        model = RWKV7Cuda(WEIGHTS, "cuda")
        model.autotuner.chosen.clear()
        model.autotuner.file = tmp_path / "tuning.json"
        states = model.new_states(3, torch.float16)
        model.capture(states, progress=False, late=True)
        while model.improve(idle=True):
            pass
        assert model.autotuner.file.is_file()
        assert not model.autotuner.unmeasured([1, 2, 3, 16, 512])
        assert not states.memory.any()
        truth, tokens = RWKV7(WEIGHTS, "cuda"), torch.randint(1, 500, (3,))
        want = truth.forward(tokens, [1] * 3, range(3), truth.new_states(3))
        assert off(model.forward(tokens, [1] * 3, range(3), states), want) < 1e-2
