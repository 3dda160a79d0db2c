"""Files of tuned states, as every producer writes them; what is wrong in them is one sentence."""

import pytest
import torch
from safetensors.torch import save_file

from rwkv_batch.model.adapters.start_states import read_start_state
from rwkv_batch.model.files import CheckpointError

LAYERS, WIDTH = 3, 128
SHAPE = (WIDTH // 64, 64, 64)


@pytest.fixture
def states():
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(SHAPE, generator=draw).bfloat16() for _ in range(LAYERS)]


def written(path, tensors):
    if path.suffix == ".pth":
        torch.save(tensors, path)
    else:
        save_file(tensors, path)
    return path


def named(states, pattern="blocks.{}.att.time_state"):
    return {pattern.format(layer): state for layer, state in enumerate(states)}


def read(path, layout="vk", layers=LAYERS, width=WIDTH):
    return read_start_state(path, layers, width, layout)


def refusal(path, **options) -> str:
    with pytest.raises(CheckpointError) as caught:
        read(path, **options)
    message = str(caught.value)
    assert "\n" not in message and message.endswith(".") and str(path) in message
    return message


@pytest.mark.parametrize("suffix", [".pth", ".safetensors", ".st"])
@pytest.mark.parametrize(
    "pattern",
    ["blocks.{}.att.time_state", "init_state.{}.wkv", "model.blocks.{}.att.time_state"],
)
def test_every_name_and_file(states, tmp_path, suffix, pattern):
    found = read(written(tmp_path / f"state{suffix}", named(states, pattern)))
    assert torch.equal(found.wkv, torch.stack(states).float())
    assert found.shift.shape == (LAYERS, 2, WIDTH) and not found.shift.any()


def test_the_other_layout_is_transposed(states, tmp_path):
    path = written(tmp_path / "state.pth", named([state.mT.contiguous() for state in states]))
    assert torch.equal(read(path, "kv").wkv, torch.stack(states).float())
    assert read(path, "kv").digest != read(path, "vk").digest


def test_a_full_state_has_both_token_shifts(states, tmp_path):
    shifts = {
        f"blocks.{layer}.{part}.ts_state": torch.full((1, 1, WIDTH), float(10 * layer + place))
        for layer in range(LAYERS)
        for place, part in enumerate(("att", "ffn"))
    }
    found = read(written(tmp_path / "state.pth", named(states) | shifts))
    expected = [[[10.0 * layer + place] * WIDTH for place in range(2)] for layer in range(LAYERS)]
    assert found.shift.tolist() == expected


def test_a_time_offset(states, tmp_path):
    offsets = {
        f"model.blocks.{i}.att.time_offset": torch.full((1, 1, WIDTH), i / 8).bfloat16()
        for i in range(LAYERS)
    }
    found = read(written(tmp_path / "scaled.pth", named(states) | offsets))
    assert found.offsets.tolist() == [[i / 8] * WIDTH for i in range(LAYERS)]
    plain = read(written(tmp_path / "plain.pth", named(states)))
    assert plain.offsets is None and plain.digest != found.digest
    nothing = {key: torch.zeros(WIDTH) for key in offsets}
    assert read(written(tmp_path / "zero.pth", named(states) | nothing)).digest == plain.digest


def test_keys_of_an_adapter_beside_it_are_passed_over(states, tmp_path):
    foreign = {"blocks.0.att.key.lora_A": torch.zeros(4, WIDTH), "blocks.0.att.x_r": torch.zeros(WIDTH)}
    alone, beside = named(states), named(states) | foreign
    first, second = (written(tmp_path / f"{i}.pth", tensors) for i, tensors in enumerate((alone, beside)))
    assert read(first).digest == read(second).digest


@pytest.mark.parametrize(
    ("change", "named_in_it"),
    [
        ({"blocks.1.att.time_state": None}, "0 to 2, and the model has 3"),
        ({"blocks.3.att.time_state": torch.zeros(SHAPE)}, "0 to 3, and the model has 3"),
        ({"blocks.1.att.time_state": torch.zeros(4, 64, 64)}, "[4, 64, 64] where the model has [2, 64, 64]"),
        ({"blocks.1.att.time_state": torch.full(SHAPE, torch.nan)}, "not finite"),
        ({"blocks.1.att.time_state": torch.zeros(SHAPE, dtype=torch.int8)}, "stored as int8"),
        ({"init_state.1.wkv": torch.zeros(SHAPE)}, "two states of layer 1"),
        ({"blocks.0.att.time_offset": torch.zeros(64)}, "blocks.0.att.time_offset has shape [64]"),
        ({"blocks.3.att.time_offset": torch.zeros(WIDTH)}, "blocks.3.att.time_offset has shape [128]"),
        ({"blocks.0.att.time_offset": torch.full((WIDTH,), torch.inf)}, "not finite"),
        ({"blocks.0.att.ts_state": torch.zeros(64)}, "blocks.0.att.ts_state has shape [64]"),
        (dict.fromkeys([f"blocks.{i}.att.time_state" for i in range(LAYERS)]), "no tensor blocks.N"),
    ],
)
def test_what_does_not_fit_is_named(states, tmp_path, change, named_in_it):
    tensors = {key: tensor for key, tensor in (named(states) | change).items() if tensor is not None}
    tensors |= {"blocks.0.att.x_r": torch.zeros(WIDTH)}
    assert named_in_it in refusal(written(tmp_path / "state.pth", tensors))


def test_a_file_that_is_no_state(tmp_path):
    assert "check the path" in refusal(tmp_path / "nowhere.pth")
    (tmp_path / "words.pth").write_text("hello")
    assert "is a text" in refusal(tmp_path / "words.pth")
    with (tmp_path / "huge.pth").open("wb") as huge:
        huge.truncate(4 << 30)  # a sparse file
    assert "4096 MiB" in refusal(tmp_path / "huge.pth")
    torch.save({"blocks.0.att.time_state": print}, tmp_path / "code.pth")
    assert "could run code" in refusal(tmp_path / "code.pth")
