"""The packed demo model: official layout, the same function in training and in the `rwkv` package.

A training step learns.
"""

import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from demo.training import draft, resume, train
from demo.training.batches import CANDIDATES, LENGTHS, make_batch, stream
from demo.training.evaluate import load, score
from demo.training.model import HEAD, TrainingModel
from demo.training.optimize import Team
from demo.training.pack import pack
from demo.training.train import Trainer, loss_of
from demo.training.vocabulary import collect
from rwkv_batch.bundled.codes import SIZE, codes, rows
from rwkv_batch.bundled.unpack import MODEL, is_packed, tensors
from rwkv_batch.config import EngineConfig
from rwkv_batch.runner.loading import load_weights

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def unpacked():
    return tensors()


def test_names_and_shapes_are_those_of_an_official_checkpoint(unpacked):
    layers = 1 + max(int(name.split(".")[1]) for name in unpacked if name.startswith("blocks."))
    width = unpacked["emb.weight"].shape[1]
    assert unpacked["emb.weight"].shape == unpacked["head.weight"].shape == (SIZE, width)
    assert not {"code_in", "code_out"} & unpacked.keys()
    assert {name for name in unpacked if name.startswith("blocks.0.att.v")} == {"blocks.0.att.value.weight"}
    for layer in range(layers):
        shape = {
            name.removeprefix(f"blocks.{layer}."): tuple(tensor.shape) for name, tensor in unpacked.items()
        }
        assert shape["att.r_k"] == (width // HEAD, HEAD)
        assert shape["att.x_r"] == shape["att.w0"] == shape["ffn.x_k"] == (1, 1, width)
        assert shape["att.w1"] == shape["att.w2"][::-1] and shape["att.w1"][0] == width
        assert shape["ffn.key.weight"] == (4 * width, width)
    assert all(t.dtype == torch.float32 and t.isfinite().all() for t in unpacked.values())


def test_the_packed_file_is_a_few_megabytes(tmp_path):
    assert MODEL.stat().st_size < 12e6
    known = np.arange(8800)
    model = TrainingModel(known)
    pack({name: tensor.detach() for name, tensor in model.state_dict().items()}, known, tmp_path / "m")
    assert (tmp_path / "m").stat().st_size < 12e6


def test_packing_keeps_known_rows_and_gives_all_others_their_code(tmp_path):
    torch.manual_seed(0)
    known = np.array([0, 3, 10, 500, 65529])
    model = TrainingModel(known, layers=2, width=64)
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    pack(state, known, tmp_path / "packed.safetensors")
    full = tensors(tmp_path / "packed.safetensors")
    for name, code in (("emb.weight", "code_in"), ("head.weight", "code_out")):
        own = state[name][torch.from_numpy(rows(known))]
        expected = own + torch.from_numpy(codes()) @ state[code]
        assert (full.pop(name) - expected).abs().max() <= 0.02 * expected.abs().max(), name
    for name, tensor in full.items():
        assert (tensor - state[name]).abs().max() <= state[name].abs().max() / 127, name


def test_the_unpacked_tensors_are_the_model_that_was_trained(tmp_path):
    torch.manual_seed(1)
    known = np.arange(300)
    model = TrainingModel(known, layers=2, width=64)
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    pack(state, known, tmp_path / "m")
    tokens = torch.tensor([[5, 299, 60000, 7]])
    with torch.no_grad():
        ours, unpacked = (m.hidden(tokens) @ m.head_rows().T for m in (model, load(tmp_path / "m", "cpu")))
    assert ours.shape == (1, 4, SIZE) and (ours - unpacked).norm() < 0.02 * ours.norm()


def test_its_file_is_loaded_by_name_as_other_models_are(tmp_path):
    """`--model-path`, `/loadmodel` and `python -m rwkv_batch.quantize` load it so, a copy of it too."""
    shutil.copy(MODEL, copy := tmp_path / "copy.safetensors")
    bundled = load_weights(None, EngineConfig(), None)
    for path in (MODEL, copy):
        named = load_weights(path, EngineConfig(), None)
        assert (named.name, named.fingerprint) == (bundled.name, bundled.fingerprint)
    assert not any(map(is_packed, (tmp_path, tmp_path / "none", Path(__file__))))


def test_ids_without_a_row_of_their_own_share_the_last():
    table = rows(np.array([0, 7, 9]))
    assert table[[0, 7, 9]].tolist() == [0, 1, 2] and table[8] == table[SIZE - 1] == 3


def test_codes_tell_all_ids_apart_and_know_a_space_and_a_capital():
    from pyrwkv_tokenizer import RWKVTokenizer

    signs = codes()
    assert signs.shape == (SIZE, 256) and np.allclose((signs**2).sum(1), 1)
    assert len(np.unique(np.packbits(signs > 0, axis=1), axis=0)) == SIZE
    spaced, plain, other = (RWKVTokenizer().encode(text)[0] for text in (" Anna", "Anna", " Emma"))
    assert signs[spaced] @ signs[plain] == pytest.approx(1 - 16 / 256)
    assert signs[spaced] @ signs[other] < 0.5


def test_batches_put_the_loss_on_the_answer_and_its_end():
    known = collect(3, sample=300)
    batch = next(stream(known, 3, LENGTHS[-1] * 2))
    real = int(batch.weights.sum())
    assert batch.tokens.shape[1] in LENGTHS and 0 < real < len(batch.weights)
    assert len(batch.candidates) == CANDIDATES and not set(known) - set(batch.candidates)
    assert (np.diff(batch.positions[:real]) > 0).all() and (np.diff(batch.candidates) > 0).all()
    targets = batch.candidates[batch.targets[:real]]
    ends = targets == 0
    assert ends.sum() == len(batch.tokens)
    inside = ~ends[:-1]
    following = batch.tokens.ravel()[batch.positions[: real - 1][inside] + 1]
    assert (following == targets[:-1][inside]).all()


def test_a_draft_begins_with_the_geometry_of_the_bundled_model(unpacked):
    known = np.arange(0, 3000, 3)
    made = draft.begun(known)
    assert made.blocks[-1].att.width == 128 and len(made.blocks) == 2
    with torch.no_grad():
        heads = made.head_rows(torch.from_numpy(known)), unpacked["head.weight"][known]
    near = torch.stack([(head @ head.T).flatten() for head in heads])
    assert heads[0].shape == (len(known), 128) and float(torch.corrcoef(near)[0, 1]) > 0.9


def inputs(model, seed=0):
    """A batch of random tokens."""
    torch.manual_seed(seed)
    tokens = torch.randint(0, SIZE, (2, 32))
    ids = torch.arange(0, SIZE, SIZE // CANDIDATES)
    positions, targets = torch.arange(0, 60, 3), torch.randint(0, CANDIDATES, (20,))
    return [tokens, positions, targets, torch.ones(20), ids, torch.zeros(CANDIDATES)]


def test_a_training_step_lowers_the_loss():
    torch.manual_seed(0)
    model = TrainingModel(np.arange(40), layers=2, width=64)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(4):
        loss = loss_of(model, *inputs(model))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_candidates_stand_for_the_whole_vocabulary():
    """The loss over drawn candidates is about that over all ids."""
    torch.manual_seed(0)
    known = np.arange(40)
    model = TrainingModel(known, layers=1, width=64)
    examples = [([5, 60, 7000], [9, 20_000 + i, 0]) for i in range(8)]
    batch = make_batch(examples, 32, known, np.random.default_rng(0))
    arrays = [
        torch.from_numpy(x)
        for x in (batch.tokens, batch.positions, batch.targets, batch.weights, batch.candidates)
    ]
    real = int(batch.weights.sum())
    with torch.no_grad():
        loss = loss_of(model, *arrays, torch.from_numpy(batch.shares))
        logits = model.hidden(arrays[0]).flatten(0, 1)[arrays[1][:real]] @ model.head_rows().T
        exact = torch.nn.functional.cross_entropy(logits, arrays[4][arrays[2][:real]])
    assert abs(loss - exact) < 0.01 * exact


def test_a_run_that_was_cut_off_goes_on_where_it_was(tmp_path):
    torch.manual_seed(0)
    known = np.arange(40)
    trainer = Trainer(TrainingModel(known, layers=2, width=64), Team(cuda=False))
    trainer.optimizer.rate.fill_(1e-3)
    for seed in range(3):
        trainer.update(inputs(trainer.model, seed))
    path = tmp_path / "run.state"
    resume.save(path, resume.TrainingProgress(3, 1.5, 1, known), trainer.trained, trainer.optimizer.moments())
    progress, weights, moments = resume.load(path)
    assert (progress.steps, progress.seconds, progress.calls, progress.known.tolist()) == (
        3,
        1.5,
        1,
        known.tolist(),
    )
    again = Trainer(TrainingModel(known, layers=2, width=64), Team(cuda=False))
    again.restore(progress.steps, weights, moments)
    again.optimizer.rate.fill_(1e-3)
    before = [float(t.update(inputs(t.model, 9))) for t in (trainer, again)]
    after = [float(t.update(inputs(t.model, 9))) for t in (trainer, again)]
    assert before[0] == pytest.approx(before[1], rel=1e-3) and after[0] == pytest.approx(after[1], rel=2e-2)
    for name, square in moments.items():
        kept = trainer.optimizer.moments()[name]
        assert square.shape == kept.shape and ((square > 0) == (kept > 0)).float().mean() > 0.5


def test_second_moments_are_kept_within_a_tenth():
    square = 10.0 ** torch.linspace(-17, 1, 500)
    kept = resume.unpacked(resume.packed(square))
    assert ((kept / square).log2().abs() < 0.13).all()
    assert resume.unpacked(resume.packed(torch.zeros(3))).tolist() == [0, 0, 0]


def test_a_call_that_ends_early_leaves_a_state_and_the_last_one_a_model(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train, "TrainingModel", partial(TrainingModel, layers=1, width=64))
    out = tmp_path / "model.safetensors"
    command = ["train", "--cpu", "--steps", "2", "--tokens", "512", "--exam", "0", "--out", str(out)]
    monkeypatch.setattr("sys.argv", [*command, "--call", "0"])
    train.main()
    state = out.with_suffix(".state")
    assert state.exists() and not out.exists()
    monkeypatch.setattr("sys.argv", command)
    train.main()
    assert out.exists() and not state.exists() and "going on after step 1" in capsys.readouterr().out


def test_the_parallel_score_is_greedy_decoding():
    from demo.training.samples import samples

    model = load(MODEL, "cpu")
    example = samples()[0]
    (good,) = score(model, [example])
    assert good.right and good.certainty > 0.95
    (wrong,) = score(model, [type(example)(example.kind, example.prompt, " 再见！")])
    assert not wrong.right and wrong.certainty < 0.05
