"""Adapters beside the weights: logits of every row against weights merged by hand, in a plain fp64 model."""

from pathlib import Path

import pytest
import torch
from adapter_files import FACTOR, off
from checkpoints import tiny, write_pth
from plain_rwkv7 import plain_logits
from row_adapters import KINDS, SCALED, merged_by_hand, write

from bench.make_checkpoint import random_rwkv6
from rwkv_batch.model.adapters.low_rank import low_rank
from rwkv_batch.model.adapters.parts import Scaling
from rwkv_batch.model.adapters.reader import read
from rwkv_batch.model.checkpoint import Checkpoint, from_tensors
from rwkv_batch.model.files import CheckpointError
from rwkv_batch.model.rwkv7 import RWKV7
from rwkv_batch.ops.low_rank import LowRankAdapter, PreparedAdapter, readout_adapter, shapes

WEIGHTS = tiny(vocab=320)
TOLERANCE = 1e-4  # relative to the size of the whole tensor
PROMPTS = [[5, 6, 7], [300], list(range(20, 45)), [9, 9], [1]]


def packed(folder: Path, kind: str, dtype: torch.dtype = torch.float32, **options) -> LowRankAdapter:
    file = write(folder, WEIGHTS, kind, 1, **options)
    return low_rank(read(file, WEIGHTS), WEIGHTS, Scaling(FACTOR) if kind in SCALED else None, 32, dtype)


def with_adapters(adapters: list[LowRankAdapter]) -> RWKV7:
    model = RWKV7(WEIGHTS)
    sizes = WEIGHTS.width, 4 * WEIGHTS.width
    model.adapters = [PreparedAdapter.on(each, *sizes, model.device, model.dtype) for each in adapters]
    return model


def test_every_row_has_the_logits_of_its_merged_weights(tmp_path: Path) -> None:
    model = with_adapters([packed(tmp_path, kind) for kind in KINDS])
    merged = [merged_by_hand(WEIGHTS, kind, 1) for kind in KINDS]
    adapters = [2, -1, 0, 1, 0]
    tokens = torch.tensor([token for prompt in PROMPTS for token in prompt])
    lengths, states = [len(prompt) for prompt in PROMPTS], model.new_states(5)
    logits = model.forward(tokens, lengths, range(5), states, None, adapters)
    for row, (prompt, slot) in enumerate(zip(PROMPTS, adapters, strict=True)):
        weights = WEIGHTS if slot < 0 else merged[slot]
        assert off(logits[row], plain_logits(dict(weights.tensors), prompt)) < TOLERANCE


def test_a_stage_gets_of_an_adapter_what_its_layers_have(tmp_path: Path) -> None:
    """An adapter may change no layer of a stage."""
    width, adapter = WEIGHTS.width, packed(tmp_path, "lora")
    adapter.table[1] = 0
    whole, found = [range(WEIGHTS.layers)], 0
    for part in (*whole, range(1), range(1, 2)):
        piece = adapter.of_layers(part, width, 4 * width)
        for place, layer in enumerate(part):
            for target, (outputs, inputs) in enumerate(shapes(width, 4 * width)):
                pairs = (
                    piece.pair(place, target, inputs, outputs),
                    adapter.pair(layer, target, inputs, outputs),
                )
                assert (pairs[0] is None) == (pairs[1] is None) == (layer == 1)
                if pairs[0] and pairs[1]:
                    assert all(torch.equal(a, b) for a, b in zip(*pairs, strict=True))
                    found += 1
        assert part in whole or len(piece.numbers) < len(adapter.numbers)
    assert found == 2 * (WEIGHTS.layers - 1) * len(shapes(1, 4))


def test_a_row_is_the_same_bit_for_bit_alone_and_beside_others(tmp_path: Path) -> None:
    model = with_adapters([packed(tmp_path, "lora"), packed(tmp_path, "miss")])
    tokens, states = torch.tensor([5, 6, 7, 8]), model.new_states(4)
    together = model.forward(tokens, [1] * 4, range(4), states, None, [0, 0, 1, -1])
    for row, slot in enumerate([0, 0, 1]):
        alone = model.forward(torch.tensor([5 + row]), [1], [0], model.new_states(1), None, [slot])
        assert torch.equal(alone[0], together[row])


