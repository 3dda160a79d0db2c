"""A code for each of the 65536 ids, from which the model can copy an id that it has no row for.

The code is 240 signs drawn by a hash of the token's bytes, without a space before them and in lower case,
and 16 that say whether there was a space and a capital. So " Rex" and "Rex" differ in eight signs, and
different words in about half of them. Scaled to length 1.
"""

import hashlib
from functools import cache

import numpy as np

from rwkv_batch.text.tokenizer import VOCABULARY, Tokenizer

SIZE = 65536  # rows of the unpacked emb and head
BITS, FLAG = 256, 8


@cache
def codes() -> np.ndarray:
    """`[65536, 256]` fp32. Ids that are no tokens have a code of their own too."""
    tokenizer, digests, flags = Tokenizer(), [], np.empty((SIZE, 2), dtype=bool)
    for token in range(SIZE):
        data = tokenizer.token_bytes(token) if 0 < token < VOCABULARY else b"\0id %d" % token
        plain = data[1:] if data[:1] == b" " and len(data) > 1 else data
        capital = plain.istitle() and plain.isalpha()
        digests.append(hashlib.shake_128(plain.lower() if capital else plain).digest(BITS // 8))
        flags[token] = plain is not data, capital
    bits = np.unpackbits(np.frombuffer(b"".join(digests), dtype=np.uint8)).reshape(SIZE, BITS)
    bits[:, : 2 * FLAG] = np.repeat(flags, FLAG, axis=1)
    return (2 * bits.astype(np.float32) - 1) / np.float32(BITS**0.5)


def rows(known: np.ndarray) -> np.ndarray:
    """For each of the 65536 ids its row in the compact tables; ids that are not known share the last one."""
    table = np.full(SIZE, len(known), dtype=np.int64)
    table[known] = np.arange(len(known))
    return table
