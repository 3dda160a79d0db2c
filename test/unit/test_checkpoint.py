"""Reading checkpoints: both formats, and a sentence for everything that cannot be run."""

import pickle

import pytest
import torch
from checkpoints import refusal, write_pth
from safetensors.torch import save_file

from bench.make_checkpoint import random_checkpoint
from rwkv_batch.config import EngineConfig
from rwkv_batch.model.checkpoint import from_tensors, load
from rwkv_batch.runner.loading import load_weights


@pytest.fixture(scope="module")
def tensors():
    return random_checkpoint(layers=2, width=64, vocab=100)


def changed(tensors, **replacements):
    """The tensors with some replaced; None takes one out. Names are written with __ for the dots."""
    result = dict(tensors) | {key.replace("__", "."): value for key, value in replacements.items()}
    return {key: value for key, value in result.items() if value is not None}


def test_reads_sizes_from_the_tensors(tensors, tmp_path):
    checkpoint = load(write_pth(tmp_path / "rwkv7-test.pth", tensors))
    assert (checkpoint.name, checkpoint.layers, checkpoint.width, checkpoint.heads, checkpoint.vocab) == (
        "rwkv7-test",
        2,
        64,
        1,
        100,
    )
    assert checkpoint.parameters == sum(t.numel() for t in tensors.values())


def test_pth_and_safetensors_are_the_same_model(tensors, tmp_path):
    write_pth(tmp_path / "a.pth", tensors)
    save_file(tensors, tmp_path / "b.safetensors")
    a, b = load(tmp_path / "a.pth"), load(tmp_path / "b.safetensors")
    assert a.tensors.keys() == b.tensors.keys() and all(
        torch.equal(a.tensors[key], b.tensors[key]) for key in a.tensors
    )
    assert (
        a.fingerprint
        == b.fingerprint
        == from_tensors("c", {key: t.float() for key, t in tensors.items()}).fingerprint
    )


def test_the_fingerprint_tells_models_apart(tensors):
    other = random_checkpoint(layers=2, width=64, vocab=100, seed=1)
    assert from_tensors("a", tensors).fingerprint != from_tensors("a", other).fingerprint


def test_the_suffix_may_be_left_out(tensors, tmp_path):
    write_pth(tmp_path / "rwkv7-g1-0.1b.pth", tensors)
    save_file(tensors, tmp_path / "other.safetensors")
    assert load(str(tmp_path / "rwkv7-g1-0.1b")).name == "rwkv7-g1-0.1b"
    assert load(tmp_path / "other").name == "other"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("missing.pth", None),
        ("broken.pth", b"PK\x03\x04 not a zip after all"),
        ("text.pth", b"hello"),
        ("broken.safetensors", b"\xff" * 64),
    ],
)
def test_a_file_that_is_no_checkpoint_is_named(name, content, tmp_path):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert name in refusal(lambda: load_weights(None, EngineConfig(model_path=str(tmp_path / name)), None))


def test_progress_rises_to_the_whole_size(tensors, tmp_path):
    seen = []
    checkpoint = load(write_pth(tmp_path / "a.pth", tensors), lambda done, total: seen.append((done, total)))
    size = sum(t.nbytes for t in checkpoint.tensors.values())
    assert [done for done, _ in seen] == sorted({done for done, _ in seen}) and seen[-1] == (size, size)
    assert {total for _, total in seen} == {size}


def test_layer_0_may_have_the_value_residual_it_never_uses(tensors):
    extra = {f"blocks.0.att.{name}": tensors[f"blocks.1.att.{name}"] for name in ("v0", "v1", "v2")}
    assert from_tensors("a", tensors | extra).fingerprint == from_tensors("a", tensors).fingerprint


@pytest.mark.parametrize(
    "key",
    [
        "emb.weight",
        "head.weight",
        "ln_out.bias",
        "blocks.0.ln0.weight",
        "blocks.0.att.r_k",
        "blocks.1.att.x_g",
        "blocks.1.att.v2",
        "blocks.1.att.w1",
        "blocks.1.ffn.value.weight",
    ],
)
def test_a_missing_tensor_is_named(tensors, key):
    rest = {name: t for name, t in tensors.items() if name != key}
    message = refusal(lambda: from_tensors("model-a", rest))
    assert "model-a" in message and key in message and "missing" in message


@pytest.mark.parametrize(
    ("key", "shape"),
    [
        ("head.weight", (99, 64)),
        ("blocks.1.att.w2", (31, 64)),
        ("blocks.0.att.x_r", (1, 1, 63)),
        ("blocks.1.ffn.key.weight", (64, 256)),
        ("emb.weight", (6400,)),
    ],
)
def test_a_misshapen_tensor_is_named(tensors, key, shape):
    message = refusal(lambda: from_tensors("model-a", tensors | {key: torch.zeros(shape)}))
    assert "model-a" in message and key in message and str(list(shape)) in message


