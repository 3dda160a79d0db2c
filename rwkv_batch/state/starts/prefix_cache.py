"""States after prefixes of earlier prompts, in host memory, for prompts that begin the same way.

A prefix is found by a hash of its tokens and used only if the tokens themselves are equal. Entries carry no
model fingerprint: each engine, which has one model, has a cache of its own. An RNN has no states of the
lengths in between, so `PrefixCache.cuts` decides before a prompt is fed where its state is kept.

For each prompt, in this order: `longest`, `cuts`, `remember`, then `put` at each cut as the prompt is fed.
"""

import secrets
from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from rwkv_batch.ops.random import mix

MIN_TOKENS = 64  # a shorter prefix costs more to keep than to feed again
EVERY = 512  # long prompts leave a state after each multiple of this
LONG = 256  # prompts of this many tokens leave a state near their end, for a conversation that goes on
GRAIN = 16  # that state's length is a multiple of this; and a state has to save at least so many tokens
PROMPTS = 64  # earlier prompts compared to find shared prefixes; and prompts that a cut is waited for
SHARE = 4  # one prompt takes at most this part of the capacity, or a single entry

Tokens = Sequence[int] | np.ndarray


@dataclass(frozen=True)
class _Entry:
    tokens: np.ndarray
    value: Tensor

    @property
    def nbytes(self) -> int:
        return self.value.nbytes + self.tokens.nbytes


