"""The prefix cache against a plain dictionary, and the lengths at which it asks for states."""

from collections import OrderedDict
from dataclasses import dataclass
from weakref import WeakKeyDictionary, ref

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rwkv_batch.state.starts import prefix_cache
from rwkv_batch.state.starts.prefix_cache import GRAIN, LONG, MIN_TOKENS, PrefixCache, prefix_hashes


@dataclass(frozen=True)
class State:
    """A value: what the state has seen, and how large it claims to be."""

    seen: tuple[int, ...]
    nbytes: int = 1000


ROOMY = 10**9


PUT = WeakKeyDictionary()  # by cache: a weak reference to each value that it was given


def put(cache, tokens, nbytes=1000):
    state = State(tuple(tokens), nbytes)
    PUT.setdefault(cache, []).append(ref(state))
    cache.put(tokens, state)
    return state


def held(cache):
    """Values that the cache keeps alive, as nobody else has them, and the bytes that it counts for them."""
    states = [state for one in PUT.get(cache, []) if (state := one())]
    return len(states), sum(state.nbytes + 4 * len(state.seen) for state in states)


def feed(cache, tokens):
    """What an engine does with a prompt: how many tokens it need not feed, and the lengths that it keeps."""
    hit = cache.longest(tokens)
    start = hit[0] if hit else 0
    if hit:
        assert hit[1].seen == tuple(tokens[:start])
    cuts = cache.cuts(tokens, start)
    cache.remember(tokens)
    for length in cuts:
        put(cache, tokens[:length])
    return start, cuts


def text(length, of=0):
    """Tokens that no other `of` shares."""
    return [(17 * i + 700 * of) % 60000 for i in range(length)]


# Prompts that share beginnings of many lengths: a trunk, left at some place for one of three branches.
TRUNK = text(MIN_TOKENS + 12)
BRANCHED = st.builds(
    lambda at, branch, length: (TRUNK[:at] + text(80, branch))[:length],
    st.sampled_from([0, 1, MIN_TOKENS - 1, MIN_TOKENS, MIN_TOKENS + 3, MIN_TOKENS + 12]),
    st.integers(1, 3),
    st.integers(MIN_TOKENS - 2, MIN_TOKENS + 12),
)


class AgainstADictionary(RuleBasedStateMachine):
    """The model keeps token tuples in order of use and looks at every prefix there is."""

    CAPACITY = 9000

    def __init__(self):
        super().__init__()
        self.cache = PrefixCache(self.CAPACITY)
        self.model = OrderedDict()  # size by tokens

    @rule(tokens=BRANCHED, size=st.sampled_from([0, 700, 1500, 4000, 8704, 8800, 20000]))
    def put(self, tokens, size):
        put(self.cache, tokens, size)
        if len(tokens) < MIN_TOKENS or size + 4 * len(tokens) > self.CAPACITY:
            return
        self.model.pop(tuple(tokens), None)
        self.model[tuple(tokens)] = size
        while self.bytes() > self.CAPACITY:
            self.model.popitem(last=False)

    @rule(
        tokens=BRANCHED,
        form=st.sampled_from([list, tuple, np.array, lambda tokens: np.array(tokens, np.uint32)]),
    )
    def longest(self, tokens, form):
        found = self.cache.longest(form(tokens))
        prefix = next(
            (tuple(tokens[:n]) for n in range(len(tokens) - 1, 0, -1) if tuple(tokens[:n]) in self.model),
            None,
        )
        if prefix is None:
            assert found is None
        else:
            assert found == (len(prefix), State(prefix, self.model[prefix]))
            self.model.move_to_end(prefix)

    @rule(tokens=BRANCHED, start=st.integers(0, 100))
    def cuts(self, tokens, start):
        self.cache.remember(tokens)
        for length in self.cache.cuts(tokens, start):
            assert start < length < len(tokens)
            assert tuple(tokens[:length]) not in self.model

    def bytes(self):
        return sum(size + 4 * len(tokens) for tokens, size in self.model.items())

    @invariant()
    def counted(self):
        assert held(self.cache) == (len(self.model), self.bytes())


TestAgainstADictionary = AgainstADictionary.TestCase
TestAgainstADictionary.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_prompt_is_never_covered_whole():
    cache = PrefixCache(ROOMY)
    shorter, whole = put(cache, text(99)), put(cache, text(100))
    assert cache.longest(text(100)) == (99, shorter)
    assert cache.longest(text(101)) == (100, whole)