def test_what_rows_read_out_of_their_states_is_scaled_by_their_offsets(tmp_path: Path) -> None:
    """Beside a row with a LoRA and one without an adapter; decode steps too."""
    draw = torch.Generator().manual_seed(1)
    offsets = [torch.randn(WEIGHTS.layers, WEIGHTS.width, generator=draw) for _ in range(2)]
    scaled = [readout_adapter(str(i), numbers, torch.float32) for i, numbers in enumerate(offsets)]
    model = with_adapters([packed(tmp_path, "lora"), *scaled])
    merged, plain = dict(merged_by_hand(WEIGHTS, "lora", 1).tensors), dict(WEIGHTS.tensors)
    adapters = [1, -1, 2, 0, 1]
    tokens = torch.tensor([token for prompt in PROMPTS for token in prompt])
    lengths, states = [len(prompt) for prompt in PROMPTS], model.new_states(5)
    prefilled = model.forward(tokens, lengths, range(5), states, None, adapters)
    decoded = model.forward(torch.full((5,), 8), [1] * 5, range(5), states, None, adapters)
    for row, (prompt, slot) in enumerate(zip(PROMPTS, adapters, strict=True)):
        weights, own = merged if slot == 0 else plain, offsets[slot - 1] if slot > 0 else None
        for logits, fed in ((prefilled, prompt), (decoded, [*prompt, 8])):
            assert off(logits[row], plain_logits(weights, fed, offsets=own)) < TOLERANCE


def test_an_adapter_may_leave_matrices_as_they_are(tmp_path: Path) -> None:
    only = ("att.output", "ffn.value")
    model = with_adapters([packed(tmp_path, "lora", targets=only)])
    merged = merged_by_hand(WEIGHTS, "lora", 1, targets=only)
    logits = model.forward(torch.tensor(PROMPTS[0]), [3], [0], model.new_states(1), None, [0])
    assert off(logits[0], plain_logits(dict(merged.tensors), PROMPTS[0])) < TOLERANCE


def test_a_digest_follows_from_numbers_and_scaling(tmp_path: Path) -> None:
    first, second = (read(write(tmp_path, WEIGHTS, "lora", seed), WEIGHTS) for seed in (1, 2))
    scalings = Scaling(1.0), Scaling(alpha=4.0), Scaling(2.0)  # the rank is 4
    same, also, other = (low_rank(first, WEIGHTS, each, 32, torch.float32).digest for each in scalings)
    assert same == also != other
    assert low_rank(second, WEIGHTS, Scaling(1.0), 32, torch.float32).digest not in (same, other)


def test_the_sums_of_a_shard_are_as_large_as_what_they_sum(tmp_path: Path) -> None:
    """Larger sums could not be held in fp16: a shard's A has ones in the papers."""
    adapter = packed(tmp_path, "miss", torch.float16)
    pair = adapter.pair(0, 5, 4 * WEIGHTS.width, WEIGHTS.width)
    assert pair is not None
    largest = torch.full((4 * WEIGHTS.width,), 60000.0)
    assert (pair[0].float() @ largest).abs().max() < 65504


@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_numbers_that_fp16_cannot_hold(tmp_path: Path, scale: float) -> None:
    file = write(tmp_path, WEIGHTS, "lora", 1)
    adapter = read(file, WEIGHTS)
    if scale < 1:
        assert low_rank(adapter, WEIGHTS, Scaling(scale), 32, torch.float16).numbers.isfinite().all()
        return
    with pytest.raises(CheckpointError, match="holds numbers that float16 cannot; merge it"):
        low_rank(adapter, WEIGHTS, Scaling(scale), 32, torch.float16)


def test_rwkv6_has_none(tmp_path: Path) -> None:
    weights: Checkpoint = from_tensors("six", random_rwkv6(2, 128, 320))
    file = write_pth(
        tmp_path / "a.pth",
        {"blocks.0.att.key.lora_A": torch.zeros(4, 128), "blocks.0.att.key.lora_B": torch.zeros(128, 4)},
    )
    with pytest.raises(CheckpointError, match="merge it into the model, as `adapter_filename`"):
        low_rank(read(file, weights), weights, Scaling(1.0), 32, torch.float32)
