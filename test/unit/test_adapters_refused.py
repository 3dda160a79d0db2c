"""An adapter that does not fit the model in whole is refused in whole, with one sentence that names why."""

import pytest
import torch
from adapter_files import (
    LAYERS,
    MAKERS,
    SCALED,
    VOCAB,
    WIDTH,
    adapted,
    bone,
    disha,
    dora,
    lora,
    made,
    miss,
    refusal,
)
from checkpoints import write_pth
from safetensors.torch import save_file

from bench.make_checkpoint import random_checkpoint
from rwkv_batch.model.adapters.reader import read
from rwkv_batch.model.checkpoint import from_tensors


@pytest.fixture(scope="module")
def base():
    return {name: tensor.float() for name, tensor in random_checkpoint(LAYERS, WIDTH, VOCAB).items()}


@pytest.fixture(scope="module")
def checkpoint(base):
    return from_tensors("base", base)


def renamed(tensors, old, new):
    return {key.replace(old, new): tensor for key, tensor in tensors.items()}


KEY = "blocks.1.att.key"
INTEGERS = torch.ones(4, WIDTH, dtype=torch.int32)
SQUARES = torch.ones(8, 8, 16), torch.ones(5, 24, 24)
WRONG = {
    "one key renamed": (lora, lambda t: renamed(t, f"{KEY}.lora_A", f"{KEY}.lora_a"), f"{KEY}.lora_a"),
    "a target that is not there": (lora, lambda t: renamed(t, f"{KEY}.", "blocks.1.att.kex."), "att.kex"),
    "one layer too many": (lora, lambda t: renamed(t, f"{KEY}.", "blocks.2.att.key."), "blocks.2.att.key"),
    "half a pair": (lora, lambda t: {k: v for k, v in t.items() if k != f"{KEY}.lora_B"}, KEY),
    "M without a pair": (lora, lambda t: t | {"blocks.0.ln1.lora_M": torch.ones(1, WIDTH)}, "blocks.0.ln1"),
    "two kinds on one": (lora, lambda t: t | {f"{KEY}.bone": torch.ones(8, 16, 16)}, KEY),
    "two ranks in a pair": (lora, lambda t: t | {f"{KEY}.lora_B": torch.ones(WIDTH, 3)}, f"{KEY}.lora_B"),
    "a pair of another width": (lora, lambda t: t | {f"{KEY}.lora_A": torch.ones(4, 96)}, f"{KEY}.lora_A"),
    "M of another width": (dora, lambda t: t | {f"{KEY}.lora_M": torch.ones(1, 96)}, f"{KEY}.lora_M"),
    "M of rows": (dora, lambda t: t | {f"{KEY}.lora_M": torch.ones(WIDTH, 1)}, f"{KEY}.lora_M"),
    "blocks that are no squares": (bone("bone"), lambda t: t | {f"{KEY}.bone": SQUARES[0]}, f"{KEY}.bone"),
    "blocks that do not divide": (bone("bone"), lambda t: t | {f"{KEY}.bone": SQUARES[1]}, f"{KEY}.bone"),
    "too few blocks": (bone("disha"), lambda t: t | {f"{KEY}.disha": torch.ones(7, 16, 16)}, f"{KEY}.disha"),
    "a shard on its side": (disha, lambda t: t | {f"{KEY}.disha": torch.ones(WIDTH, 24)}, f"{KEY}.disha"),
    "D on its side": (miss, lambda t: t | {f"{KEY}.weight.D": torch.ones(12, WIDTH)}, f"{KEY}.weight.D"),
    "a vector of another width": (lora, lambda t: t | {"ln_out.bias": torch.ones(64)}, "ln_out.bias"),
    "whole and changed": (lora, lambda t: t | {f"{KEY}.weight": torch.ones(WIDTH, WIDTH)}, f"{KEY}.weight"),
    "not finite": (lora, lambda t: t | {f"{KEY}.lora_A": torch.full((4, WIDTH), torch.nan)}, f"{KEY}.lora_A"),
    "numbers for names": (lora, lambda t: t | {f"{KEY}.lora_A": INTEGERS}, "int32"),
    "one number": (bone("bone"), lambda t: t | {f"{KEY}.bone": torch.tensor(1.0)}, f"{KEY}.bone"),
    "a name twice": (lora, lambda t: t | {f"model.{KEY}.lora_A": torch.ones(4, WIDTH)}, f"{KEY}.lora_A"),
    "a tuned state": (lora, lambda t: t | {"blocks.0.att.time_state": torch.ones(2, 64, 64)}, "time_state"),
    "not for inference": (miss, lambda t: t | {f"{KEY}.weight.D.master": torch.ones(WIDTH, 12)}, "D.master"),
    "nothing": (lora, lambda t: {}, "a.pth"),
}  # fmt: skip


