"""MoLE files as RWKV-LM-RLHF writes them, against experts that are run one by one in a plain fp64 model."""

import pytest
import torch
from adapter_files import (
    EXPERT_SHAPES,
    FACTOR,
    LAYERS,
    TOKENS,
    VOCAB,
    WIDTH,
    logits_of,
    lora,
    made,
    mixed,
    mole,
    off,
    refusal,
)
from checkpoints import write_pth
from plain_rwkv7 import plain_logits

from bench.make_checkpoint import random_checkpoint, random_rwkv6, random_rwkv7a
from rwkv_batch.config import EngineConfig
from rwkv_batch.engine.engine import Engine
from rwkv_batch.model.adapters.merge import merge
from rwkv_batch.model.adapters.parts import Scaling
from rwkv_batch.model.adapters.reader import read
from rwkv_batch.model.checkpoint import from_tensors
from rwkv_batch.model.rwkv7 import RWKV7
from rwkv_batch.runner import backends
from rwkv_batch.wire.protocol import Sampling

TOLERANCE = 1e-4  # relative to the size of the whole tensor
RULES = ("topk0", "shared")


@pytest.fixture(scope="module")
def base():
    return {name: tensor.float() for name, tensor in random_checkpoint(LAYERS, WIDTH, VOCAB).items()}


@pytest.fixture(scope="module")
def checkpoint(base):
    return from_tensors("base", base)


def expert_weight(base, tensors, ffn, expert, name):
    """W of one expert, in whole."""
    w = base[f"{ffn}{name}.weight"].double()
    prefix = f"{ffn}expert_{expert}.{name}."
    if prefix + "bone_expert_0" not in tensors:
        pair = tensors[prefix + "lora_B_expert_0"].double(), tensors[prefix + "lora_A_expert_0"].double()
        return w + FACTOR * pair[0] @ pair[1]
    d, result = tensors[prefix + "bone_expert_0"].double(), w.clone()
    for a in range(0, w.shape[0], 16):
        for b in range(0, w.shape[1], 16):
            block = w[a : a + 16, b : b + 16]
            result[a : a + 16, b : b + 16] += block @ d[b // 16] + d[b // 16]
    return result


def shares(rule, scores, active):
    """How much of each expert, as a list of (expert, share)."""
    if rule == "topk0":
        scores = [0.0, *scores]
        best = sorted(range(len(scores)), key=lambda e: -scores[e])[:active]
        parts = torch.tensor([scores[e] for e in best], dtype=torch.double).softmax(0)
        return list(zip(best, parts, strict=True))
    best = sorted(range(len(scores)), key=lambda e: -scores[e])[: active - 1]
    parts = torch.tensor([scores[e] for e in best], dtype=torch.double).softmax(0)
    return [(0, 1.0), *((e, part) for e, part in zip(best, parts, strict=True) if e > 0)]


def plain(base, tensors, rule, active, product=None):
    """Logits with every expert's own weights, token by token."""
    weights = {
        (layer, expert, name): expert_weight(base, tensors, f"blocks.{layer}.ffn.", expert, name)
        for layer in range(LAYERS)
        for expert in range(int(tensors["blocks.0.ffn.moe_info"][0]))
        for name in EXPERT_SHAPES
    }

    def channel_mix(layer, x):
        router = f"blocks.{layer}.ffn.router.linear."
        scores = (
            tensors[router + "weight"].double() @ x + tensors.get(router + "bias", torch.zeros(1)).double()
        )
        return sum(
            share * (weights[layer, e, "value"] @ (weights[layer, e, "key"] @ x).relu() ** 2)
            for e, share in shares(rule, scores.tolist(), active)
        )

    return plain_logits(base, TOKENS.tolist(), product, channel_mix)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("kind", "count", "active", "bias"),
    [
        ("lora", 4, 2, False),
        ("lora", 4, 1, True),
        ("lora", 3, 3, True),
        ("bone", 4, 3, False),
        ("lora", 2, 2, False),
    ],
)
def test_the_experts_are_mixed_by_the_rule(rule, kind, count, active, bias, base, checkpoint, tmp_path):
    tensors = mole(kind, count, active, bias and rule == "shared")
    file = write_pth(tmp_path / "experts.pth", tensors)
    merged = mixed(checkpoint, file, rule, None if kind == "bone" else FACTOR)
    logits, expected = logits_of(merged), plain(base, tensors, rule, active)
    assert off(logits, expected) < TOLERANCE
    assert off(logits_of(checkpoint), expected) > 0.02
    assert merged.name == "base+experts" and merged.fingerprint != checkpoint.fingerprint


