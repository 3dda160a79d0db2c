"""In which order kernels read codes: `cuda/gemm_tile8.cu`, `cuda/gemm_tile4.cu`, `cuda/gemm_sparse8.cu`."""

from itertools import product

import torch
from torch import Tensor
from torch.nn.functional import pad


def ordered_codes(codes: Tensor) -> Tensor:
    """Codes `[N, K]` of fp8, each 64 of a row in the order in which gemm_tile8 reads them."""
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


def tiles_of_8_bits(codes: Tensor) -> Tensor:
    """Codes `[N, K]` of int8 as gemm_tile8 reads them, `[N/64, K/64, 4096]` uint8.

    For each four numbers along k 256 bytes of 64 rows: four words of 16 bytes are of row i and row i + 8 of
    two sixteens of rows.
    """
    n, k = codes.shape
    # In pairs of numbers, of [tiles, pairs of sixteens of rows, sixteens of these, halves, rows, strips,
    # sixteens along k, halves, lanes] to [lanes, pairs, rows, tiles, strips, sixteens along k, sixteens,
    # halves of 16 rows, halves along k].
    split = codes.view(torch.int16).view(n // 64, 2, 2, 2, 8, k // 64, 4, 2, 4)
    split = split.permute(8, 1, 4, 0, 5, 6, 2, 3, 7)
    found = torch.empty(n // 64, k // 64, 4, 4, 16, 2, 2, 2, dtype=torch.int16, device=codes.device)
    for lane, pair, row in product(range(4), range(2), range(8)):
        # Each lane begins two places later than the one before, and in rows 2, 3, 6 and 7 the sixteens of a
        # pair change places, so that lanes read from different banks.
        words, place = split[lane, pair, row], (pair * 8 + row + 2 * lane) % 16
        found[:, :, :, lane, place] = words.flip(3) if row & 2 else words
    return found.view(torch.uint8).flatten(2)


def tiles_of_4_bits(codes: Tensor, scales: Tensor, minimums: Tensor, group: int) -> Tensor:
    """Codes `[N, K]` uint8 below 16, with scales and minimums `[N, groups]` fp16, as gemm_tile4 reads them.

    group: 64 or 128 numbers; the last one may have 64. Returns `[N/64, groups, 64 * 36]` uint8 for groups of
    64: for each four numbers along k 128 bytes of 64 rows, then the scale and the minimum of each row. Of
    each 16 rows, row i and row i + 8 share bytes; their scales and minimums are side by side. For groups of
    128 `[N/64, groups, 64 * 68]`: that of the first 64 numbers, then the codes of the others.
    """
    n, strips = codes.shape[0], codes.shape[1] // 64
    # Of [tiles, pairs of sixteens of rows, sixteens of these, halves, rows, strips, sixteens along k, halves,
    # lanes, halves of a pair] to [tiles, strips, sixteens along k, lanes, pairs, rows, sixteens, halves of a
    # pair, halves along k, halves of 16 rows].
    split = codes.view(n // 64, 2, 2, 2, 8, strips, 4, 2, 4, 2).permute(0, 5, 6, 8, 1, 4, 2, 9, 7, 3)
    words = (split[..., 0] | split[..., 1] << 4).reshape(n // 64, strips, 4, 4, 16, 8)
    # Each lane begins four places later than the one before, so that they read from different banks.
    turned = torch.stack([words[:, :, :, lane].roll(4 * lane, 3) for lane in range(4)], 3)
    groups = scales.shape[1]
    both = torch.stack([scales, minimums], 2).view(n // 64, 4, 2, 8, groups, 2).permute(0, 4, 1, 3, 2, 5)
    return _with_scales(turned.flatten(2), both.reshape(n // 64, groups, -1).view(torch.uint8), group)


def blocks_of_8_bits(codes: Tensor) -> Tensor:
    """Codes `[N, K]` of 8 bits in the blocks of `cuda/codes.cuh`, `[N/16, K/64, 1024]` uint8."""
    # Of [halves of 16 rows, rows, strips, lanes, words, pairs of a word, halves of a pair] to [strips, halves
    # of 16 rows, rows, lanes, words, halves of a pair, pairs].
    ordered = codes.view(len(codes) // 16, 2, 8, -1, 4, 4, 2, 2).permute(0, 3, 1, 2, 4, 5, 7, 6)
    return ordered.flatten(2).contiguous()


def blocks_of_4_bits(codes: Tensor, scales: Tensor, minimums: Tensor, group: int) -> Tensor:
    """Codes `[N, K]` uint8 below 16, with scales and minimums `[N, groups]` fp16, as blocks of int4.

    group: 64 or 128 numbers; the last one may have 64. Returns `[N/16, groups, 512 + 64]` uint8, for groups
    of 128 `[N/16, groups, 512 + 64 + 512]`.
    """
    return _with_scales(_nibbles(codes), _of_pairs_of_rows(torch.stack([scales, minimums], 2)), group)


def blocks_of_6_bits(codes: Tensor) -> Tensor:
    """Codes `[N, K]` uint8 of fp6 as such blocks, `[N/16, K/64, 768]` uint8."""
    # Of [halves of 16 rows, rows, strips, lanes, bytes, pairs of four, halves of a pair] to [strips, rows,
    # lanes, halves of 16 rows, halves of a pair, bytes, pairs].
    low = (codes & 3).view(len(codes) // 16, 2, 8, -1, 4, 2, 4, 2).permute(0, 3, 2, 4, 1, 7, 5, 6)
    return torch.cat([_nibbles(codes >> 2), _bytes(low, 2).flatten(2)], 2)


def blocks_of_5_bits(codes: Tensor) -> Tensor:
    """Codes `[N, K]` uint8 of fp5 as such blocks, `[N/16, K/64, 640]` uint8."""
    # Of [halves of 16 rows, rows, strips, lanes, pairs, halves of a pair] to [strips, rows, lanes, halves of
    # a pair, halves of 16 rows, pairs].
    low = (codes & 1).view(len(codes) // 16, 2, 8, -1, 4, 8, 2).permute(0, 3, 2, 4, 6, 1, 5)
    return torch.cat([_nibbles(codes >> 1), _bytes(low, 1).flatten(2)], 2)


def blocks_of_pairs(pairs: Tensor, scales: Tensor) -> Tensor:
    """Bytes of two codes `[N, K/2]`, the first one low, and scales `[N, K/64]` fp16, as blocks of nf4.

    Returns `[N/16, K/64, 512 + 32]` uint8.
    """
    # Of [halves of 16 rows, rows, strips, lanes, bytes] to [strips, rows, lanes, halves of 16 rows, bytes].
    packed = pairs.view(len(pairs) // 16, 2, 8, -1, 4, 8).permute(0, 3, 2, 4, 1, 5).flatten(2)
    return torch.cat([packed, _of_pairs_of_rows(scales.unsqueeze(2))], 2)


def _with_scales(codes: Tensor, scales: Tensor, group: int) -> Tensor:
    """Codes `[rows, strips, bytes]` with scales `[rows, groups, bytes]` behind those of their first strip."""
    if group == 64:
        return torch.cat([codes, scales], 2)
    rows, strips, size = codes.shape
    groups = scales.shape[1]
    first, second = pad(codes, (0, 0, 0, 2 * groups - strips)).view(rows, groups, 2, size).unbind(2)
    return torch.cat([first, scales, second], 2)


def _nibbles(codes: Tensor) -> Tensor:
    """Codes `[N, K]` uint8 below 16 in blocks, `[N/16, K/64, 512]`."""
    # Of [halves of 16 rows, rows, strips, lanes, words, bytes of four nibbles, nibbles of a byte, halves of a
    # pair] to [strips, rows, lanes, halves of 16 rows, words, halves of a pair, bytes, nibbles].
    split = codes.view(len(codes) // 16, 2, 8, -1, 4, 2, 2, 2, 2).permute(0, 3, 2, 4, 1, 5, 8, 6, 7)
    return _bytes(split, 4).flatten(2)


def _bytes(numbers: Tensor, bits: int) -> Tensor:
    """The numbers of the last dimension, 8 / bits of them, as one byte, the first of them lowest."""
    found = numbers[..., 0]
    for place in range(1, 8 // bits):
        found = found | numbers[..., place] << (bits * place)
    return found


def _of_pairs_of_rows(numbers: Tensor) -> Tensor:
    """Numbers `[N, strips, n]` fp16, those of row i and of row i + 8 of each 16 side by side, as bytes."""
    of_rows = numbers.view(len(numbers) // 16, 2, 8, *numbers.shape[1:]).permute(0, 3, 2, 1, 4)
    return of_rows.flatten(2).contiguous().view(torch.uint8)