def test_equal_hashes_of_different_tokens_are_told_apart(monkeypatch):
    monkeypatch.setattr(prefix_cache, "prefix_hashes", lambda tokens, key: np.zeros(len(tokens), np.uint64))
    cache = PrefixCache(ROOMY)
    put(cache, text(100))
    assert cache.longest(text(101, of=1)) is None
    assert cache.longest(text(101))[0] == 100
    other = put(cache, text(90, of=1))
    assert cache.longest(text(101, of=1)) == (90, other)
    assert held(cache)[0] == 1


def test_a_hash_tells_order_and_length():
    key = np.uint64(5)
    tokens = np.array([1, 2, 0, 0], np.uint32)
    hashes = prefix_hashes(tokens, key).tolist()
    assert len({*hashes, int(prefix_hashes(tokens[[1, 0, 2, 3]], key)[1])}) == 5
    assert prefix_hashes(tokens[:2], key).tolist() == hashes[:2]
    assert prefix_hashes(tokens, np.uint64(6)).tolist() != hashes


def test_the_least_recently_used_leave_first():
    size = 1000 + 4 * 100
    cache = PrefixCache(3 * size)
    for of in range(3):
        put(cache, text(100, of))
    assert cache.longest(text(101, 0))  # 1 is now the oldest
    put(cache, text(100, 3))
    assert [cache.longest(text(101, of)) is not None for of in range(4)] == [True, False, True, True]
    put(cache, text(100, 4), nbytes=1001)  # one byte too many for three
    assert held(cache)[0] == 2
    assert cache.longest(text(101, 0)) is None and cache.longest(text(101, 2)) is None


def test_what_is_larger_than_the_capacity_is_not_kept_and_drives_nothing_out():
    cache = PrefixCache(2000)
    put(cache, text(100))
    put(cache, text(100, of=1), nbytes=1601)
    assert cache.longest(text(101)) and cache.longest(text(101, of=1)) is None
    put(cache, text(100, of=1), nbytes=1600)
    assert cache.longest(text(101, of=1)) and held(cache)[1] == 2000


def test_callers_may_reuse_their_tokens():
    cache, tokens = PrefixCache(ROOMY), np.array(text(100), np.uint32)
    cache.put(tokens, State(()))
    tokens[:] = 7
    assert cache.longest(text(101)) and cache.longest(np.full(101, 7)) is None


def test_a_shared_beginning_is_found_by_the_second_prompt_and_used_by_the_third():
    cache, system = PrefixCache(ROOMY), text(150)
    assert feed(cache, system + text(20, of=1)) == (0, [])
    assert feed(cache, system + text(30, of=2)) == (0, [150])
    assert feed(cache, system + text(30, of=3)) == (150, [])


def test_of_several_shared_beginnings_the_longest_counts():
    cache, system = PrefixCache(ROOMY), text(100)
    for of in (1, 2):
        cache.remember(system + text(40, of))
    assert cache.cuts(system + text(30, of=1) + text(50, of=3), 0) == [130]
    assert cache.cuts(system + text(30, of=1), 0) == [129]  # one token must be left to feed
    assert cache.cuts(system, 0) == [99]


@pytest.mark.parametrize("shared, cuts", [(MIN_TOKENS - 1, []), (MIN_TOKENS, [MIN_TOKENS])])
def test_a_short_shared_beginning_is_not_worth_a_state(shared, cuts):
    cache = PrefixCache(ROOMY)
    cache.remember(text(shared) + text(50, of=1))
    assert cache.cuts(text(shared) + text(50, of=2), 0) == cuts


def test_neither_is_one_that_saves_a_few_tokens_more():
    cache, system = PrefixCache(ROOMY), text(150)
    cache.remember(system + text(50, of=1))
    prompt = system + text(50, of=2)
    assert cache.cuts(prompt, 150 - GRAIN + 1) == []
    assert cache.cuts(prompt, 150 - GRAIN) == [150]


def test_a_conversation_that_grows_feeds_only_what_is_new():
    cache, prompt = PrefixCache(ROOMY), text(LONG)
    for turn in range(1, 6):
        before = len(prompt)
        start, _ = feed(cache, prompt)
        assert turn == 1 or start >= before - 100 - GRAIN
        prompt = prompt + text(100, of=turn)


@pytest.mark.parametrize("length, cut", [(LONG - 1, []), (LONG, [240]), (LONG + 1, [256]), (300, [288])])
def test_a_long_prompt_leaves_a_state_near_its_end(length, cut):
    assert PrefixCache(ROOMY).cuts(text(length), 0) == cut