def test_the_other_rule_is_another_model_and_warned_of(checkpoint, tmp_path, caplog):
    file = write_pth(tmp_path / "a.pth", mole("lora", 4, 2))
    one = mixed(checkpoint, file, "topk0")
    assert not caplog.text
    other = mixed(checkpoint, file, "shared")
    assert "topk0" in caplog.text and str(file) in caplog.text
    assert off(logits_of(one), logits_of(other)) > 0.05
    assert one.fingerprint != other.fingerprint


def test_a_router_with_a_bias_is_not_that_of_topk0(checkpoint, tmp_path, caplog):
    file = write_pth(tmp_path / "a.pth", mole("lora", 4, 2, bias=True))
    assert "--mole-router shared" in refusal(lambda: mixed(checkpoint, file, "topk0"))
    mixed(checkpoint, file, "shared")
    assert not caplog.text


def test_attention_and_small_tensors_of_the_same_file_are_merged(base, checkpoint, tmp_path):
    prefixes = [f"blocks.{layer}.att.{name}" for layer in range(LAYERS) for name in ("key", "output")]
    pairs, x_k = made(base, lora, prefixes), torch.full((1, 1, WIDTH), 0.25)
    tensors = mole("lora", 4, 2) | pairs | {"blocks.1.ffn.x_k": x_k}

    def product(name, x):
        prefix = name.removesuffix(".weight")
        y = base[name].double() @ x
        if prefix not in prefixes:
            return y
        return y + FACTOR * pairs[f"{prefix}.lora_B"].double() @ (pairs[f"{prefix}.lora_A"].double() @ x)

    merged = mixed(checkpoint, write_pth(tmp_path / "a.pth", tensors), "topk0")
    expected = plain(base | {"blocks.1.ffn.x_k": x_k}, tensors, "topk0", 2, product)
    assert off(logits_of(merged), expected) < TOLERANCE


def test_an_expert_may_have_its_own_number_at_the_end(checkpoint, tmp_path):
    tensors = mole("lora", 3, 2)
    numbered = {}
    for key, tensor in tensors.items():
        expert = key.split("expert_")[1][0] if ".expert_" in key else "0"
        numbered[
            key.removesuffix("_expert_0") + f"_expert_{expert}" if key.endswith("_expert_0") else key
        ] = tensor
    assert numbered.keys() != tensors.keys()
    files = write_pth(tmp_path / "a.pth", tensors), write_pth(tmp_path / "b.pth", numbered)
    one, other = (logits_of(mixed(checkpoint, file, "topk0")) for file in files)
    assert torch.equal(one, other)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", ["lora", "bone"])
def test_rows_do_not_see_each_other(kind, rule, checkpoint, tmp_path):
    file = write_pth(tmp_path / "a.pth", mole(kind, 4, 2))
    model = RWKV7(mixed(checkpoint, file, rule, None if kind == "bone" else FACTOR))
    lengths, slots = [1, 33, 1, 5, 17, 1], [4, 0, 2, 5, 1, 3]
    tokens = torch.randint(1, VOCAB, (sum(lengths),), generator=torch.Generator().manual_seed(3))
    together, states = model.new_states(6), model.new_states(6)
    logits = model.forward(tokens, lengths, slots, together)
    for row, part in enumerate(tokens.split(lengths)):
        alone = model.forward(part, [lengths[row]], [slots[row]], states)
        assert torch.equal(alone[0], logits[row])


FFN = "blocks.1.ffn."
KEY = f"{FFN}expert_2.key.lora_A_expert_0"
E2 = f"{FFN}expert_2"


def without(tensors, part):
    return {key: tensor for key, tensor in tensors.items() if part not in key}


def renamed(tensors, old, new):
    return {key.replace(old, new): tensor for key, tensor in tensors.items()}


