"""Stages over the kernels draw what one GPU draws, and leave its states, bit for bit.

With one GPU all stages are on it, and with more on these in turn: the first and the third on the first of
two. Under --emulated some tests run on a CPU.
"""

from functools import partial

import numpy as np
import pytest
import torch
from checkpoints import tiny
from cuda_gpu import DEVICE, needs_gpu

from bench.make_checkpoint import random_checkpoint, random_rwkv6, random_rwkv7a
from rwkv_batch.engine import Engine
from rwkv_batch.model.checkpoint import Checkpoint, from_tensors
from rwkv_batch.model.quantization.quantize import quantize
from rwkv_batch.model.stages import layers_of_stages
from rwkv_batch.ops.cuda.inputs.handover import Handover, handover_bytes
from rwkv_batch.ops.low_rank import readout_adapter
from rwkv_batch.runner import backends, groups, staged_runner
from rwkv_batch.runner.cuda_runner import CUDA_MODELS, CudaRunner
from rwkv_batch.runner.protocol import LAST, NO_ADAPTERS, AdapterRoom, Batch, Draws, NewRow, Runner
from rwkv_batch.runner.staged_runner import StagedRunner
from rwkv_batch.sampling.masks import RowMasks
from rwkv_batch.sampling.prompt_logprobs import ScoredRow
from rwkv_batch.state.snapshot import Transfer
from rwkv_batch.wire.protocol import Sampling

pytestmark = [*needs_gpu, pytest.mark.usefixtures("untimed")]
on_gpu = pytest.mark.usefixtures("graphs")
ROOM = AdapterRoom(1, 16)
EMULATED = DEVICE == "cpu"
VOCAB, LAYERS, WIDTH = (64, 3, 64) if EMULATED else (512, 5, 128)
GPUS = [torch.device("cuda", number % max(torch.cuda.device_count(), 1)) for number in range(4)]
GPUS = [torch.device("cpu")] * 4 if EMULATED else GPUS
MODELS = {
    "rwkv7": lambda: tiny(LAYERS, WIDTH, VOCAB),
    "rwkv7a": lambda: from_tensors("7a", random_rwkv7a(LAYERS, WIDTH, VOCAB)),
    "rwkv6": lambda: from_tensors("6", random_rwkv6(LAYERS, WIDTH, VOCAB)),
}
CODED = {
    "int8": lambda: quantize(tiny(LAYERS, 256, VOCAB), "int8", True),
    "int4": lambda: quantize(tiny(LAYERS, 256, VOCAB), "int4", True),
    "nf4": lambda: quantize(tiny(LAYERS, 256, VOCAB), "nf4", True),
    "fp8": lambda: quantize(tiny(LAYERS, 256, VOCAB), "fp8", True),
}
MODELS |= {} if EMULATED else CODED  # whose larger matrices take minutes on a CPU


