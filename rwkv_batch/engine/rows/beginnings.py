"""Where sequences begin that go on from no session: in a start state or none, or after a cached prefix."""

from functools import partial

from torch import Tensor

from rwkv_batch.engine.scheduling.sequence import Sequence, mixed
from rwkv_batch.state.prefix_cache import PrefixCache
from rwkv_batch.state.starts.contents import StoredStart
from rwkv_batch.wire.protocol import GenerateRequest
from state_pool import StatePool

START_TOKEN = 1 << 31  # plus a number: stands in cached prefixes for the start state that is before them
ADAPTER_TOKEN = 1 << 30  # the same for the adapter with which they were fed


class StartStateMissing(ValueError):
    """There is no start state of the name, or it is not what it was; one sentence."""


class Beginnings:
    """`cache`: states after prefixes of prompts, those of a start state behind a token of its own."""

    def __init__(self, cache: PrefixCache, pool: StatePool) -> None:
        self._cache, self._pool = cache, pool

    def start(self, seq: Sequence) -> StoredStart | None:
        """The start state that the request names, as it is now. Raises StartStateMissing."""
        name = seq.start_state
        found = self._pool.starts.find(name) if name else None
        if name and found is None:
            raise StartStateMissing(f"There is no start state {name}.")
        return found

    def check(self, request: GenerateRequest) -> None:
        """Raises StartStateMissing, also for a request that goes on and began in other states; ValueError."""
        names = mixed(request)[0]
        for name in filter(None, names):
            if self._pool.starts.find(name) is None:
                raise StartStateMissing(f"There is no start state {name}.")
        if request.start_digest not in (b"", self._pool.starts.digest(names)):
            states = " and ".join(filter(None, names))
            raise StartStateMissing(
                f"The start state {states} is not what it was when this request was paused."
            )

    def cached_tokens(self, seq: Sequence) -> int:
        """How many tokens of its prompt need not be fed, as it goes on from no session.

        Raises StartStateMissing.
        """
        hit = self._longest(seq, _past(seq, self.start(seq)))
        return hit[0] if hit else 0

    def begin(self, seq: Sequence) -> Tensor | None:
        """The bytes that its slot begins with, and what is fed of it; None: as before any token.

        Raises StartStateMissing.
        """
        start = self.start(seq)
        past = _past(seq, start)
        seq.fed, state = self._longest(seq, past) or (0, None)
        if start and state is None:
            state = self._pool.starts.contents(start)
        if seq.request.prefix_cache:
            tokens = past + seq.prompt
            seq.cuts = [cut - len(past) for cut in self._cache.cuts(tokens, len(past) + seq.fed)]
            self._cache.remember(tokens)
            seq.cut_past = past
        return state

    def keep(self, seq: Sequence, cut: int) -> None:
        """Cache the state in its slot, which has seen `cut` tokens of the prompt."""
        self._copy(seq, seq.cut_past + seq.prompt[:cut])

    def keep_end(self, seq: Sequence) -> None:
        """Cache the state in its slot, which has seen all of the prompt and what was fed of the draws."""
        if seq.request.prefix_cache:
            self._copy(seq, seq.cut_past + seq.prompt + seq.drawn[: seq.drawn_fed])

    def _copy(self, seq: Sequence, tokens: list[int]) -> None:
        assert seq.slot is not None
        self._pool.copies.copy_out(seq.slot, partial(self._cache.put, tokens))

    def _longest(self, seq: Sequence, past: list[int]) -> tuple[int, Tensor] | None:
        request = seq.request
        # Logprobs of a prompt follow from feeding it.
        if not request.prefix_cache or request.prompt_logprobs is not None:
            return None
        hit = self._cache.longest(past + seq.prompt)
        return (hit[0] - len(past), hit[1]) if hit else None


def _past(seq: Sequence, start: StoredStart | None) -> list[int]:
    adapter = [ADAPTER_TOKEN | seq.adapter.number % ADAPTER_TOKEN] if seq.adapter else []
    return adapter + ([START_TOKEN | start.turn % START_TOKEN] if start else [])
