"""Codes of 4, 5 and 6 bits packed without gaps: two in a byte, eight in five bytes, four in three.

The codes of a row are one run of bits, the lowest first: code i takes the bits from `i * bits` on, and byte j
those from `8 * j` on. A row is filled up with zeros to whole units of the three sizes above.
"""

import torch
from torch import Tensor

UNITS = {4: (2, 1), 5: (8, 5), 6: (4, 3)}  # bits -> codes of a unit, and the bytes that it takes


def packed_size(codes: int, bits: int) -> int:
    """Bytes of a row of so many codes."""
    count, size = UNITS[bits]
    return -(-codes // count) * size


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """`[n, k]` uint8, each below `2 ** bits`, to `[n, packed_size(k, bits)]` uint8."""
    count, size = UNITS[bits]
    missing = -codes.shape[1] % count
    units = torch.nn.functional.pad(codes, (0, missing)).reshape(len(codes), -1, count)
    wide = torch.int64 if 8 * size > 31 else torch.int32
    word = torch.zeros(units.shape[:2], dtype=wide, device=codes.device)
    for place in range(count):
        word |= units[..., place].to(wide) << (place * bits)
    found = [((word >> (8 * place)) & 255).to(torch.uint8) for place in range(size)]
    return torch.stack(found, -1).flatten(1)


def unpack_codes(packed: Tensor, bits: int, codes: int) -> Tensor:
    """`[n, packed_size(k, bits)]` uint8 back to `[n, k]` uint8, where k is `codes`."""
    count, size = UNITS[bits]
    units = packed.reshape(len(packed), -1, size)
    found = torch.empty(*units.shape[:2], count, dtype=torch.uint8, device=packed.device)
    for place in range(count):
        first, shift = divmod(place * bits, 8)
        code = units[..., first] >> shift
        if shift + bits > 8:  # the rest is in the next byte
            code = code | (units[..., first + 1] << (8 - shift))
        found[..., place] = code & (2**bits - 1)
    return found.flatten(1)[:, :codes]
