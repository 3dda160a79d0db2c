"""A model in stages is the model on one device: logits and states are the same, bit for bit."""

from dataclasses import replace

import pytest
import torch
from checkpoints import tiny
from cpu_models import torch_threads

from bench.make_checkpoint import random_checkpoint, random_rwkv6, random_rwkv7a
from rwkv_batch.model.checkpoint import Checkpoint, from_tensors
from rwkv_batch.model.stages import layers_of_stages
from rwkv_batch.ops.cpu import binding
from rwkv_batch.ops.device import DeviceError, describe
from rwkv_batch.ops.low_rank import readout_adapter
from rwkv_batch.runner.protocol import AdapterRoom, Batch, NewRow
from rwkv_batch.runner.torch_runner import TorchRunner
from rwkv_batch.state.snapshot import Transfer
from rwkv_batch.wire.protocol import Sampling

CPU = torch.device("cpu")
SLOTS, VOCAB = 4, 512
FAMILIES = {
    "rwkv7": lambda: tiny(5, vocab=VOCAB),
    "rwkv7a": lambda: from_tensors("7a", random_rwkv7a(5, 128, VOCAB)),
    "rwkv6": lambda: from_tensors("6", random_rwkv6(5, 128, VOCAB)),
}


def runner_of(checkpoint: Checkpoint, stages: int, wkv: torch.dtype, kernels: bool = True) -> TorchRunner:
    load = binding.load() if kernels else None
    runner = TorchRunner(checkpoint, [CPU] * stages, wkv, AdapterRoom(1, 16), kernels=load, threads=1)
    runner.allocate(SLOTS, 0, 64)
    return runner


def drawn(runner: TorchRunner, adapted: bool = False) -> list[list[int]]:
    """What two prompts and then their next tokens draw; the second row may have the adapter."""
    if adapted:
        offsets = torch.linspace(-0.5, 0.5, 5 * 128).view(5, 128)
        runner.load_adapter(0, readout_adapter("d" * 32, offsets, runner.dtype))
    for slot in (0, 2):
        runner.begin(slot, NewRow(Sampling(temperature=1.0), 7, slot, ()))
    rows = [[3, 4, 5, 6, 7], [9] * 33]
    found = []
    for _ in range(4):
        tokens, counts = [token for row in rows for token in row], [len(row) for row in rows]
        batch = Batch(tokens, counts, [2, 0], [0, 1], {1: 2}, [-1, 0] if adapted else [])
        draws = runner.run(batch)
        found.append(draws.wait())
        rows = [[token] for token in found[-1]]
    return found


@pytest.mark.parametrize("wkv", [torch.float32, torch.float16])
@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_draws_and_states_are_those_of_one_device(family, stages, wkv):
    whole, staged = (runner_of(FAMILIES[family](), n, wkv) for n in (1, stages))
    assert drawn(staged) == drawn(whole)
    for slot in range(SLOTS):
        assert torch.equal(staged.states.read(slot), whole.states.read(slot))


@pytest.mark.parametrize("kernels", [True, False])
def test_an_adapter_changes_the_layers_of_every_stage(kernels):
    whole, staged = (runner_of(tiny(5, vocab=VOCAB), n, torch.float32, kernels) for n in (1, 3))
    assert drawn(staged, adapted=True) == drawn(whole, adapted=True) != drawn(whole)


def test_a_session_moves_between_any_number_of_stages():
    """It moves as a snapshot, as the bytes of a slot, and from slot to slot."""
    runners = [runner_of(tiny(5, vocab=VOCAB), stages, torch.float16) for stages in (1, 2, 3)]
    drawn(runners[0])
    wanted = runners[0].states.read(2)
    assert wanted.any()
    for source, target in zip(runners, runners[1:] + runners[:1], strict=True):
        snapshot = Transfer(source.states, "m").unsealed(source.states.access(2))
        states = target.states
        Transfer(states, "m").restore(snapshot, states.access(1))
        states.replace({2: source.states.read(2), 0: None})
        states.copy({3: 1})
        assert all(torch.equal(states.read(slot), wanted) for slot in (1, 2, 3)) and not states.read(0).any()
        states.clear([1, 3])
        assert not states.read(1).any() and torch.equal(states.clone(2).pieces[0], states.access(2).pieces[0])


def test_a_model_that_begins_in_a_state_does_so_in_every_stage():
    tensors = random_checkpoint(4, 128, VOCAB, 0)
    starts = {f"blocks.{layer}.att.time_state": torch.full((2, 64, 64), layer + 1.0) for layer in range(4)}
    checkpoint = from_tensors("s", tensors | starts)
    whole, staged = (runner_of(checkpoint, stages, torch.float32) for stages in (1, 2))
    assert torch.equal(whole.states.read(1), staged.states.read(1))
    assert drawn(whole) == drawn(staged)


def test_more_devices_than_layers_are_refused():
    with pytest.raises(DeviceError, match="2 layers cannot be divided over 3 devices"):
        runner_of(tiny(2), 3, torch.float32)


@pytest.mark.parametrize(
    ("layers", "width", "vocab", "stages", "sizes"),
    [
        (32, 4096, 65536, 2, [16, 16]),
        (32, 4096, 65536, 3, [10, 12, 10]),  # the ends have a table of one and a third layers each
        (12, 768, 65536, 4, [1, 5, 5, 1]),
        (5, 128, 512, 2, [3, 2]),
        (3, 64, 65536, 3, [1, 1, 1]),
    ],
)
def test_embedding_and_head_count_as_layers(layers, width, vocab, stages, sizes):
    checkpoint = replace(tiny(), layers=layers, width=width, vocab=vocab)
    parts = layers_of_stages(checkpoint, stages)
    assert [len(part) for part in parts] == sizes and [n for part in parts for n in part] == [*range(layers)]


@pytest.mark.parametrize("count, shown", [(1, "cpu (1 thread)"), (2, "cpu (2 threads)")])
def test_what_is_said_of_a_cpu(count: int, shown: str):
    with torch_threads(count):
        assert describe(torch.device("cpu")) == shown