class PrefixCache:
    """States by the exact tokens they have seen; the least recently used leave first. Not thread-safe.

    Values are returned without a copy and must not be changed. A capacity of 0 keeps nothing.
    """

    def __init__(self, capacity_bytes: int) -> None:
        """`capacity_bytes` counts the values' `nbytes` and four bytes for each token of their prefixes."""
        self.capacity = capacity_bytes
        self._key = np.uint64(secrets.randbits(64))
        self._entries: OrderedDict[int, _Entry] = OrderedDict()  # by hash, least recently used first
        self._bytes = 0
        self._counts: Counter[int] = Counter()  # length -> entries of that length
        self._lengths = np.zeros(0, np.intp)  # the same lengths, ascending
        self._largest = 0  # bytes of the largest value seen
        self._prompts: OrderedDict[bytes, None] = OrderedDict()  # as uint32, oldest first
        self._pending: OrderedDict[int, int] = OrderedDict()  # cuts not put yet: hash -> call of `cuts`
        self._calls = 0

    def longest(self, tokens: Tokens) -> tuple[int, Tensor] | None:
        """Length and value of the longest stored prefix that leaves at least one of `tokens` to feed."""
        if len(tokens) <= MIN_TOKENS or self.capacity == 0:
            return None
        lengths = self._lengths[: self._lengths.searchsorted(len(tokens) - 1, side="right")]
        if len(lengths):
            prefix = _array(tokens[: lengths[-1]])
            hashes = prefix_hashes(prefix, self._key)[lengths - 1].tolist()
            for digest, length in zip(reversed(hashes), reversed(lengths.tolist()), strict=True):
                entry = self._find(digest, prefix[:length])
                if entry is not None:
                    self._entries.move_to_end(digest)
                    return length, entry.value
        return None

    def cuts(self, tokens: Tokens, start: int) -> list[int]:
        """Lengths at which to `put` a state while `tokens` are fed from `start` on.

        They ascend, and are >= start + GRAIN and < len(tokens). As far as they are not stored yet, they are
        where the prompt parts from an earlier one, near its end, and at multiples of EVERY, or of twice, four
        times... that, if they would take too much room. Before the first `put` an entry's size is not known,
        so there is at most one cut. Of prompts that share a prefix only the first gets a cut at its end;
        another does if no state is put within PROMPTS prompts, since the first may have been cancelled.
        """
        last = len(tokens) - 1
        if last < max(MIN_TOKENS, start + GRAIN):
            return []
        prompt = _array(tokens)
        hashes = prefix_hashes(prompt, self._key)
        self._calls += 1
        while self._pending and self._calls - next(iter(self._pending.values())) > PROMPTS:
            self._pending.popitem(last=False)

        def worth(length: int) -> bool:
            digest = int(hashes[length - 1])
            return (
                length >= start + GRAIN
                and digest not in self._pending
                and self._find(digest, prompt[:length]) is None
            )

        shared, end = min(self._shared(prompt), last), last // GRAIN * GRAIN
        wanted = [shared] if shared >= MIN_TOKENS else []
        if len(tokens) >= LONG and end > shared:
            wanted.append(end)
        spread = [
            length for length in range(EVERY, last + 1, EVERY) if length not in wanted and worth(length)
        ]
        wanted = [length for length in wanted if worth(length)][: self._room(len(tokens))]
        stride, room = EVERY, self._room(len(tokens)) - len(wanted)
        while len(spread) > room:
            stride *= 2
            spread = [length for length in spread if length % stride == 0]
        self._pending |= dict.fromkeys([int(hashes[length - 1]) for length in wanted + spread], self._calls)
        return sorted(wanted + spread)

    def remember(self, tokens: Tokens) -> None:
        """Compare later prompts with this one."""
        if len(tokens) < MIN_TOKENS or self.capacity == 0:
            return
        prompt = _array(tokens).tobytes()
        self._prompts[prompt] = None
        self._prompts.move_to_end(prompt)
        if len(self._prompts) > PROMPTS:
            self._prompts.popitem(last=False)

    def put(self, tokens: Tokens, value: Tensor) -> None:
        """Keep the state after exactly `tokens`, unless they are too few or it exceeds the capacity."""
        prefix = _array(tokens)
        entry = _Entry(prefix.copy(), value)
        self._largest = max(self._largest, value.nbytes)
        if len(prefix) < MIN_TOKENS or entry.nbytes > self.capacity:
            return
        digest = int(prefix_hashes(prefix, self._key)[-1])
        self._pending.pop(digest, None)
        if digest in self._entries:
            self._drop(digest)
        while self._bytes + entry.nbytes > self.capacity:
            self._drop(next(iter(self._entries)))
        self._entries[digest] = entry
        self._bytes += entry.nbytes
        self._count(len(prefix), 1)

    def forget(self, tokens: Tokens) -> None:
        """Drop the states after all prefixes of these tokens."""
        prompt = _array(tokens)
        hashes = prefix_hashes(prompt, self._key)
        for length in self._lengths[self._lengths <= len(prompt)].tolist():
            digest = int(hashes[length - 1])
            if self._find(digest, prompt[:length]):
                self._drop(digest)

    def _find(self, digest: int, prefix: np.ndarray) -> _Entry | None:
        entry = self._entries.get(digest)
        return entry if entry is not None and np.array_equal(entry.tokens, prefix) else None

    def _shared(self, prompt: np.ndarray) -> int:
        """Length of the longest common prefix with an earlier prompt; 0 if it is below MIN_TOKENS."""
        beginning = prompt[:MIN_TOKENS].tobytes()
        longest = 0
        for earlier in self._prompts:
            if earlier.startswith(beginning):
                size = min(len(prompt), len(earlier) // prompt.itemsize)
                different = prompt[:size] != np.frombuffer(earlier, prompt.dtype, size)
                longest = max(longest, int(different.argmax()) if different.any() else size)
        return longest

    def _room(self, tokens: int) -> int:
        """How many entries a prompt of so many tokens may leave."""
        size = self._largest + tokens * np.dtype(np.uint32).itemsize
        if size > self.capacity:
            return 0
        return max(1, self.capacity // SHARE // size) if self._largest else 1

    def _drop(self, digest: int) -> None:
        entry = self._entries.pop(digest)
        self._bytes -= entry.nbytes
        self._count(len(entry.tokens), -1)

    def _count(self, length: int, change: int) -> None:
        self._counts[length] += change
        if self._counts[length] == 0:
            del self._counts[length]
        if len(self._counts) != len(self._lengths):
            self._lengths = np.array(sorted(self._counts), np.intp)


def prefix_hashes(tokens: np.ndarray, key: np.uint64) -> np.ndarray:
    """A hash (uint64) of each prefix of `tokens` (uint32), the first of one token, in one pass.

    It adds up a random number for each (token, position). The key is secret, so that nobody can choose
    prompts that collide.
    """
    places = np.arange(len(tokens), dtype=np.uint64) << np.uint64(32)
    return mix((tokens | places) + key).cumsum(dtype=np.uint64)


def _array(tokens: Tokens) -> np.ndarray:
    """Tokens as uint32, without a copy if possible."""
    if isinstance(tokens, np.ndarray):
        return np.asarray(tokens, np.uint32)
    return np.frombuffer(array("I", tokens), np.uint32)  # `array` reads a list faster than numpy does
