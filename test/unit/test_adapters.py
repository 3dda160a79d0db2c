"""Adapters of every kind, made as their trainers write them, merged and compared with plain fp64 formulas.

The effective weights are formed here, by other code, and run through the `rwkv` package; what is additive is
also run beside the weights, as in training, by a plain fp64 model.
"""

import json
import math

import pytest
import torch
from adapter_files import (
    FACTOR,
    LAYERS,
    MAKERS,
    PREFIXES,
    SCALED,
    TOKENS,
    VOCAB,
    WIDTH,
    adapted,
    logits_of,
    lora,
    made,
    miss,
    off,
    refusal,
)
from checkpoints import write_pth
from plain_rwkv7 import plain_logits
from safetensors.torch import save_file

from bench.make_checkpoint import random_checkpoint, random_rwkv6
from rwkv_batch.engine.engine import Engine
from rwkv_batch.model.adapters.merge import merge
from rwkv_batch.model.adapters.parts import Scaling
from rwkv_batch.model.adapters.reader import read
from rwkv_batch.model.checkpoint import from_tensors
from rwkv_batch.model.files import CheckpointError
from rwkv_batch.model.rwkv6 import RWKV6
from rwkv_batch.wire.protocol import Sampling

TOLERANCE = 1e-4  # against a reference, relative to the size of the whole tensor
CLOSE = 1e-5  # between two ways to the same weights


@pytest.fixture(scope="module")
def base():
    return {name: tensor.float() for name, tensor in random_checkpoint(LAYERS, WIDTH, VOCAB).items()}


@pytest.fixture(scope="module")
def checkpoint(base):
    return from_tensors("base", base)


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """Logits of weights after TOKENS, by the package."""
    import reference  # sets what the package reads when it is imported

    def logits(tensors):
        file = write_pth(tmp_path_factory.mktemp("package") / "m.pth", tensors)
        return reference.RWKV(str(file.with_suffix("")), "cpu fp32").forward(TOKENS.tolist(), None)[0]

    return logits


# What the formulas say, element by element or with explicit blocks, in fp64.


def lora_weight(w, t):
    return w + FACTOR * t["lora_B"] @ t["lora_A"]


def dora_weight(w, t):
    v = lora_weight(w, t)
    columns = [
        t["lora_M"][0, j] * v[:, j] / (math.sqrt((v[:, j] ** 2).sum()) + 1e-6) for j in range(v.shape[1])
    ]
    return torch.stack(columns, 1)


