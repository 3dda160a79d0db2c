"""From the packed model to the tensors of an official checkpoint.

`python -m rwkv_batch.bundled.unpack out.pth` writes one.
"""

import sys
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from rwkv_batch.bundled.codes import codes, rows

FOLDER = Path(__file__).resolve().parents[2] / "demo"  # of the model's files
MODEL = FOLDER / "model.safetensors"
DRAFT = FOLDER / "draft.safetensors"  # a smaller one, which guesses for it
HELD_OUT = FOLDER / "held_out.jsonl"  # texts that it has not been trained on
KNOWN = "known"  # the list of token ids that have rows of their own, which no checkpoint has


def tensors(path: Path = MODEL) -> dict[str, Tensor]:
    """All tensors in fp32 under their official names and shapes; emb and head have 65536 rows."""
    packed = load_file(path)
    table = torch.from_numpy(rows(packed.pop(KNOWN).numpy()))
    out = {}
    for name, tensor in packed.items():
        if name.endswith(".scale"):
            continue
        scale = packed.get(f"{name}.scale")
        out[name] = tensor.float() if scale is None else tensor.float() * scale
    for name, code in (("emb.weight", "code_in"), ("head.weight", "code_out")):
        out[name] = out[name][table]  # [65536, C]: ids without a row of their own share the last row
        if code in out:
            out[name] += torch.from_numpy(codes()) @ out.pop(code)
    return out


def known(path: Path) -> Tensor:
    """The token ids that have rows of their own in such a file, ascending: `[ids]` int64."""
    with safe_open(path, "pt") as file:
        ids: Tensor = file.get_tensor(KNOWN)
    return ids.long()


def is_packed(path: Path) -> bool:
    """Whether a file holds such a model. One that cannot be read does not."""
    with suppress(SafetensorError, OSError), safe_open(path, "pt") as file:
        return KNOWN in file.keys()  # noqa: SIM118  # it has no other way to list them
    return False


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("Name one file to write: python -m rwkv_batch.bundled.unpack out.pth")
    torch.save(tensors(), sys.argv[1])


if __name__ == "__main__":
    main()
