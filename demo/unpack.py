"""From the packed model to the tensors of an official checkpoint: `python -m demo.unpack out.pth`."""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

MODEL = Path(__file__).with_name("model.safetensors")
ROWS = 65536


def tensors(path: Path = MODEL) -> dict[str, Tensor]:
    """All tensors in fp32 under their official names and shapes; emb and head have 65536 rows."""
    packed = load_file(path)
    known = packed.pop("known").long()
    out = {}
    for name, tensor in packed.items():
        if name.endswith(".scale"):
            continue
        scale = packed.get(f"{name}.scale")
        out[name] = tensor.float() if scale is None else tensor.float() * scale
    for name in ("emb.weight", "head.weight"):
        compact = out[name]
        full = compact[-1].repeat(ROWS, 1)  # [65536, C]: ids that training never met share the last row
        full[known] = compact[:-1]
        out[name] = full
    return out


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("Name one file to write: python -m demo.unpack out.pth")
    torch.save(tensors(), sys.argv[1])


if __name__ == "__main__":
    main()
