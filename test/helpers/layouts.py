"""Checkpoints as other producers write them, made from official tensors."""

import json
import re
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import layer_norm

LOW_RANK = re.compile(r"\.att\.[wavg][12]$")
FLA = [
    (r"^emb\.weight$", "model.embeddings.weight"),
    (r"^head\.weight$", "lm_head.weight"),
    (r"^ln_out\.", "model.norm."),
    (r"^blocks\.(\d+)\.", r"model.layers.\1."),
    (r"\.ln0\.", ".pre_norm."),
    (r"\.ln1\.", ".attn_norm."),
    (r"\.ln2\.", ".ffn_norm."),
    (r"\.att\.ln_x\.", ".attn.g_norm."),
    (r"\.att\.receptance\.", ".attn.r_proj."),
    (r"\.att\.key\.", ".attn.k_proj."),
    (r"\.att\.value\.", ".attn.v_proj."),
    (r"\.att\.output\.", ".attn.o_proj."),
    (r"\.att\.([wavg])1$", r".attn.\1_lora.lora.0.weight"),
    (r"\.att\.([wavg])2$", r".attn.\1_lora.lora.2.weight"),
    (r"\.att\.([wav])0$", r".attn.\1_lora.lora.2.bias"),
    (r"\.att\.", ".attn."),
]


def without_first_values(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: t for key, t in tensors.items() if not re.match(r"blocks\.0\.att\.v[012]", key)}


def hugging_face(tensors: dict[str, Tensor], linear: bool) -> dict[str, Tensor]:
    """The native layout of folders; linear: low-rank pairs as weights of linear maps."""
    found = {}
    for key, tensor in without_first_values(tensors).items():
        if linear and LOW_RANK.search(key):
            found[f"model.{key}.weight"] = tensor.T.contiguous()
        elif key == "head.weight":
            found[key] = tensor
        else:
            found["model." + ("embeddings.weight" if key == "emb.weight" else key)] = tensor
    return found


def with_fused_norm(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """ln0 applied to the embedding and left out, in fp32."""
    weight, bias = (tensors[f"blocks.0.ln0.{part}"].float() for part in ("weight", "bias"))
    normed = layer_norm(tensors["emb.weight"].float(), weight.shape, weight, bias)
    rest = {key: t for key, t in tensors.items() if not key.startswith("blocks.0.ln0.")}
    return rest | {"emb.weight": normed}


def flash_linear_attention(tensors: dict[str, Tensor], packed_mixes: bool = False) -> dict[str, Tensor]:
    found = {}
    for key, tensor in without_first_values(tensors).items():
        name = key
        for pattern, replacement in FLA:
            name = re.sub(pattern, replacement, name)
        found[name] = tensor.T.contiguous() if LOW_RANK.search(key) else tensor
        if name.endswith(("2.bias", ".k_k", ".k_a", ".ffn.x_k")):
            found[name] = tensor.flatten()
    if packed_mixes:
        for name in [name for name in found if name.endswith(".attn.x_r")]:
            parts = [found.pop(name[:-1] + mix) for mix in "rwkvag"]
            found[name[:-1] + "x"] = torch.stack(parts)
    return found


def web_rwkv(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A .st file: names in lower case, some renamed, low-rank pairs and tuned states transposed."""
    transposed = ("time_mix_w1", "time_mix_w2", "time_decay_w1", "time_decay_w2", "time_state")
    found = {}
    for key, tensor in tensors.items():
        name = key.replace("time_faaaa", "time_first").replace("time_maa", "time_mix").lower()
        flip = LOW_RANK.search(name) or name.endswith(transposed)
        found[name] = (tensor.transpose(-2, -1) if flip else tensor).contiguous()
    return found


def write_folder(folder: Path, tensors: dict[str, Tensor], parts: int = 1, **config: object) -> Path:
    """A Hugging Face folder, whole or in parts with an index."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "rwkv7"} | config))
    if parts == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    names, places = sorted(tensors), {}
    for part in range(parts):
        file = f"model-{part + 1:05}-of-{parts:05}.safetensors"
        save_file({name: tensors[name] for name in names[part::parts]}, folder / file)
        places |= dict.fromkeys(names[part::parts], file)
    index = {"metadata": {"total_size": 0}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
