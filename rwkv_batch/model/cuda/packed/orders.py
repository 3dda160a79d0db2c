"""In which order kernels read codes: `cuda/gemm_tile8.cu`, `cuda/gemm_tile4.cu`, `cuda/gemm_sparse8.cu`."""

import torch
from torch import Tensor


def ordered_codes(codes: Tensor) -> Tensor:
    """Codes `[N, K]` of 8 bits, each 64 of a row in the order in which gemm_tile8 reads them."""
    # Of 64: [16 numbers, halves of these, lanes, pairs] to [lanes, 16 numbers, halves, pairs].
    ordered: Tensor = codes.view(len(codes), -1, 4, 2, 4, 2).permute(0, 1, 4, 2, 3, 5)
    return ordered.reshape(codes.shape)


def paired_columns(codes: Tensor) -> Tensor:
    """Codes `[N, K]` of 8 bits as `[K, N]`, in which the halves of each 16 columns take turns.

    So the two codes of a pair of bytes belong to rows i and i + 8 of an operand of mma and wgmma.
    """
    # Of N: [sixteens, halves of these, columns].
    paired: Tensor = codes.view(-1, 2, 8, codes.shape[1]).permute(3, 0, 2, 1)
    return paired.reshape(codes.shape[1], -1)


def tiles_of_4_bits(codes: Tensor, scales: Tensor, minimums: Tensor) -> Tensor:
    """Codes `[N, K]` uint8 below 16, with scales and minimums `[N, K/64]` fp16, as gemm_tile4 reads them.

    Returns `[N/64, K/64, 64 * 36]` uint8: 64 rows of 32 bytes, and the scale and the minimum of each. Of each
    16 rows, row i and row i + 8 take turns, by 8 bytes and by scale and minimum.
    """
    n, strips = scales.shape
    # Of 64 codes: [words, fours of a word, halves of 16 numbers, lanes, halves of a pair] to [lanes, words,
    # halves of a pair, fours, halves], eight of them a word.
    ordered = codes.view(n, strips, 2, 2, 2, 4, 2).permute(0, 1, 5, 2, 6, 3, 4).reshape(n, strips, 32, 2)
    packed = (ordered[..., 0] | ordered[..., 1] << 4).view(n, strips, 4, 8)
    both = torch.stack([scales, minimums], 2).view(torch.uint8)[:, :, None]
    # Of [tiles, sixteens of rows, halves of these, rows, strips, lanes, bytes].
    split = (part.view(-1, 4, 2, 8, *part.shape[1:]) for part in (packed, both))
    return torch.cat([part.permute(0, 4, 1, 3, 5, 2, 6).flatten(2) for part in split], 2)
