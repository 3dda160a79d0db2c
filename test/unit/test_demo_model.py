"""The packed demo model: official layout, the same function in training and in the `rwkv` package.

A training step learns.
"""

import numpy as np
import pytest
import torch

from demo.batches import LENGTHS, stream
from demo.evaluate import load, score
from demo.model import HEAD, LAYERS, WIDTH, TrainingModel
from demo.pack import pack
from demo.train import loss_of
from demo.unpack import MODEL, ROWS, tensors
from demo.vocabulary import SIZE, collect, rows


@pytest.fixture(scope="module")
def unpacked():
    return tensors()


def test_names_and_shapes_are_those_of_an_official_checkpoint(unpacked):
    assert unpacked["emb.weight"].shape == unpacked["head.weight"].shape == (ROWS, WIDTH)
    assert {name for name in unpacked if name.startswith("blocks.0.att.v")} == {"blocks.0.att.value.weight"}
    for layer in range(LAYERS):
        shape = {
            name.removeprefix(f"blocks.{layer}."): tuple(tensor.shape) for name, tensor in unpacked.items()
        }
        assert shape["att.r_k"] == (WIDTH // HEAD, HEAD)
        assert shape["att.x_r"] == shape["att.w0"] == shape["ffn.x_k"] == (1, 1, WIDTH)
        assert shape["att.w1"] == shape["att.w2"][::-1] and shape["att.w1"][0] == WIDTH
        assert shape["ffn.key.weight"] == (4 * WIDTH, WIDTH)
    assert all(t.dtype == torch.float32 and t.isfinite().all() for t in unpacked.values())


def test_the_packed_file_is_a_few_megabytes():
    assert MODEL.stat().st_size < 8e6


def test_packing_keeps_known_rows_and_shares_one_for_all_others(tmp_path):
    torch.manual_seed(0)
    model, known = TrainingModel(5), np.array([0, 3, 10, 500, 65529])
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    pack(state, known, tmp_path / "packed.safetensors")
    full = tensors(tmp_path / "packed.safetensors")
    for name, compact in state.items():
        expected = compact
        if name in ("emb.weight", "head.weight"):
            assert torch.equal(full[name][1], full[name][65535])
            full[name], expected = full[name][torch.from_numpy(known)], compact[:-1]
        assert (full[name] - expected).abs().max() <= compact.abs().max() / 127, name
    assert full.keys() == state.keys()


def test_ids_without_a_row_of_their_own_share_the_last():
    table = rows(np.array([0, 7, 9]))
    assert table[[0, 7, 9]].tolist() == [0, 1, 2] and table[8] == table[SIZE - 1] == 3


def test_batches_put_the_loss_on_the_answer_and_its_end():
    from pyrwkv_tokenizer import RWKVTokenizer

    tokenizer = RWKVTokenizer()
    known = collect(tokenizer, 3, 300)
    batch = next(stream(known, 3, LENGTHS[-1] * 2))
    real = int(batch.weights.sum())
    assert batch.tokens.shape[1] in LENGTHS and 0 < real < len(batch.weights)
    assert (np.diff(batch.positions[:real]) > 0).all()
    ends = batch.targets[:real] == rows(known)[0]
    assert ends.sum() == len(batch.tokens)
    inside = ~ends[:-1]
    following = batch.tokens.ravel()[batch.positions[: real - 1][inside] + 1]
    assert (following == batch.targets[: real - 1][inside]).all()


def test_a_training_step_lowers_the_loss():
    torch.manual_seed(0)
    model, known = TrainingModel(40), 40
    tokens = torch.randint(0, known, (2, 32))
    positions = torch.arange(0, 60, 3)
    targets, weights = torch.randint(0, known, (20,)), torch.ones(20)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(4):
        loss = loss_of(model, 100, tokens, positions, targets, weights)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_the_parallel_score_is_greedy_decoding():
    from demo.evaluate import samples

    model = load(MODEL, "cpu")
    example = samples()[0]
    (good,) = score(model, [example])
    assert good.right and good.certainty > 0.95
    (wrong,) = score(model, [type(example)(example.kind, example.prompt, " 再见！")])
    assert not wrong.right and wrong.certainty < 0.05
