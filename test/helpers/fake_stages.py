"""A StagedRunner over GPUs that are simulated: each layer takes its time, and what is handed on is real."""

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_cuda import FakeCuda
from torch import Tensor

from rwkv_batch.model.cuda import staged
from rwkv_batch.model.cuda.stage import HandedOn, StageRows
from rwkv_batch.runner import staged_runner
from rwkv_batch.runner.staged_runner import StagedRunner

WIDTH, VOCAB = 2, 4


class FakeFeed:
    """What a stage knows of the slots."""

    def __init__(self, device: torch.device) -> None:
        self._table = torch.zeros(1, dtype=torch.int32, device=device)

    def begin(self, slot: int, stop_ids: Sequence[int]) -> None:
        pass

    def resolve(self, tokens: Tensor) -> None:
        tokens.add_(self._table)

    def record_drawn(self, ids: Tensor, slots: Tensor) -> None:
        self._table.copy_((ids + slots).sum())


class FakeModel:
    """The layers of a stage, whose time is that of the tokens."""

    takes_adapters, kernels = False, SimpleNamespace(invariant=False, architecture="")
    checkpoint = SimpleNamespace(vocab=VOCAB, layers=100, width=WIDTH)

    def __init__(self, device: torch.device, seconds_a_token: float, number: int, of: int) -> None:
        """number: of the stage. of: so many."""
        self.device, self.seconds_a_token, self.number = device, seconds_a_token, number
        self.part = range(number * 100 // of, (number + 1) * 100 // of)

    def tune_as(self, other: "FakeModel") -> None:
        pass

    def new_states(self, slots: int, wkv_dtype: torch.dtype) -> Any:
        return SimpleNamespace(feed=FakeFeed(self.device))


class FakeStage:
    """As Stage. Its buffers are those of every step, as the buffers of graphs are."""

    def __init__(
        self, cuda: FakeCuda, model: FakeModel, states: Any, most_rows: int, most_tokens: int
    ) -> None:
        self.model, self.states, self._cuda = model, states, cuda
        self._x = torch.zeros(most_tokens, WIDTH, device=model.device)
        self._tokens, self._slots = torch.zeros(2, most_tokens, dtype=torch.int32, device=model.device)

    def capture(self, late: bool, changed: object) -> None:
        pass

    def pass_on(self, rows: StageRows, given: HandedOn | None) -> HandedOn:
        count = len(rows.tokens)
        x, tokens, slots = self._x[:count], self._tokens[:count], self._slots[:count]
        if given:
            for mine, handed in zip((x, tokens, slots), given.tensors, strict=True):
                mine.copy_(handed)
        else:
            self.states.feed.resolve(tokens)
        self._cuda.work(self.model.device, count * self.model.seconds_a_token, self.model.number)
        x.add_(1)
        return HandedOn(x, None, tokens, slots)

    def finish(self, rows: StageRows, given: HandedOn) -> tuple[Tensor, Tensor]:
        left, drawing = self.pass_on(rows, given), len(rows.logits_of)
        return left.x[:drawing], left.slots[:drawing]


class FakeSampler:
    """As CudaSampler."""

    def begin(self, *row: object) -> None:
        pass

    def prepare(self, slots: Sequence[int]) -> None:
        pass

    def sample_async(self, logits: Tensor, slots: Tensor, masks: None, feed: FakeFeed) -> Tensor:
        ids = logits[:, 0].to(torch.int32)
        feed.record_drawn(ids, slots)
        return ids


class FakeDraws:
    """As QueuedDraws, of which the host gets nothing but that they are there."""

    def __init__(self, ids: Tensor, *_: object) -> None:
        self._count, self._drawn = len(ids), torch.cuda.Event()
        self._drawn.record()

    def wait(self) -> list[int]:
        self._drawn.synchronize()
        return [0] * self._count


def fake_runner(
    cuda: FakeCuda, devices: Sequence[int], seconds_a_token: float, rows: int, tokens: int
) -> StagedRunner:
    """A stage on each of these devices. tokens: of a prefill, at most."""
    numbered = [torch.device("cuda", number) for number in devices]
    models: list[Any] = [
        FakeModel(device, seconds_a_token, number, len(devices)) for number, device in enumerate(numbered)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staged, "Stage", partial(FakeStage, cuda))
        patch.setattr(staged, "StagedStates", list)
        patch.setattr(staged_runner, "CudaSampler", lambda *_: FakeSampler())
        for warm_up in ("run_largest_step", "launch_all_kernels"):
            patch.setattr(staged_runner, warm_up, lambda *_, **__: None)
        runner = StagedRunner(models, torch.float16, "own")
        runner.allocate(rows, 1, tokens)
    return runner
