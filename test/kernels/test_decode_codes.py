"""Codes in blocks as fp16 numbers, bit for bit, and where these lie."""

import pytest
import torch
from coded import KINDS, matrix, numbers, random_weight
from cuda_gpu import DEVICE, needs_gpu, poisoned

from rwkv_batch.model.cuda.packed import blocks
from rwkv_batch.model.cuda.packed.blocks import decoded_room, in_blocks
from rwkv_batch.ops.cuda.binding import Kernels
from rwkv_batch.ops.cuda.special.codes import CodeKernels
from rwkv_batch.ops.weights.bits import unpack_codes
from rwkv_batch.ops.weights.channels import ChannelWeight
from rwkv_batch.ops.weights.groups import Int4Weight, WideInt4Weight

BLOCK_BYTES = {"int8": 1024, "fp8": 1024, "fp6": 768, "fp5": 640, "int4": 576, "int4-128": 1088, "nf4": 544}

SCALED = [
    kind for kind in KINDS if issubclass(KINDS[kind], ChannelWeight)
]  # by fp32; others' scales are in fp16


@pytest.fixture(scope="module")
def codes(kernels: Kernels) -> CodeKernels:
    return CodeKernels(kernels)


@pytest.mark.parametrize("kind", KINDS)
class TestOnAGpu:
    pytestmark = needs_gpu

    @pytest.mark.parametrize(("n", "k"), [(64, 64), (192, 320), (704, 1024), (128, 4096)])
    def test_numbers(self, codes, kind, n, k):
        weight, to = random_weight(kind, n, k), poisoned(n, k)
        w = matrix(weight, DEVICE)
        codes.decode_codes(w.codes, w.scales, to, kind)
        assert torch.equal(to.cpu(), numbers(weight).float().half())

    def test_some_outputs_of_a_larger_matrix(self, codes, kind, monkeypatch):
        """There is room for some outputs; behind the last of them stand zeros."""
        monkeypatch.setattr(blocks, "DECODED_BYTES", 2 * 128 * 320)
        weight = random_weight(kind, 300, 320)
        w = in_blocks(weight, decoded_room([weight], torch.device(DEVICE)))
        wanted = torch.zeros(320, 320).half()
        wanted[:300] = numbers(weight).float().half()
        found = []
        for part in w.decoded_parts():
            of_part, scales, to = w.decoded_part(part)
            codes.decode_codes(of_part, scales, to.fill_(float("nan")), kind)
            found.append(to.clone())
        assert [len(part) for part in found] == [128, 128, 64]
        assert torch.equal(torch.cat(found).cpu(), wanted)


@pytest.mark.parametrize("kind", SCALED)
class TestLargeNumbersOnAGpu:
    pytestmark = needs_gpu

    def test_too_large_ones_become_the_largest(self, codes, kind):
        weight, to = KINDS[kind].pack(torch.randn(64, 64) * 1e5), poisoned(64, 64)
        w = matrix(weight, DEVICE)
        codes.decode_codes(w.codes, w.scales, to, kind)
        assert torch.equal(to.cpu(), numbers(weight).clamp(-65504, 65504).float().half())


def test_groups_of_128_have_their_scales_between_two_blocks_of_codes():
    weight = WideInt4Weight.pack(torch.randn(64, 320))
    found, parts = matrix(weight, "cpu").codes, weight.parts
    assert found.shape == (4, 3, BLOCK_BYTES["int4-128"])
    each = {name: parts[name].repeat_interleave(2, 1)[:, :5] for name in ("scales", "minimums")}
    blocks = matrix(Int4Weight(weight.shape, parts | each), "cpu").codes  # with all scales for every 64
    for strip in range(5):
        group, later = strip // 2, strip % 2
        assert torch.equal(found[:, group, 576 * later :][:, :512], blocks[:, strip, :512])
        assert torch.equal(found[:, group, 512:576], blocks[:, strip, 512:])
    assert not found[:, 2, 576:].any()  # of what is no input


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "int4-128"])
def test_the_order_of_the_codes(kind):
    """The order is that in the header of codes.cuh."""
    weight = random_weight(kind, 64, 128)
    found = matrix(weight, "cpu").codes
    assert found.shape == (4, 2, BLOCK_BYTES[kind])
    plain = weight.parts["values"].view(torch.uint8)
    if kind == "int8":
        plain = plain ^ 0x80
    bits = {"int8": 8, "fp8": 8, "fp6": 6, "fp5": 5}.get(kind, 4)
    if bits < 8:
        plain = unpack_codes(plain, bits, 128)
    for row, strip, quad in ((0, 0, 0), (21, 1, 3), (63, 0, 2)):
        block, half, group = found[row // 16, strip], row % 16 // 8, row % 8
        own = plain[row, strip * 64 + quad * 16 :][:16].tolist()
        if kind in ("int8", "fp8"):
            bytes_ = block.view(2, 8, 4, 16)[half, group, quad].tolist()
            assert bytes_ == [own[4 * word + at] for word in range(4) for at in (0, 2, 1, 3)]
        else:
            bytes_ = block[:512].view(8, 4, 2, 8)[group, quad, half]
            above = [code >> max(bits - 4, 0) for code in own]
            nibbles = torch.stack([bytes_ & 15, bytes_ >> 4], 1).flatten().tolist()
            places = [8 * word + at for word in range(2) for at in (0, 2, 4, 6, 1, 3, 5, 7)]
            assert nibbles == (own if kind == "nf4" else [above[place] for place in places])
            if kind == "fp6":
                word = int(block[512:].view(torch.int32).view(8, 4, 2)[group, quad, half])
                assert [word >> (i // 2 * 2 + i % 2 * 16) & 3 for i in range(16)] == [
                    code & 3 for code in own
                ]
                continue
            if kind == "fp5":
                word = int(block[512:].view(torch.int32).view(8, 4)[group, quad])
                found_low = [word >> (i // 2 + i % 2 * 16 + half * 8) & 1 for i in range(16)]
                assert found_low == [code & 1 for code in own]
                continue
            scales = block[512:].view(torch.float16).view(8, 2, -1)[group, half]
            names = ("scales", "minimums") if kind == "int4" else ("scales",)
            assert scales.tolist() == [float(weight.parts[name][row, strip]) for name in names]
