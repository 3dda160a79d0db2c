"""The tuned state and the LoRA of the demo model: their text, and that the server reads what was trained."""

import re
from random import Random

import pytest
import torch

from demo.training import tune_lora, tune_state
from demo.training.evaluate import load
from demo.training.facts import CAPITALS
from demo.training.model import HEAD
from demo.training.tuning import frozen, known_ids
from demo.training.unknown import COUNTRIES, unknown
from rwkv_batch.bundled.unpack import MODEL, tensors
from rwkv_batch.model.adapters import merge, reader
from rwkv_batch.model.adapters.parts import Scaling
from rwkv_batch.model.adapters.start_states import read_start_state
from rwkv_batch.model.checkpoint import from_tensors
from rwkv_batch.model.rwkv7 import RWKV7

pytestmark = pytest.mark.thorough

TOKENS = torch.tensor([[24, 1207, 310, 45, 7, 300, 12]])


def trained_logits(model):
    with torch.no_grad():
        return (model.hidden(TOKENS) @ model.head_rows().T)[0, -1]


def served_logits(checkpoint, start=None):
    model = RWKV7(checkpoint)
    states = model.new_states(1)
    if start is not None:
        states.wkv[0] = start.wkv
    return model.forward(TOKENS[0], [TOKENS.shape[1]], [0], states)[0]


def spread(parameters):
    torch.manual_seed(0)
    with torch.no_grad():
        for p in parameters:
            p.copy_((torch.randn_like(p) * 0.1).half())


def test_a_trained_state_is_read_as_it_was_trained(tmp_path):
    model = tune_state.model(known_ids())
    trained = [p for p in model.parameters() if p.requires_grad]
    spread(trained)
    tune_state.finish(model, known_ids(), tmp_path / "pirate.pth")
    layers, width = len(model.blocks), model.emb.weight.shape[1]
    assert [tuple(p.shape) for p in trained] == [(width // HEAD, HEAD, HEAD)] * layers
    start = read_start_state(tmp_path / "pirate.pth", layers, width, "vk")
    checkpoint = from_tensors("demo", tensors())
    ours, served = trained_logits(model), served_logits(checkpoint, start)
    assert (ours - served).norm() < 1e-4 * ours.norm()
    assert (ours - served_logits(checkpoint)).norm() > 0.005 * ours.norm()
    assert (tmp_path / "pirate.pth").stat().st_size < 400_000


def test_a_trained_adapter_is_read_as_it_was_trained(tmp_path):
    model = tune_lora.model(known_ids())
    spread(p for p in model.parameters() if p.requires_grad)
    tune_lora.finish(model, known_ids(), tmp_path / "capitals.pth")
    checkpoint = from_tensors("demo", tensors())
    adapter = reader.read(tmp_path / "capitals.pth", checkpoint)
    assert len(adapter.parts) == 6 * len(model.blocks) and not adapter.experts
    merged = merge.merge(checkpoint, adapter, Scaling(alpha=tune_lora.ALPHA))
    ours, served = trained_logits(model), served_logits(merged)
    assert (ours - served).norm() < 1e-4 * ours.norm()
    assert (ours - trained_logits(load(MODEL, "cpu"))).norm() > 0.005 * ours.norm()
    assert (tmp_path / "capitals.pth").stat().st_size < 700_000


@pytest.mark.parametrize("tuning", [tune_state, tune_lora], ids=lambda module: module.__name__)
def test_a_tuning_that_is_cut_off_goes_on(tuning, tmp_path, monkeypatch, capsys):
    out = tmp_path / "tuned.pth"
    command = ["x", "--cpu", "--steps", "2", "--tokens", "512", "--exam", "0", "--out", str(out)]
    monkeypatch.setattr("sys.argv", [*command, "--call", "0"])
    tuning.main()
    assert out.with_suffix(".state").exists() and not out.exists()
    monkeypatch.setattr("sys.argv", command)
    tuning.main()
    assert "going on after step 1" in capsys.readouterr().out
    tuned = torch.load(out, weights_only=True)
    assert all(t.dtype == torch.float16 and t.isfinite().all() for t in tuned.values())
    assert any(t.count_nonzero() for name, t in tuned.items() if not name.endswith("lora_A"))


def test_only_the_new_tensors_are_trained():
    assert not [name for name, p in frozen().named_parameters() if p.requires_grad]
    model = tune_lora.model(known_ids())
    names = {name for name, p in model.named_parameters() if p.requires_grad}
    assert names and all(re.search(r"\.lora_[AB]$", name) for name in names)


def test_a_pirate_answers_in_the_language_of_the_question():
    rng = Random(3)
    for language, words in tune_state.PIRATE.items():
        for _ in range(100):
            question, _ = tune_state.asked(rng, language)
            assert bool(re.search(r"[\u4e00-\u9fff]", question)) == (language == "zh"), question
        made = [e for e in (tune_state.pirate(rng) for _ in range(200)) if words[1].strip() in e.answer]
        assert len(made) > 20 and all(words[0].strip() in e.answer for e in made)


def test_the_new_capitals_are_new_and_those_of_the_countries():
    known = {row[0] for row in CAPITALS}
    assert len(tune_lora.CAPITALS) == 10 and not known & {row[0] for row in tune_lora.CAPITALS}
    assert {row[0] for row in tune_lora.CAPITALS} <= {row[0] for row in COUNTRIES}
    by_country = {row[0]: row for row in tune_lora.CAPITALS}
    assert by_country["Iceland"][1::2] == ("Reykjavik", "雷克雅未克", "Reykjavik", "Reykjavík")
    rng = Random(4)
    asked = {unknown(rng)[0] for _ in range(3000)}
    assert "What is the capital of Nepal?" in asked, "the model alone says that it does not know"
    plain = [e.prompt for e in (tune_lora.example(rng) for _ in range(1500)) if e.kind != "capital"]
    assert plain and not [p for p in plain for country in tune_lora.NEW if country in p]