@pytest.mark.parametrize("fault", WRONG)
def test_a_file_that_does_not_fit_is_refused_by_name(fault, base, checkpoint, tmp_path):
    make, spoil, named = WRONG[fault]
    file = write_pth(tmp_path / "a.pth", spoil(made(base, make)))
    message = refusal(lambda: adapted(checkpoint, file))
    assert named in message and str(file) in message


def test_a_file_that_cannot_be_read_is_refused(base, checkpoint, tmp_path):
    whole = write_pth(tmp_path / "a.pth", made(base, lora)).read_bytes()
    (tmp_path / "cut.pth").write_bytes(whole[: len(whole) // 2])
    save_file(made(base, lora), tmp_path / "b.safetensors")
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "b.safetensors").read_bytes()[:-100])
    (tmp_path / "text.pth").write_text("lora")
    for name in ("cut.pth", "cut.safetensors", "text.pth", "nowhere.pth", "nowhere/adapter.pth"):
        assert name in refusal(lambda name=name: read(tmp_path / name, checkpoint))


def test_a_pickle_with_code_does_not_run(checkpoint, tmp_path):
    class Code:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    torch.save({"head.lora_A": Code()}, tmp_path / "a.pth")
    refusal(lambda: read(tmp_path / "a.pth", checkpoint))
    assert not (tmp_path / "ran").exists()


def test_a_scaling_is_given_where_it_is_needed_and_only_there(base, checkpoint, tmp_path):
    for kind, make in MAKERS.items():
        file = write_pth(tmp_path / f"{kind}.pth", made(base, make))
        message = refusal(
            lambda file=file, kind=kind: adapted(checkpoint, file, None if kind in SCALED else 2.0)
        )
        assert "--adapter-alpha" in message and "--adapter-scaling" in message


def test_the_init_file_must_be_that_of_the_adapter(base, checkpoint, tmp_path):
    file = write_pth(tmp_path / "a.pth", made(base, lora))
    begun = {key.replace(".lora_", ".init_lora_"): tensor for key, tensor in made(base, lora).items()}
    one = f"{KEY}.init_lora_A"
    faults = {
        "less": {key: tensor for key, tensor in begun.items() if KEY not in key},
        "half": {key: tensor for key, tensor in begun.items() if key != one},
        "more": begun | {f"blocks.7.att.key.init_lora_{x}": torch.ones(4, 4) for x in "AB"},
        "other": begun | {one: torch.ones(4, 96)},
        "adapter": made(base, lora),
    }
    for name, tensors in faults.items():
        init = write_pth(tmp_path / f"{name}.pth", tensors)
        refusal(lambda init=init: adapted(checkpoint, file, None, init=init))
    whole = write_pth(tmp_path / "bone.pth", made(base, bone("bone")))
    init = write_pth(tmp_path / "init.pth", begun)
    refusal(lambda: adapted(checkpoint, whole, None, init=init))
    refusal(lambda: adapted(checkpoint, file, 2.0, init=init))  # PiSSA has no scaling


def test_an_embedding_that_is_normed_already_is_not_changed(base, tmp_path):
    tensors = {name: tensor for name, tensor in base.items() if ".ln0." not in name}
    folded = from_tensors("folded", tensors, normed=True)
    file = write_pth(tmp_path / "a.pth", {"emb.weight": base["emb.weight"]})
    assert "ln0" in refusal(lambda: adapted(folded, file, None))
