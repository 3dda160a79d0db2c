"""Models as other producers write them are the official ones; what is wrong in them is one sentence."""

import json

import layouts
import pytest
import torch
from checkpoints import refusal, write_pth
from safetensors.torch import save_file

from bench.make_checkpoint import random_checkpoint, random_rwkv6, random_rwkv7a
from rwkv_batch.model.checkpoint import from_tensors, load
from rwkv_batch.model.rwkv7 import RWKV7

FAMILIES = {"rwkv7": random_checkpoint, "rwkv7a": random_rwkv7a, "rwkv6": random_rwkv6}


@pytest.fixture(scope="module")
def tensors():
    return random_checkpoint(layers=2, width=128, vocab=100)


def same(found, tensors):
    wanted = from_tensors("official", tensors)
    assert found.fingerprint == wanted.fingerprint
    assert found.tensors.keys() == wanted.tensors.keys()
    return all(torch.equal(found.tensors[key], wanted.tensors[key]) for key in wanted.tensors)


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("parts", [1, 3])
def test_a_hugging_face_folder(tensors, tmp_path, linear, parts):
    folder = layouts.write_folder(tmp_path / "RWKV7-G1k-0.1B", layouts.hugging_face(tensors, linear), parts)
    found = load(folder)
    assert found.name == "RWKV7-G1k-0.1B" and same(found, tensors)


def test_a_hugging_face_folder_of_deep_embed(tmp_path):
    tensors = random_rwkv7a(layers=2, width=64, vocab=50)
    found = load(layouts.write_folder(tmp_path / "a", layouts.hugging_face(tensors, True)))
    assert found.family == "rwkv7a" and same(found, tensors)


@pytest.mark.parametrize("packed_mixes", [False, True])
def test_a_folder_of_flash_linear_attention(tensors, tmp_path, packed_mixes):
    written = layouts.flash_linear_attention(tensors, packed_mixes)
    assert same(load(layouts.write_folder(tmp_path / "a", written, norm_eps=1e-5, head_dim=64)), tensors)


def test_a_whole_file_of_a_folder_can_be_given(tensors, tmp_path):
    folder = layouts.write_folder(tmp_path / "a", layouts.hugging_face(tensors, True))
    assert same(load(folder / "model.safetensors"), tensors)


def test_an_older_folder_with_a_pickle_of_weights(tensors, tmp_path):
    folder = layouts.write_folder(tmp_path / "a", layouts.flash_linear_attention(tensors))
    (folder / "model.safetensors").unlink()
    write_pth(folder / "pytorch_model.bin", layouts.flash_linear_attention(tensors))
    assert same(load(folder), tensors)


@pytest.mark.parametrize("config", [{"embedding_layer_norm_fused": True}, {"norm_first": False}])
def test_a_norm_that_is_fused_into_the_embedding(tensors, tmp_path, config):
    written = layouts.hugging_face(layouts.with_fused_norm(tensors), linear=True)
    found = load(layouts.write_folder(tmp_path / "a", written, **config))
    ids = torch.arange(1, 21)
    logits = []
    for checkpoint in (found, from_tensors("official", tensors)):
        model = RWKV7(checkpoint)
        logits.append(model.forward(ids, [20], [0], model.new_states(1)))
    assert (logits[0] - logits[1]).norm() < 1e-4 * logits[1].norm()


def test_a_norm_that_is_missing_without_being_fused_is_named(tensors, tmp_path):
    written = layouts.hugging_face(layouts.with_fused_norm(tensors), linear=True)
    folder = layouts.write_folder(tmp_path / "a", written, embedding_layer_norm_fused=False)
    assert "blocks.0.ln0" in refusal(lambda: load(folder))


def test_the_head_may_be_that_of_the_embedding(tensors, tmp_path):
    written = layouts.hugging_face(tensors, linear=True)
    del written["head.weight"]
    assert "head.weight" in refusal(lambda: load(layouts.write_folder(tmp_path / "a", written)))
    found = load(layouts.write_folder(tmp_path / "b", written, tie_word_embeddings=True))
    assert torch.equal(found.tensors["head.weight"], tensors["emb.weight"])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_of_web_rwkv(family, tmp_path):
    tensors = FAMILIES[family](layers=2, width=128, vocab=100)
    save_file(layouts.web_rwkv(tensors), tmp_path / "model.st")
    found = load(tmp_path / "model")
    assert found.family == family and same(found, tensors)


