"""Where rows begin that go on from no session: in a start state or none, or after a cached prefix."""

from functools import partial

from torch import Tensor

from rwkv_batch.engine.rows.rows import Refusal
from rwkv_batch.engine.scheduling.row import Row
from rwkv_batch.state.starts.contents import StoredStart
from rwkv_batch.state.starts.prefix_cache import PrefixCache
from rwkv_batch.wire.protocol import LEAST_SUM, GenerateRequest, MixturePart
from state_pool import StatePool

START_TOKEN = 1 << 31  # plus a number: stands in cached prefixes for the start state that is before them
ADAPTER_TOKEN = 1 << 30  # the same for the adapter with which they were fed


class Beginnings:
    """`cache`: states after prefixes of prompts, those of a start state behind a token of its own."""

    def __init__(self, cache: PrefixCache, pool: StatePool) -> None:
        self._cache, self._pool = cache, pool

    def start(self, row: Row) -> StoredStart | None:
        """The start state that the request names, as it is now. Raises Refusal."""
        name = row.life.start_state
        found = self._pool.starts.find(name) if name else None
        if name and found is None:
            raise Refusal("not_found", f"There is no start state {name}.")
        return found

    def check(self, request: GenerateRequest) -> list[MixturePart]:
        """The states in which its rows run, as of `mixed`.

        Raises Refusal, also for a request that goes on and began in other states; ValueError.
        """
        parts = mixed(request)
        names = [part.start_state for part in parts]
        for name in filter(None, names):
            if self._pool.starts.find(name) is None:
                raise Refusal("not_found", f"There is no start state {name}.")
        if request.start_digest not in (b"", self._pool.starts.digest(names)):
            states = " and ".join(filter(None, names))
            message = f"The start state {states} is not what it was when this request was paused."
            raise Refusal("not_found", message)
        return parts

    def cached_tokens(self, row: Row) -> int:
        """How many tokens of its prompt need not be fed, as it goes on from no session.

        Raises Refusal.
        """
        hit = self._longest(row, _past(row, self.start(row)))
        return hit[0] if hit else 0

    def begin(self, row: Row) -> Tensor | None:
        """The bytes that its slot begins with, and what is fed of it; None: as before any token.

        Raises Refusal.
        """
        start = self.start(row)
        past = _past(row, start)
        row.input.fed, state = self._longest(row, past) or (0, None)
        if start and state is None:
            state = self._pool.starts.contents(start)
        if row.request.prefix_cache:
            tokens, before = past + row.prompt, len(past)
            row.input.cuts = [cut - before for cut in self._cache.cuts(tokens, before + row.input.fed)]
            self._cache.remember(tokens)
            row.input.past = past
        return state

    def keep(self, row: Row) -> None:
        """Cache the state in its slot, which has seen what was fed of the prompt."""
        self._copy(row, [*row.input.past, *row.prompt[: row.input.fed]])

    def keep_end(self, row: Row) -> None:
        """Cache the state in its slot, which has seen all of the prompt and what was fed of the draws."""
        if row.request.prefix_cache:
            self._copy(row, [*row.input.past, *row.prompt, *row.drawn[: row.drawn_fed]])

    def forget(self, row: Row) -> None:
        """Later prompts do not begin where it began, nor in what it has left: one of these has broken it."""
        if row.request.prefix_cache:
            self._cache.forget([*row.input.past, *row.prompt])

    def _copy(self, row: Row, tokens: list[int]) -> None:
        assert row.slot is not None
        self._pool.copies.copy_out(row.slot, partial(self._cache.put, tokens))

    def _longest(self, row: Row, past: list[int]) -> tuple[int, Tensor] | None:
        request = row.request
        # Logprobs of a prompt follow from feeding it.
        if not request.prefix_cache or request.prompt_logprobs is not None:
            return None
        hit = self._cache.longest(past + row.prompt)
        return (hit[0] - len(past), hit[1]) if hit else None


def _past(row: Row, start: StoredStart | None) -> list[int]:
    adapter = [ADAPTER_TOKEN | row.life.adapter.number % ADAPTER_TOKEN] if row.life.adapter else []
    return adapter + ([START_TOKEN | start.turn % START_TOKEN] if start else [])


def mixed(request: GenerateRequest) -> list[MixturePart]:
    """The start states in which each row of a request runs, with weights that sum to 1.

    States without weight are left out, but for the first one of a turn: it is the session's. Raises
    ValueError for weights that cancel each other out.
    """
    if not request.mixture:
        return [MixturePart(request.start_state, 1.0)]
    parts = [part for i, part in enumerate(request.mixture) if part.weight or (request.turn and i == 0)]
    total, size = sum(part.weight for part in parts), sum(abs(part.weight) for part in parts)
    if not abs(total) > LEAST_SUM * size:
        raise ValueError("The weights of the mixture sum to 0; give weights with another sum.")
    return [MixturePart(part.start_state, part.weight / total) for part in parts]
