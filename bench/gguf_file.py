#!/usr/bin/env python3
"""Write an RWKV-7 checkpoint as a GGUF file of fp16, which llama.cpp and Ollama read.

    pip install gguf
    python bench/gguf_file.py rwkv7-g1-0.1b.pth rwkv7-g1-0.1b.gguf

Matrices are fp16, vectors fp32. llama.cpp wants the low-rank pairs transposed, the six mixes of a layer as
one tensor in the order r w k v a g, and v0, v1, v2 in layer 0 too, which nothing reads. Its vocabulary has
texts in which bytes are written as \\xHH.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rwkv_batch.model.checkpoint import Checkpoint, load  # noqa: E402
from rwkv_batch.text.tokenizer import VOCABULARY, Tokenizer  # noqa: E402

MIXES = "rwkvag"
NORM_EPS = 1e-5
CONTEXT = 1 << 20  # tokens; a state has none, but the file wants a number
CONTROL, NORMAL, UNUSED = 3, 1, 5  # types of tokens
NAMES = {  # of a layer, without what stands before them on either side
    "ln1": "attn_norm",
    "ln2": "attn_norm_2",
    "att.ln_x": "time_mix_ln",
    "att.receptance": "time_mix_receptance",
    "att.key": "time_mix_key",
    "att.value": "time_mix_value",
    "att.output": "time_mix_output",
    "ffn.key": "channel_mix_key",
    "ffn.value": "channel_mix_value",
}
TOP = {"emb.weight": "token_embd.weight", "head.weight": "output.weight"} | {
    f"{ours}.{part}": f"{theirs}.{part}"
    for ours, theirs in (("blocks.0.ln0", "token_embd_norm"), ("ln_out", "output_norm"))
    for part in ("weight", "bias")
}


def tensors(checkpoint: Checkpoint) -> Iterator[tuple[str, Tensor]]:
    """What the file has, by its names. Raises KeyError for a checkpoint that is not plain RWKV-7."""
    held = checkpoint.tensors
    for ours, theirs in TOP.items():
        yield theirs, held[ours]
    for layer in range(checkpoint.layers):
        ours, theirs = f"blocks.{layer}.", f"blk.{layer}."
        for name, other in NAMES.items():
            for part in ("weight", "bias") if "ln" in name else ("weight",):
                yield f"{theirs}{other}.{part}", held[f"{ours}{name}.{part}"]
        mixes = torch.stack([held[f"{ours}att.x_{mix}"].float().flatten() for mix in MIXES])
        yield f"{theirs}time_mix_lerp_fused.weight", mixes[:, None, None]
        yield f"{theirs}channel_mix_lerp_k.weight", held[f"{ours}ffn.x_k"].flatten()
        for name in ("k_k", "k_a", "r_k"):
            yield f"{theirs}time_mix_{name}.weight", held[f"{ours}att.{name}"].flatten()
        for pair in "wavg":
            read = pair if layer or pair != "v" else "a"  # those of a stand for v in layer 0
            if pair != "g":
                yield f"{theirs}time_mix_{pair}0.weight", held[f"{ours}att.{read}0"].flatten()
            for number in "12":
                yield f"{theirs}time_mix_{pair}{number}.weight", held[f"{ours}att.{read}{number}"].mT


def write(checkpoint: Checkpoint, path: Path) -> None:
    """Raises KeyError, as `tensors`."""
    import gguf

    held = checkpoint.tensors
    writer = gguf.GGUFWriter(path, "rwkv7")
    writer.add_name(checkpoint.name)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(checkpoint.width)
    writer.add_block_count(checkpoint.layers)
    writer.add_layer_norm_eps(NORM_EPS)
    writer.add_wkv_head_size(checkpoint.width // checkpoint.heads)
    rank = {pair: held[f"blocks.{1 if pair == 'v' else 0}.att.{pair}1"].shape[1] for pair in "wavg"}
    writer.add_decay_lora_rank(rank["w"])
    writer.add_iclr_lora_rank(rank["a"])
    writer.add_value_residual_mix_lora_rank(rank["v"])
    writer.add_gate_lora_rank(rank["g"])
    writer.add_feed_forward_length(held["blocks.0.ffn.key.weight"].shape[0])
    writer.add_head_count(0)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_tokenizer_model("rwkv")
    tokenizer = Tokenizer()
    known = range(1, min(VOCABULARY, checkpoint.vocab))
    texts = ["".join(f"\\x{byte:02x}" for byte in tokenizer.token_bytes(token)) for token in known]
    unused = [f"[PAD{token}]" for token in range(len(texts) + 1, checkpoint.vocab)]
    writer.add_token_list(["<s>", *texts, *unused])
    writer.add_token_types([CONTROL, *(NORMAL for _ in texts), *(UNUSED for _ in unused)])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    for name, tensor in tensors(checkpoint):
        matrix = tensor.dim() == 2
        writer.add_tensor(name, tensor.to(torch.float16 if matrix else torch.float32).contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("gguf", type=Path)
    args = parser.parse_args()
    write(load(args.checkpoint), args.gguf)


if __name__ == "__main__":
    main()