SQUARE = {
    "of one kind": {"w": 32, "a": 128, "v": 16, "g": 32},
    "one that is wider than the model": {"w": 128, "a": 160, "v": 128, "g": 128},
    "all": dict.fromkeys("wavg", 128),
}


LAYOUTS = ["pth", "st", "st as official", "folder", "linear maps", "fla"]
# Where all pairs are square, nothing in a .st file says that it is not as web-rwkv writes it.
SQUARE_CASES = [
    (layout, which) for layout in LAYOUTS for which in SQUARE if (layout, which) != (LAYOUTS[2], "all")
]


@pytest.mark.parametrize(("layout", "which"), SQUARE_CASES)
def test_low_rank_pairs_as_wide_as_the_model_are_read_as_they_lie(layout, which, tmp_path):
    """Their shape does not say how: the others do, or the layout."""
    ranks = SQUARE[which]
    tensors = random_checkpoint(2, 128, 100, ranks=ranks)
    if layout == "pth":
        write_pth(tmp_path / "model.pth", tensors)
    elif layout == "st":
        save_file(layouts.web_rwkv(tensors), tmp_path / "model.st")
    elif layout == "st as official":
        save_file(tensors, tmp_path / "model.st")
    elif layout == "fla":
        tensors = layouts.without_first_values(tensors)
        layouts.write_folder(tmp_path / "model", layouts.flash_linear_attention(tensors))
    else:
        tensors = layouts.without_first_values(tensors)
        layouts.write_folder(tmp_path / "model", layouts.hugging_face(tensors, layout == "linear maps"))
    assert same(load(tmp_path / "model"), tensors)


@pytest.mark.parametrize("suffix", ["pth", "st"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_tuned_state_may_be_merged_into_a_checkpoint(family, suffix, tmp_path):
    tensors = FAMILIES[family](layers=2, width=128, vocab=100)
    state = {f"blocks.{i}.att.time_state": torch.randn(2, 64, 64).bfloat16() for i in range(2)}
    if suffix == "pth":
        write_pth(tmp_path / "model.pth", tensors | state)
    else:
        save_file(layouts.web_rwkv(tensors | state), tmp_path / "model.st")
    assert same(load(tmp_path / f"model.{suffix}"), tensors | state)
    lacking = tensors | {"blocks.1.att.time_state": state["blocks.1.att.time_state"]}
    assert "blocks.0.att.time_state is missing" in refusal(lambda: from_tensors("a", lacking))


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"model_type": "llama"}, "llama"),
        ({"model_type": "rwkv6"}, "RWKV-6 from a .pth"),
        ({"norm_eps": 1e-6}, "norm_eps"),
        ({"head_size": 128}, "head_size"),
    ],
)
def test_a_config_of_what_cannot_be_run(tensors, tmp_path, config, named):
    written = layouts.hugging_face(tensors, linear=True)
    assert named in refusal(lambda: load(layouts.write_folder(tmp_path / "a", written, **config)))


def test_a_missing_part_is_named(tensors, tmp_path):
    folder = layouts.write_folder(tmp_path / "a", layouts.hugging_face(tensors, True), parts=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    assert "model-00002-of-00003.safetensors is missing" in refusal(lambda: load(folder))


def test_a_part_without_a_tensor_that_the_index_names(tensors, tmp_path):
    folder = layouts.write_folder(tmp_path / "a", layouts.hugging_face(tensors, True), parts=2)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.more"] = "model-00001-of-00002.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model.more is missing" in refusal(lambda: load(folder))


@pytest.mark.parametrize("place", ["../b.safetensors", "/etc/passwd"])
def test_an_index_names_no_file_outside_of_its_folder(tensors, tmp_path, place):
    folder = layouts.write_folder(tmp_path / "a", layouts.hugging_face(tensors, True), parts=2)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": place}}))
    assert "outside" in refusal(lambda: load(folder))


@pytest.mark.parametrize("text", ["", "[1]", "{"])
@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json"])
def test_damaged_json_is_named(tensors, tmp_path, file, text):
    folder = layouts.write_folder(tmp_path / "a", layouts.hugging_face(tensors, True), parts=2)
    (folder / file).write_text(text)
    assert file in refusal(lambda: load(folder))


def test_two_tensors_of_one_name_are_refused(tensors, tmp_path):
    write_pth(tmp_path / "a.pth", tensors | {"model.embeddings.weight": tensors["emb.weight"]})
    assert "two tensors emb.weight" in refusal(lambda: load(tmp_path / "a.pth"))
