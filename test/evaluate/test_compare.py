"""`evaluate compare`: weight formats against fp32, with logits by the formulas in fp64."""

import json
from itertools import pairwise

import pytest
import torch
from checkpoints import tiny, write_pth
from plain_rwkv7 import plain_logits

from rwkv_batch.evaluate.__main__ import main
from rwkv_batch.evaluate.asks import TOKENIZER
from rwkv_batch.evaluate.compare import ReadText, compare
from rwkv_batch.model.quantization.quantize import quantize

WEIGHTS = tiny(vocab=300)
TEXTS = [ReadText([5, 6, 7, 8, 9, 10]), ReadText([1, 2, 3, 4, 5], first=3)]


def every_logprob(tensors: dict[str, torch.Tensor], text: ReadText) -> torch.Tensor:
    places = range(text.first, len(text.tokens))
    return torch.stack([plain_logits(tensors, text.tokens[:place]).log_softmax(0) for place in places])


@pytest.mark.parametrize("name", ["fp8", "int4"])
def test_figures_are_those_of_the_formulas(name):
    found = {record["weights"]: record for record in compare(WEIGHTS, TEXTS, [name], head=False).records}
    packed = quantize(WEIGHTS, name, head=False)
    rounded = dict(packed.tensors) | {key: weight.dequantize() for key, weight in packed.packed.items()}
    p, q = (
        torch.cat([every_logprob(tensors, text) for text in TEXTS])
        for tensors in (dict(WEIGHTS.tensors), rounded)
    )
    targets = torch.tensor([token for text in TEXTS for token in text.tokens[text.first :]])
    here = found[name]
    assert here["tokens"] == found["fp32"]["tokens"] == len(targets) == 7
    assert here["kl"] == pytest.approx(float((p.exp() * (p - q)).sum(1).mean()), rel=1e-2, abs=1e-6)
    nll = [float(-x.gather(1, targets[:, None]).mean()) for x in (p, q)]
    for record, value in zip((found["fp32"], here), nll, strict=True):
        assert record["perplexity"] == pytest.approx(torch.tensor(value).exp().item(), rel=1e-4)
    assert here["percent_above"] == pytest.approx(100 * (nll[1] - nll[0]), rel=0.05, abs=0.01)
    assert here["agreement"] == float((p.argmax(1) == q.argmax(1)).double().mean())
    assert found["fp32"]["kl"] == 0 and found["fp32"]["agreement"] == 1
    assert here["mb"] < found["fp32"]["mb"]


def test_fp8_is_measured_as_it_multiplies_many_rows_too():
    one, few, many = compare(WEIGHTS, TEXTS, ["fp8"]).records
    assert many["weights"] == "fp8, many rows" and few["kl"] < many["kl"] < 0.1
    assert many["mb"] == few["mb"] and one["tokens"] == many["tokens"]


def test_a_long_text_is_read_in_pieces():
    torch.manual_seed(0)
    long = torch.randint(1, 300, (600,)).tolist()
    whole = compare(WEIGHTS, [ReadText(long)], ["fp5"]).records
    cuts = (1, 2, 256, 257, 513, 600)
    parts = [ReadText(long[:stop], first=start) for start, stop in pairwise(cuts)]
    for one, other in zip(whole, compare(WEIGHTS, parts, ["fp5"]).records, strict=True):
        assert one["tokens"] == 599 and one.pop("weights") == other.pop("weights")
        assert one == pytest.approx(other, rel=1e-3, abs=1e-5)


def test_the_bundled_model_needs_no_arguments(capsys, tmp_path):
    out = tmp_path / "out.jsonl"
    assert main(["compare", "--tokens", "60", "--weights", "int8,int4", "--jsonl", str(out)]) == 0
    assert "| agreement" in capsys.readouterr().out
    *records, _ = map(json.loads, out.read_text().splitlines())
    assert [record["weights"] for record in records] == ["fp32", "int8", "int4"]
    for record, most in zip(records, (0, 0.5, 3), strict=True):
        assert record["tokens"] >= 60 and record["agreement"] == 1
        assert abs(record["percent_above"]) <= most and record["perplexity"] < 1.1


def test_a_file_is_read_by_a_model_of_ones_own(tmp_path, capsys):
    model = write_pth(tmp_path / "m.pth", dict(tiny(vocab=65536).tensors))
    text = tmp_path / "text.txt"
    text.write_text("The capital of France is Paris. " * 20)
    count = len(TOKENIZER.encode(text.read_text()))
    flags = ["--model-path", str(model), "--weights", "nf4"]
    for tokens, wanted in ((30, 30), (10_000, count)):
        out = tmp_path / "out.jsonl"
        assert main(["compare", str(text), *flags, "--tokens", str(tokens), "--jsonl", str(out)]) == 0
        assert json.loads(out.read_text().splitlines()[1])["tokens"] == wanted
    assert main(["compare", *flags]) == 2 and "name a file" in capsys.readouterr().err
    assert main(["compare", str(text), *flags[:2], "--weights", "int3"]) == 2
    assert "int4-128" in capsys.readouterr().err
