"""The PyPI package `rwkv`, without what its import changes for everything else in the process.

It allows TF32 on a GPU, with which products of fp32 are right to three digits only.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

os.environ |= {"RWKV_V7_ON": "1", "RWKV_JIT_ON": "0", "RWKV_CUDA_ON": "0"}  # read by the import


@contextmanager
def precision_kept() -> Iterator[None]:
    """What is set within, of how precise products are, is undone."""
    backends = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [backend.allow_tf32 for backend in backends]
    yield
    for backend, allowed in zip(backends, before, strict=True):
        backend.allow_tf32 = allowed


with precision_kept():
    from rwkv.model import RWKV

__all__ = ["RWKV", "precision_kept"]
