"""The norm before the head against torch."""

import torch
from cuda_gpu import DEVICE, needs_gpu, normal, off, poisoned
from torch.nn.functional import layer_norm

from rwkv_batch.ops.cuda.binding import Addend

pytestmark = needs_gpu


def test_norm_of_some_rows(kernels):
    x, weight, bias = torch.randn(40, 128, device=DEVICE), normal(128), normal(128)
    gather = torch.tensor([39, 0, 17], device=DEVICE, dtype=torch.int32)
    out = poisoned(3, 128)
    kernels.norm(x, Addend(), weight, bias, out, gather)
    assert off(out, layer_norm(x, (128,), weight.float(), bias.float())[gather.long()]) < 1e-3