def test_heads_must_have_64_channels_and_fill_the_width(tensors):
    assert "heads of 32" in refusal(
        lambda: from_tensors("a", tensors | {"blocks.0.att.r_k": torch.zeros(2, 32)})
    )
    assert "2 heads of 64" in refusal(
        lambda: from_tensors("a", tensors | {"blocks.0.att.r_k": torch.zeros(2, 64)})
    )


def test_a_gap_in_the_layers_is_named(tensors):
    gap = {key.replace("blocks.1.", "blocks.1000000000."): t for key, t in tensors.items()}
    assert "blocks.1000000000" in refusal(lambda: from_tensors("a", gap))


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        ("blocks.0.qkv.qq", "RWKV-7b"),
        ("blocks.1.ffn.enn.weight", "RWKV-8"),
        ("blocks.0.att.time_mix_k", "RWKV-4 or 5"),
        ("blocks.0.att.time_faaaa", "RWKV-4 or 5"),
        ("blocks.0.att.key.lora_A", "an adapter"),
        ("blocks.0.att.key.disha", "an adapter"),
        ("blocks.0.att.key.weight.D", "for --adapter"),
        ("blocks.0.ffn.router.linear.weight", "an adapter"),
        ("init_state.0.wkv", "a tuned state"),
        ("model.layers.0.self_attn.q_proj.weight", "of another family"),
    ],
)
def test_other_kinds_of_model_are_refused_by_name(tensors, key, kind):
    message = refusal(lambda: from_tensors("model-a", tensors | {key: torch.zeros(64)}))
    assert kind in message and key in message and "RWKV-7, 7a and 6" in message


def test_a_tuned_state_alone_is_no_model():
    state = {f"blocks.{i}.att.time_state": torch.zeros(1, 64, 64) for i in range(2)}
    assert "a tuned state" in refusal(lambda: from_tensors("state-a", state))


def test_an_unknown_tensor_is_refused(tensors):
    assert "blocks.0.att.extra" in refusal(
        lambda: from_tensors("a", tensors | {"blocks.0.att.extra": torch.zeros(64)})
    )


def test_quantised_weights_are_refused(tensors):
    message = refusal(
        lambda: from_tensors("a", tensors | {"head.weight": tensors["head.weight"].to(torch.int8)})
    )
    assert "head.weight" in message and "int8" in message


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_not_finite_are_refused(tensors, bad):
    broken = tensors["blocks.1.att.output.weight"].clone()
    broken[3, 5] = bad
    message = refusal(lambda: from_tensors("a", changed(tensors, blocks__1__att__output__weight=broken)))
    assert "blocks.1.att.output.weight" in message and "finite" in message


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
def test_a_truncated_file_is_refused(tensors, tmp_path, suffix, share):
    file = tmp_path / f"cut{suffix}"
    torch.save(tensors, file) if suffix == ".pth" else save_file(tensors, file)
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * share)])
    assert str(file) in refusal(lambda: load(file))


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_a_file_of_another_kind_is_refused(tmp_path, suffix):
    file = tmp_path / f"page{suffix}"
    file.write_bytes(b"<!doctype html><title>404</title>" * 100)
    assert str(file) in refusal(lambda: load(file))


class Trap:
    def __reduce__(self):
        return print, ("a checkpoint ran code",)


@pytest.mark.parametrize("write", [torch.save, lambda value, path: path.write_bytes(pickle.dumps(value))])
def test_a_checkpoint_cannot_run_code(tensors, tmp_path, capsys, write):
    write(dict(tensors) | {"trap": Trap()}, tmp_path / "trap.pth")
    assert "trap.pth" in refusal(lambda: load(tmp_path / "trap.pth"))
    assert "ran code" not in capsys.readouterr().out


def test_anything_but_named_tensors_is_refused(tensors, tmp_path):
    torch.save({"model": dict(tensors), "step": 5}, tmp_path / "trainer.pth")
    assert "dictionary of named tensors" in refusal(lambda: load(tmp_path / "trainer.pth"))


def test_a_wrong_path_is_refused_with_what_is_near(tensors, tmp_path):
    write_pth(tmp_path / "rwkv7-g1-0.4b.pth", tensors)
    message = refusal(lambda: load(tmp_path / "rwkv7-g1-04b"))
    assert "rwkv7-g1-04b" in message and "rwkv7-g1-0.4b.pth" in message
    message = refusal(lambda: load(tmp_path))
    assert "directory" in message and "rwkv7-g1-0.4b.pth" in message
    assert "nowhere" in refusal(lambda: load(tmp_path / "nowhere" / "model.pth"))