def bone_weight(w, t):
    (d,) = t.values()
    r, result = d.shape[-1], w.clone()
    for a in range(0, w.shape[0], r):
        for b in range(0, w.shape[1], r):
            block = w[a : a + r, b : b + r]
            result[a : a + r, b : b + r] = block + block @ d[b // r] + d[b // r]
    return result


def disha_weight(w, t):
    (d,) = t.values()
    return torch.stack([w[:, j] + d[j % len(d)] for j in range(w.shape[1])], 1)


def miss_weight(w, t):
    (d,) = t.values()
    return torch.stack([w[:, j] + FACTOR * d[:, j % d.shape[1]] for j in range(w.shape[1])], 1)


# The runtime forms of training: what is added to `W x`.


def lora_beside(x, t):
    return FACTOR * (t["lora_B"] @ (t["lora_A"] @ x))


def disha_beside(x, t):  # RWKV-PEFT pads x, sums its runs and multiplies with D
    (d,) = t.values()
    padded = torch.nn.functional.pad(x, (0, -len(x) % len(d)))
    return padded.view(-1, len(d)).sum(0) @ d


def miss_beside(x, t):  # rwkv_lightning_cuda: S[j] = sum of x[k] with k mod rank = j
    (d,) = t.values()
    rank = d.shape[1]
    return FACTOR * d @ torch.stack([x[j::rank].sum() for j in range(rank)])


KINDS = {
    "lora": (lora_weight, lora_beside),
    "dora": (dora_weight, None),
    "bone": (bone_weight, None),
    "disha-3d": (bone_weight, None),
    "disha-2d": (disha_weight, disha_beside),
    "miss": (miss_weight, miss_beside),
}


def parts_of(tensors, prefix):
    start = prefix + "."
    return {k.removeprefix(start): t.double() for k, t in tensors.items() if k.startswith(start)}


def effective(base, tensors, formula):
    """The weights with the adapter in them, in fp32."""
    changed = {f"{p}.weight": formula(base[f"{p}.weight"].double(), parts_of(without_weight(tensors), p))
               for p in (*PREFIXES, "head")}  # fmt: skip
    return base | {name: tensor.float() for name, tensor in changed.items()}


def without_weight(tensors):
    return {key.replace(".weight.D", ".D"): tensor for key, tensor in tensors.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_a_merged_adapter_gives_the_logits_of_its_effective_weights(
    kind, base, checkpoint, package, tmp_path
):
    formula, _ = KINDS[kind]
    tensors = made(base, MAKERS[kind])
    file = write_pth(tmp_path / "capitals.pth", tensors)
    merged = adapted(checkpoint, file, FACTOR if kind in SCALED else None)
    logits, expected = logits_of(merged), package(effective(base, tensors, formula))
    assert off(logits, expected) < TOLERANCE
    assert off(logits_of(checkpoint), expected) > 0.05  # the adapter is no small matter
    assert merged.name == "base+capitals" and merged.fingerprint != checkpoint.fingerprint


@pytest.mark.parametrize("kind", [kind for kind, (_, beside) in KINDS.items() if beside])
def test_what_is_merged_is_what_was_trained_beside_the_weights(kind, base, checkpoint, tmp_path):
    beside = KINDS[kind][1]
    tensors = made(base, MAKERS[kind])
    merged = adapted(checkpoint, write_pth(tmp_path / "a.pth", tensors), FACTOR if kind in SCALED else None)

    def product(name, x):
        return base[name].double() @ x + beside(
            x, parts_of(without_weight(tensors), name.removesuffix(".weight"))
        )

    assert off(logits_of(merged), plain_logits(base, TOKENS.tolist(), product)) < TOLERANCE


def test_the_plain_model_is_that_of_the_package(base, package):
    assert off(package(base), plain_logits(base, TOKENS.tolist())) < TOLERANCE


def test_pissa_takes_out_what_it_began_with(base, checkpoint, package, tmp_path):
    begun, learned = made(base, lora), made(base, lora, seed=1)
    init = {"model." + key.replace(".lora_", ".init_lora_"): tensor for key, tensor in begun.items()}
    files = write_pth(tmp_path / "a.pth", learned), write_pth(tmp_path / "init.pth", init)
    weights = dict(base)
    for p in (*PREFIXES, "head"):
        old, new = parts_of(begun, p), parts_of(learned, p)
        w = base[f"{p}.weight"].double() - old["lora_B"] @ old["lora_A"] + new["lora_B"] @ new["lora_A"]
        weights[f"{p}.weight"] = w.float()
    logits = logits_of(adapted(checkpoint, files[0], None, init=files[1]))
    assert off(logits, package(weights)) < TOLERANCE
    with pytest.raises(CheckpointError, match="--adapter-init"):  # without it, it looks like LoRA
        adapted(checkpoint, files[0], None)


def test_whole_tensors_take_the_place_of_the_models(base, checkpoint, package, tmp_path):
    """Of all shapes, beside LoRA in the same file, as hybrid training writes it."""
    other = random_checkpoint(LAYERS, WIDTH, VOCAB, seed=1)
    whole = [name for name in base if ".x_" in name or name.startswith(("ln_out", "emb", "blocks.1.att.w"))]
    tensors = made(base, lora) | {name: other[name].view(1, 1, -1) if other[name].dim() == 1 else other[name]
                                  for name in whole}  # fmt: skip
    merged = adapted(checkpoint, write_pth(tmp_path / "a.pth", tensors))
    weights = effective(base, made(base, lora), lora_weight) | {name: other[name].float() for name in whole}
    assert off(logits_of(merged), package(weights)) < TOLERANCE


def test_alpha_is_divided_by_the_rank_of_each_tensor(base, checkpoint, tmp_path):
    tensors = made(base, lora, PREFIXES[:6])
    tensors |= made(base, lambda draw, *shape: lora(draw, *shape, rank=8), PREFIXES[6:])
    file = write_pth(tmp_path / "a.pth", tensors)
    by_hand = {k: t * (12 / t.shape[1]) if k.endswith("lora_B") else t for k, t in tensors.items()}
    one = merge(checkpoint, read(file, checkpoint), Scaling(alpha=12))
    assert (
        off(logits_of(one), logits_of(adapted(checkpoint, write_pth(tmp_path / "b.pth", by_hand), 1.0)))
        < CLOSE
    )


@pytest.mark.parametrize("suffix", [".safetensors", ".st"])
def test_a_safetensors_file_is_the_same_adapter(suffix, base, checkpoint, tmp_path):
    tensors = made(base, lora)
    save_file(tensors, tmp_path / f"a{suffix}")
    pth = write_pth(tmp_path / "a.pth", {f"model.{key}": tensor for key, tensor in tensors.items()})
    one, other = (adapted(checkpoint, file) for file in (tmp_path / f"a{suffix}", pth))
    assert one.fingerprint == other.fingerprint
    assert torch.equal(logits_of(one), logits_of(other))


def test_an_adapter_of_rwkv6(tmp_path):
    base = {name: tensor.float() for name, tensor in random_rwkv6(LAYERS, WIDTH, VOCAB).items()}
    checkpoint = from_tensors("base", base)
    prefixes = ["blocks.0.att.gate", "blocks.1.ffn.receptance"]
    tensors = made(base, lora, prefixes)
    merged = adapted(checkpoint, write_pth(tmp_path / "a.pth", tensors))
    changed = {
        f"{p}.weight": lora_weight(base[f"{p}.weight"].double(), parts_of(tensors, p)).float()
        for p in prefixes
    }
    assert off(logits_of(merged, RWKV6), logits_of(from_tensors("x", base | changed), RWKV6)) < CLOSE


def test_a_folder_of_rwkv_lightning_cuda_says_its_scale(base, checkpoint, package, tmp_path):
    tensors = made(base, miss, PREFIXES)
    folder = tmp_path / "task-a"
    folder.mkdir()
    write_pth(folder / "adapter.pth", {key: tensor.half() for key, tensor in tensors.items()})
    manifest = {"format_version": 1, "kind": "inference_adapter", "method": "miss", "rank": 12, "alpha": 18,
                "scale": 1.5, "layout": "modulo_rank_zero_pad"}  # fmt: skip
    (folder / "adapter.json").write_text(json.dumps(manifest))
    for place in (folder, folder / "adapter.pth"):
        merged = merge(checkpoint, read(place, checkpoint))
        given = adapted(checkpoint, place, 1.5)
        assert merged.name == "base+task-a" and merged.fingerprint == given.fingerprint
        assert adapted(checkpoint, place, 0.5).fingerprint != merged.fingerprint
        assert torch.equal(logits_of(merged), logits_of(given))
    for wrong in ({"rank": 16}, {"layout": "other"}, {"scale": "1.5"}, {"method": "lora"}):
        (folder / "adapter.json").write_text(json.dumps(manifest | wrong))
        refusal(lambda: merge(checkpoint, read(folder, checkpoint)))


def test_the_fingerprint_tells_adapters_and_scalings_apart(base, checkpoint, tmp_path):
    one, other = made(base, lora), made(base, lora)
    other["head.lora_B"] = other["head.lora_B"].clone()
    other["head.lora_B"][-1, -1] += 0.01
    files = write_pth(tmp_path / "a.pth", one), write_pth(tmp_path / "b.pth", other)
    found = {adapted(checkpoint, file, factor).fingerprint for file in files for factor in (1.0, 2.0)}
    assert len(found | {checkpoint.fingerprint}) == 5
    same = merge(checkpoint, read(files[0], checkpoint), Scaling(alpha=8))  # of rank 4
    assert same.fingerprint in found


def test_an_engine_takes_an_adapter(base, tmp_path):
    file = write_pth(tmp_path / "words.pth", made(base, lora))
    model = from_tensors("base", base)
    fields = {"device": "cpu", "max_rows": 1, "l1": 0, "prefix_cache_mb": 0}
    engine = Engine(model, adapter=str(file), adapter_alpha=8.0, **fields)
    tokens, asked = TOKENS.tolist(), {"max_tokens": 8, "stop_ids": [], "sampling": Sampling(temperature=0)}
    text = engine.generate([tokens], **asked)
    assert engine.info.model == "base+words"
    by_hand = effective(base, made(base, lora), lambda w, t: w + 8 / 4 * t["lora_B"] @ t["lora_A"])
    assert text == Engine(from_tensors("x", by_hand), **fields).generate([tokens], **asked)
    both = {"adapter_alpha": 8.0, "adapter_scaling": 2.0}
    for named, options in (
        ("--adapter.", {"adapter_alpha": 8.0}),
        ("--adapter.", {"adapter_init": "x.pth"}),
        ("--adapter-scaling", {"adapter": str(file), **both}),
        ("words.pth", {"adapter": str(file), "adapter_scaling": math.nan}),
        ("--adapter-alpha", {"adapter": str(file)}),
        ("no.pth", {"adapter": str(tmp_path / "no.pth"), "adapter_alpha": 8.0}),
        ("no.pth", {"adapter": str(tmp_path / "no.pth")}),
    ):
        assert named in refusal(lambda options=options: Engine(model, **fields, **options))