@pytest.fixture
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few rows or tokens are enough for a group."""
    for name, fewest in {"FEWEST_ROWS": 1, "FEWEST_TOKENS": 8, "CUT": 4}.items():
        monkeypatch.setattr(groups, name, fewest)


def allocated(runner: Runner, rows: int = 4, late: bool = False) -> Runner:
    runner.allocate(rows, 1, 3 * max(rows, 20), late or EMULATED)
    return runner


def one_gpu(
    checkpoint: Checkpoint, wkv: torch.dtype = torch.float16, invariant: bool = False, rows: int = 4
) -> Runner:
    model = CUDA_MODELS[checkpoint.family](checkpoint, GPUS[0], None, invariant)
    return allocated(CudaRunner(model, wkv, "own", NO_ADAPTERS if invariant else ROOM), rows)


def in_stages(
    checkpoint: Checkpoint,
    stages: int,
    wkv: torch.dtype = torch.float16,
    invariant: bool = False,
    divided: int = 1,
    rows: int = 4,
    late: bool = False,
) -> Runner:
    kind = CUDA_MODELS[checkpoint.family]
    parts = layers_of_stages(checkpoint, stages)
    models = [
        kind(checkpoint, gpu, None, invariant, False, part)
        for gpu, part in zip(GPUS[:stages], parts, strict=True)
    ]
    room = NO_ADAPTERS if invariant else ROOM
    return allocated(StagedRunner(models, wkv, "own", room, divided), rows, late)


def of(draws: Draws) -> tuple[list, ...]:
    return draws.wait(), draws.logprobs(), draws.prompt_logprobs()


def drawn(runner: Runner, adapted: bool = False) -> list[object]:
    """What three rows draw, with all that a step can have, and the states of all slots."""
    found: list[object] = []
    with_adapter = {}
    runner.states.clear(range(5))
    if adapted:
        offsets = torch.linspace(-0.5, 0.5, LAYERS * WIDTH).view(LAYERS, WIDTH)
        runner.load_adapter(0, readout_adapter("d" * 32, offsets, runner.dtype, pinned=True))
        with_adapter = {"adapters": [-1, 0, -1]}
    for slot, sampling in (
        (0, Sampling(temperature=1.0)),
        (2, Sampling(temperature=0)),
        (3, Sampling(top_p=0.7)),
    ):
        runner.begin(slot, NewRow(sampling, 7, slot, ()))
    rows, slots = [[3, 4, 5, 6, 7], [9] * 17, [5]], [2, 0, 3]
    tokens, counts = [token for row in rows for token in row], [len(row) for row in rows]
    found.append(of(runner.run(Batch(tokens, counts, slots, [0, 1, 2], {1: 2}, **with_adapter))))
    queued = [
        runner.run(Batch([LAST] * 3, [1] * 3, slots, [0, 1, 2], {} if i else {2: 1, 0: 3}, **with_adapter))
        for i in range(4)
    ]
    found += map(of, queued)
    runner.begin(1, NewRow(Sampling(), 7, 1, ()))
    scored = ScoredRow(0, [6, 7, 8], 2)
    # As many tokens as a graph has: what pads one decides in which order the sparse GEMM adds up.
    mixed = Batch([LAST, 5, 6, 7, 8, 9, 4, LAST], [1, 6, 1], [3, 1, 0], [0, 2], scored={1: scored})
    found.append(of(runner.run(mixed)))
    bits = np.full((1, VOCAB // 32), 0x0F0F0F0F, np.int32)
    bound = runner.feed(Batch([LAST, 9, 9, LAST], [1, 2, 1], [3, 1, 0], [0, 1, 2]))
    found.append(of(bound(RowMasks([1], bits))))
    found.append([runner.states.read(slot).tolist() for slot in range(5)])
    return found


@pytest.mark.parametrize("wkv", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("stages", [2, 3] if EMULATED else [2, 3, 4])
@pytest.mark.parametrize("model", MODELS)
def test_draws_and_states_are_those_of_one_gpu(model, stages, wkv):
    checkpoint = MODELS[model]()
    assert drawn(in_stages(checkpoint, stages, wkv)) == drawn(one_gpu(checkpoint, wkv))


@pytest.mark.parametrize(("stages", "divided"), [(2, 2)] if EMULATED else [(2, 2), (2, 3), (4, 4)])
@pytest.mark.parametrize("model", ["rwkv6"] if EMULATED else ["rwkv7", "rwkv7a", "rwkv6", "int8"])
@pytest.mark.usefixtures("small_groups")
def test_groups_change_nothing_where_rows_do_not_depend_on_each_other(model, stages, divided):
    """Nor do prompts that are cut for them."""
    checkpoint = MODELS[model]()
    whole = one_gpu(checkpoint, torch.float32, True)
    assert drawn(in_stages(checkpoint, stages, torch.float32, True, divided)) == drawn(whole)


@on_gpu
@pytest.mark.parametrize("late", [False, True])
def test_an_adapter_changes_the_layers_of_every_stage(late):
    checkpoint = MODELS["rwkv7"]()
    whole = drawn(one_gpu(checkpoint), adapted=True)
    staged = in_stages(checkpoint, 3, late=late)
    assert drawn(staged, adapted=True) == whole != drawn(one_gpu(checkpoint))
    pieces = 0
    while late and staged.improve(idle=True):
        pieces += 1
    assert drawn(staged, adapted=True) == whole and (pieces > 10) == late


@on_gpu
@pytest.mark.parametrize("stages", [2, 4])
def test_many_rows_in_groups_draw_what_they_draw_alone(stages):
    """100 rows in groups, of which rows end and others begin; a step is queued before the last one."""
    checkpoint = tiny(4, WIDTH, VOCAB)

    def texts(runner: Runner) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        queued: list[tuple[list[int], Draws]] = []
        rows = list(range(100))
        for step in range(24):
            for slot in rows if step == 0 else range(step, step + 3) if step == 9 else ():
                runner.begin(slot, NewRow(Sampling(temperature=1.0), 3, slot + 1000 * step, (1, 2, 3)))
                found[slot] = []
            if step in (5, 12):
                rows = [row for row in rows if row % (step - 2)]
            fresh = rows if step == 0 else [row for row in rows if step == 9 and row in range(9, 12)]
            tokens = [t for row in rows for t in ([5, row + 4, 7] if row in fresh else [LAST])]
            counts = [3 if row in fresh else 1 for row in rows]
            batch = Batch(tokens, counts, list(rows), list(range(len(rows))))
            queued.append((list(rows), runner.run(batch)))
            if len(queued) > 1:
                slots, draws = queued.pop(0)
                for slot, id_ in zip(slots, draws.wait(), strict=True):
                    found[slot].append(id_)
        return found

    def until_stop(ids: list[int]) -> list[int]:
        ends = [place for place, id_ in enumerate(ids) if id_ in (1, 2, 3)]
        return ids[: ends[0]] if ends else ids

    whole = texts(one_gpu(checkpoint, torch.float32, True, 100))
    staged = texts(in_stages(checkpoint, stages, torch.float32, True, stages, 100))
    assert {s: until_stop(ids) for s, ids in staged.items()} == {s: until_stop(i) for s, i in whole.items()}


def test_a_row_that_begins_waits_for_no_draws_of_others(monkeypatch):
    """Nor does its prompt, and what the row before it in its slot drew late is not its own."""
    waits = []

    class CountedHandover(Handover):
        def receive(self, parcel):
            waits.append(parcel)
            return super().receive(parcel)

    def texts(runner: Runner) -> list[list[int]]:
        for slot in (0, 2):
            runner.begin(slot, NewRow(Sampling(temperature=1.0), 7, slot, ()))
        draws = [runner.run(Batch([3, 4, 5, 6], [3, 1], [0, 2], [0, 1]))]
        draws.append(runner.run(Batch([LAST] * 2, [1] * 2, [0, 2], [0, 1])))
        waits.clear()
        runner.begin(0, NewRow(Sampling(temperature=0), 9, 0, tuple(range(4))))
        draws.append(runner.run(Batch([8, 9, 10], [3], [0], [0])))
        assert not waits
        draws.append(runner.run(Batch([LAST] * 2, [1] * 2, [2, 0], [0, 1])))
        draws.append(runner.run(Batch([LAST] * 2, [1] * 2, [2, 0], [0, 1])))
        return [each.wait() for each in draws]

    monkeypatch.setattr(staged_runner, "Handover", CountedHandover)
    checkpoint = MODELS["rwkv7"]()
    staged = texts(in_stages(checkpoint, 2))
    assert len(waits) == 3  # the draws of three steps, which rows were fed
    assert staged == texts(one_gpu(checkpoint))


@on_gpu
def test_several_steps_at_once_are_the_same_steps():
    def run(together: tuple[int, ...]) -> tuple[list[int], list[int]]:
        runner = in_stages(MODELS["rwkv7"](), 2)
        for slot in (0, 1):
            runner.begin(slot, NewRow(Sampling(temperature=0), 1, slot, ()))
        draws = [runner.run(Batch([4, 5, 6, 7], [3, 1], [0, 1], [0, 1]))]
        draws += [runner.run(Batch([LAST] * 2, [1] * 2, [0, 1], [0, 1], steps=steps)) for steps in together]
        return [id_ for draw in draws for id_ in draw.wait()], runner.states.read(1).tolist()

    assert run((4, 2)) == run((1,) * 6)


@on_gpu
def test_a_session_moves_between_stages_and_one_gpu():
    checkpoint = MODELS["rwkv7"]()
    staged, whole = in_stages(checkpoint, 2), one_gpu(checkpoint)
    drawn(staged)
    wanted = staged.states.read(2)
    assert wanted.any()
    snapshot = Transfer(staged.states, "m").unsealed(staged.states.access(2))
    Transfer(whole.states, "m").restore(snapshot, whole.states.access(1))
    assert torch.equal(whole.states.read(1).cpu(), wanted.cpu())
    back = Transfer(whole.states, "m").unsealed(whole.states.clone(1))
    Transfer(staged.states, "m").restore(back, staged.states.access(4))
    staged.states.copy({3: 4})
    staged.states.replace({1: whole.states.read(1), 0: None})
    assert all(torch.equal(staged.states.read(slot).cpu(), wanted.cpu()) for slot in (1, 3, 4))
    assert not staged.states.read(0).any()


@on_gpu
def test_a_model_that_begins_in_a_state_does_so_in_every_stage():
    starts = {f"blocks.{i}.att.time_state": torch.full((2, 64, 64), i + 1.0) for i in range(LAYERS)}
    checkpoint = from_tensors("s", random_checkpoint(LAYERS, WIDTH, VOCAB, 0) | starts)
    assert drawn(in_stages(checkpoint, 3)) == drawn(one_gpu(checkpoint))


@on_gpu
def test_what_is_handed_over_is_what_was_sent():
    """However long either side takes; parcels are not overwritten before they are read."""
    source, target = GPUS[0], GPUS[1]
    aside = torch.cuda.Stream(target)  # so that one GPU has two that work at once
    handover = Handover("test", source, target, handover_bytes(4 << 20, 4), 2)
    found = []
    for number in range(40):
        with torch.cuda.device(source):
            if number % 3 == 0:
                torch.cuda._sleep(1_000_000)
            sent = torch.full((1 << 20,), number, dtype=torch.float32, device=source)
            parcel = handover.send([sent, torch.full((1,), number, dtype=torch.int32, device=source)])
            sent.fill_(-1)
        with torch.cuda.stream(aside):
            if number % 4 == 0:
                torch.cuda._sleep(1_000_000)
            large, small = handover.receive(parcel)
            found.append((large.min(), large.max(), small.sum()))
            handover.release(parcel)
    torch.cuda.synchronize(target)
    assert [tuple(int(n) for n in each) for each in found] == [(n, n, n) for n in range(40)]


@on_gpu
@pytest.mark.usefixtures("small_groups")
def test_an_engine_in_stages_says_what_one_gpu_says(monkeypatch):
    """Many rows, whose steps are queued ahead, and rows that begin with a prefix of others."""
    monkeypatch.setattr(backends, "StagedRunner", partial(StagedRunner, groups=2))
    names = [str(gpu) for gpu in GPUS[:2]]
    sampling, texts = Sampling(seed=5), []
    for device in (names[0], "+".join(names)):
        engine = Engine(device=device, batch_invariant=True, max_rows=40, prefix_cache_mb=64)
        prompts = [f"User: {n}\n\nAssistant:" for n in range(48)]
        rows = engine.generate(prompts, max_tokens=24, sampling=sampling)
        for word in ("Then", "Now"):
            prompts = ["Once upon a time there was a cat. " * 40 + f"{word} {n}" for n in range(6)]
            rows += engine.generate(prompts, max_tokens=12, sampling=sampling)
        texts.append([row.text for row in rows])
        assert isinstance(engine.runner, StagedRunner) == ("+" in device) and engine.counts.cache_hits > 500
        engine.close()
    assert texts[0] == texts[1] and len(set(texts[0])) > 20
