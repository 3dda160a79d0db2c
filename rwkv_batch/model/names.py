"""The names of other layouts, translated into those of the official checkpoints.

- Hugging Face folders: the official names behind `model.`, the embedding as `embeddings`; the low-rank pairs
  may be weights of linear maps (`att.w1.weight`).
- flash-linear-attention: `model.layers.0.attn.r_proj.weight`, `attn.w_lora.lora.0.weight` and so on.
- .st files of web-rwkv: low-rank pairs and tuned states are transposed; of RWKV-6, `time_maa` is `time_mix`
  and `time_faaaa` is `time_first`.

Low-rank pairs are `[C, rank]` and `[rank, C]` in official checkpoints, and the other way round as linear
maps. Their shape says which they are; where a pair is square, the other pairs of the file do, or its layout.
"""

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from rwkv_batch.model.files import CheckpointError, ModelFile

FLA_MIXES = "rwkvag"  # the order in `x_x`, six token-shift mixes in one tensor
TOP = {  # of Hugging Face and flash-linear-attention, without `model.`
    "embeddings.weight": "emb.weight",
    "lm_head.weight": "head.weight",
    "norm.weight": "ln_out.weight",
    "norm.bias": "ln_out.bias",
}
IN_LAYER = (  # patterns of flash-linear-attention, inside a layer
    (r"pre_norm\.", "ln0."),
    (r"attn_norm\.", "ln1."),
    (r"ffn_norm\.", "ln2."),
    (r"attn\.g_norm\.", "att.ln_x."),
    (r"attn\.r_proj\.", "att.receptance."),
    (r"attn\.k_proj\.", "att.key."),
    (r"attn\.v_proj\.", "att.value."),
    (r"attn\.o_proj\.", "att.output."),
    (r"attn\.([wavg])_lora\.lora\.0\.weight$", r"att.\g<1>1.weight"),
    (r"attn\.([wavg])_lora\.lora\.2\.weight$", r"att.\g<1>2.weight"),
    (r"attn\.([wav])_lora\.lora\.2\.bias$", r"att.\g<1>0"),
    (r"attn\.", "att."),
)
LOW_RANK = re.compile(r"(.*\.att\.(?:[wavg]|time_decay_w|time_maa_w)[12])(\.weight)?$")
EPS = {"norm_eps": 1e-5, "layer_norm_epsilon": 1e-5, "head_dim": 64, "head_size": 64}  # of every RWKV-7
FAMILIES = ("rwkv7", "rwkv7a")  # the model_type of a config


def official(file: ModelFile) -> tuple[dict[str, Tensor], bool]:
    """Its tensors by official names; and whether ln0 has been applied to the embedding already.

    Raises CheckpointError for a config that asks for what is no RWKV model, or for other constants.
    """
    fused = _check_config(file)
    tensors: dict[str, Tensor] = {}
    for key, tensor in file.tensors.items():
        for name, part in _unpacked(_official_name(key, file.path.suffix == ".st"), tensor):
            if name in tensors:
                raise CheckpointError(f"{file.path}: there are two tensors {name}; give one model.")
            tensors[name] = part
    if file.path.suffix == ".st":
        tensors = {k: t.mT if k.endswith(".att.time_state") else t for k, t in tensors.items()}
    if file.config.get("tie_word_embeddings") and "emb.weight" in tensors:
        tensors.setdefault("head.weight", tensors["emb.weight"])
    if fused:
        tensors = {key: tensor for key, tensor in tensors.items() if not key.startswith("blocks.0.ln0.")}
    return _oriented(tensors, file.path.suffix == ".st"), fused


def _official_name(key: str, web_rwkv: bool) -> str:
    name = key.removeprefix("model.")
    if name in TOP:
        return TOP[name]
    if layer := re.match(r"layers\.(\d+)\.(.+)$", name):
        inside = layer[2]
        for pattern, replacement in IN_LAYER:
            inside, found = re.subn("^" + pattern, replacement, inside)
            if found:
                break
        return f"blocks.{layer[1]}.{inside}"
    if web_rwkv:
        name = name.replace(".time_mix_", ".time_maa_").replace(".time_first", ".time_faaaa")
    return name


def _unpacked(name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """The tensor under its name, or the six that older files of flash-linear-attention have in one."""
    if name.endswith(".att.x_x") and tensor.dim() and len(tensor) == len(FLA_MIXES):
        return [(name[:-1] + mix, part) for mix, part in zip(FLA_MIXES, tensor, strict=True)]
    return [(name, tensor)]


def _oriented(tensors: Mapping[str, Tensor], web_rwkv: bool) -> dict[str, Tensor]:
    """With low-rank pairs as in official checkpoints, and named so."""
    embedding = tensors.get("emb.weight")
    width = embedding.shape[-1] if embedding is not None and embedding.dim() else 0
    pairs = {
        key: match for key, tensor in tensors.items() if (match := LOW_RANK.match(key)) and tensor.dim() > 1
    }
    flips = {key: _flip(tensors[key], match[1], width) for key, match in pairs.items()}
    known = [flip for key, flip in flips.items() if flip is not None and not pairs[key][2]]
    others = all(known) if known else web_rwkv
    found: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        match = pairs.get(key)
        if match is None:
            found[key] = tensor
            continue
        flip = flips[key]
        if flip is None:
            flip = bool(match[2]) or others
        found[match[1]] = tensor.mT if flip else tensor
    return found


def _flip(tensor: Tensor, name: str, width: int) -> bool | None:
    """Whether the shape of a part of a low-rank pair is that of a linear map; None: it does not say."""
    rows, columns = tensor.shape[-2:]
    if rows == columns or width not in (rows, columns):
        return None
    first = name.endswith("1")  # [C, rank], or several ranks side by side
    return bool((rows if first else columns) != width)


def _check_config(file: ModelFile) -> bool:
    """Whether the embedding is normed already."""
    config: Mapping[str, Any] = file.config
    kind = config.get("model_type", FAMILIES[0])
    if kind not in FAMILIES:
        raise CheckpointError(
            f"{file.path} is a model of the type {kind}; this server runs RWKV-7, and RWKV-6 from a .pth or "
            ".st file."
        )
    for name, wanted in EPS.items():
        if name in config and config[name] != wanted:
            raise CheckpointError(
                f"{file.path}: the config has {name} {config[name]}; only {wanted} can be run."
            )
    return config.get("embedding_layer_norm_fused") is True or config.get("norm_first") is False