@pytest.mark.parametrize(
    "length, start, stored, cuts",
    [
        (1700, 0, [], [512, 1024, 1536, 1696]),
        (1700, 600, [], [1024, 1536, 1696]),
        (1700, 0, [1024], [512, 1536, 1696]),
        (1025, 0, [1024], [512]),  # near the end is what is stored already
    ],
)
def test_a_very_long_prompt_leaves_states_on_the_way(length, start, stored, cuts):
    cache = PrefixCache(ROOMY)
    for prefix in [
        text(100, of=1),
        *(text(n) for n in stored),
    ]:  # with the first the size of an entry is known
        put(cache, prefix)
    assert cache.cuts(text(length), start) == cuts


def test_a_prompt_takes_no_more_than_its_share_of_the_room():
    entry = 100_000 + 4 * 10_000
    for entries, most in [(400, 20), (40, 10), (8, 2), (4, 1), (1, 1)]:
        cache = PrefixCache(entries * entry)
        put(cache, text(100, of=1), nbytes=100_000)
        cuts = cache.cuts(text(10_000), 0)
        assert 9984 in cuts and most // 2 <= len(cuts) <= most
    assert cuts == [9984]


@pytest.mark.parametrize("size_known, cuts", [(False, [300]), (True, [300, 512, 1024, 1184])])
def test_where_prompts_part_comes_before_their_ends(size_known, cuts):
    cache = PrefixCache(ROOMY)
    cache.remember(text(300) + text(300, of=1))
    if size_known:
        put(cache, text(100, of=5))
    assert cache.cuts(text(300) + text(900, of=2), 0) == cuts


def test_of_prompts_that_come_together_one_leaves_the_state_they_share():
    cache, system = PrefixCache(ROOMY), text(150)
    cuts = []
    for of in range(1, 6):
        prompt = system + text(30, of)
        cuts.append(cache.cuts(prompt, 0))
        cache.remember(prompt)
    assert cuts == [[], [150], [], [], []]
    put(cache, system)
    assert cache.longest(system + text(30, of=6))[0] == 150


def test_a_state_that_never_comes_is_asked_for_again():
    cache = PrefixCache(ROOMY)
    calls = [cache.cuts(text(300), 0) for _ in range(prefix_cache.PROMPTS + 2)]
    assert calls == [[288], *[[]] * prefix_cache.PROMPTS, [288]]


def test_a_state_that_has_left_is_asked_for_again():
    cache = PrefixCache(3000)
    for _ in range(2):
        assert cache.cuts(text(300), 0) == [288]
        put(cache, text(288))
        put(cache, text(400, of=1))  # drives it out


def test_states_that_do_not_fit_are_not_asked_for():
    cache = PrefixCache(5000)
    put(cache, text(100), nbytes=6000)
    assert cache.cuts(text(1000), 0) == []


def test_a_capacity_of_nothing_keeps_nothing():
    cache = PrefixCache(0)
    for _ in range(3):
        assert feed(cache, text(1000)) == (0, [])
    assert held(cache) == (0, 0)


def test_old_prompts_are_forgotten_unless_they_come_again():
    cache, system = PrefixCache(ROOMY), text(100)
    again = system + text(20, of=1)
    for prompt in [
        again,
        text(100, of=9),
        *(text(100, of) for of in range(10, 8 + prefix_cache.PROMPTS)),
        again,
        text(100, of=8),
    ]:
        cache.remember(prompt)
    assert cache.cuts(system + text(20, of=2), 0) == [100]
    assert cache.cuts(text(100, of=9) + text(20, of=2), 0) == []


def test_a_prefix_that_is_put_again_takes_the_new_value_and_no_more_room():
    cache = PrefixCache(ROOMY)
    put(cache, text(100))
    value = put(cache, text(100), nbytes=500)
    assert cache.longest(text(101)) == (100, value)
    assert held(cache) == (1, 900)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 1200), st.integers(1, 3), st.integers(0, 700)), max_size=12),
    st.integers(0, 40_000),
)
def test_any_prompts(shapes, capacity):
    """Beginnings of a trunk followed by one of three ends: every hit is a true prefix, and never more is kept
    than fits.
    """
    cache = PrefixCache(capacity)
    for trunk, of, rest in shapes:
        prompt = text(trunk) + text(rest, of)
        start, cuts = feed(cache, prompt)
        assert cuts == sorted(set(cuts)) and all(start < cut < len(prompt) for cut in cuts)
        assert len(cuts) <= max(1, capacity // 4000)
        assert held(cache)[1] <= capacity