WRONG = {
    "a rule without a router": (lambda t: without(t, ".ffn."), "--mole-router"),
    "a key renamed": (lambda t: renamed(t, KEY, KEY + "x"), KEY),
    "a router renamed": (lambda t: renamed(t, "router.linear", "router.Linear"), "router"),
    "no router": (lambda t: without(t, f"{FFN}router.linear.weight"), FFN),
    "no number of experts": (lambda t: without(t, f"{FFN}moe_info"), FFN),
    "a layer without": (lambda t: without(t, FFN), FFN),
    "a layer too many": (lambda t: t | {"blocks.2.ffn.moe_info": torch.ones(2)}, "blocks.2"),
    "half a pair": (lambda t: without(t, KEY), f"{E2}.key"),
    "an expert missing": (lambda t: without(t, E2), E2),
    "an expert too many": (lambda t: t | {f"{FFN}expert_4.key.lora_A_expert_0": t[KEY]}, "expert_4"),
    "the number of another": (lambda t: t | {f"{E2}.key.lora_A_expert_1": t[KEY]}, "A_expert_1"),
    "two names": (lambda t: t | {f"{E2}.key.lora_A_expert_2": t[KEY]}, "A_expert_2"),
    "too many active": (lambda t: t | {f"{FFN}moe_info": torch.tensor([4.0, 5.0])}, "moe_info"),
    "half an expert active": (lambda t: t | {f"{FFN}moe_info": torch.tensor([4.0, 1.5])}, "moe_info"),
    "a router of five": (lambda t: t | {f"{FFN}router.linear.weight": torch.ones(4, WIDTH)}, "router"),
    "a bias of five": (lambda t: t | {f"{FFN}router.linear.bias": torch.ones(4)}, "router"),
    "another width": (lambda t: t | {KEY: torch.ones(4, 96)}, f"{E2}.key.lora_A"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_file_that_does_not_fit_is_refused_by_name(fault, base, checkpoint, tmp_path):
    spoil, named = WRONG[fault]
    file = write_pth(tmp_path / "a.pth", spoil(mole("lora", 4, 2) | made(base, lora, ["head"])))
    message = refusal(lambda: mixed(checkpoint, file, "topk0"))
    assert named in message and str(file) in message


def test_the_rule_is_asked_for(checkpoint, tmp_path):
    file = write_pth(tmp_path / "a.pth", mole("lora", 4, 2))
    message = refusal(lambda: mixed(checkpoint, file, None))
    assert "--mole-router" in message and str(file) in message


def test_a_scaling_is_needed_for_lora_experts_only(checkpoint, tmp_path):
    file = write_pth(tmp_path / "a.pth", mole("lora", 4, 2))
    assert "--adapter-alpha" in refusal(lambda: mixed(checkpoint, file, "topk0", None))
    by_alpha = merge(checkpoint, read(file, checkpoint), Scaling(alpha=4 * FACTOR), "topk0")  # of rank 4
    assert by_alpha.fingerprint == mixed(checkpoint, file, "topk0").fingerprint
    file = write_pth(tmp_path / "b.pth", mole("bone", 4, 2))
    assert "--adapter-alpha" in refusal(lambda: mixed(checkpoint, file, "topk0"))


@pytest.mark.parametrize("make", [random_rwkv6, random_rwkv7a])
def test_other_families_have_no_experts(make, tmp_path):
    file = write_pth(tmp_path / "a.pth", mole("lora", 4, 2))
    assert "RWKV-7" in refusal(lambda: mixed(from_tensors("x", make(LAYERS, WIDTH, VOCAB)), file, "topk0"))


def test_an_engine_mixes_experts(base, checkpoint, tmp_path):
    tensors = mole("lora", 4, 2)
    file = write_pth(tmp_path / "experts.pth", tensors)
    fields = {"device": "cpu", "max_rows": 2, "l1": 0, "prefix_cache_mb": 0, "adapter": str(file)}
    engine = Engine(checkpoint, adapter_scaling=FACTOR, mole_router="shared", **fields)
    (row,) = engine.generate([TOKENS.tolist()], max_tokens=1, stop_ids=[], sampling=Sampling(temperature=0))
    likeliest = int(plain(base, tensors, "shared", 2).argmax())
    assert row.text == engine.tokenizer.token_bytes(likeliest).decode(errors="replace")
    assert engine.info.model == "base+experts"
    refusal(lambda: Engine(checkpoint, adapter_scaling=FACTOR, **fields))
    refusal(lambda: Engine(checkpoint, device="cpu", mole_router="shared"))


def test_a_gpu_runs_experts_by_torch_operations(checkpoint, tmp_path, monkeypatch, caplog):
    """Own kernels refuse them, as they refuse other families."""
    weights = mixed(checkpoint, write_pth(tmp_path / "a.pth", mole("lora", 4, 2)), "topk0")
    monkeypatch.setattr(backends, "TorchRunner", lambda *_: "torch")
    assert backends.create_runner(weights, [torch.device("cuda")], EngineConfig()) == "torch"
    assert "MoLE" in caplog.text
