"""The packed form of the model: int8 matrices with one scale a row, everything else in fp16."""

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from rwkv_batch.bundled.unpack import KNOWN


def pack(tensors: dict[str, Tensor], known: np.ndarray, path: Path) -> None:
    """Write the trained tensors (compact emb and head, fp32) and the known ids."""
    packed: dict[str, Tensor] = {KNOWN: torch.from_numpy(known.astype(np.int32))}
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and min(tensor.shape) > 8:
            scale = tensor.abs().amax(1, keepdim=True).clamp(min=1e-8) / 127
            packed[name] = (tensor / scale).round().to(torch.int8)
            packed[f"{name}.scale"] = scale
        else:
            packed[name] = tensor.to(torch.float16)
    save_file(packed, path)
