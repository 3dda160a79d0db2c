"""The methods with which all GEMMs of a step together are the fastest, found with few of their combinations.

What a method gains depends on those of the kernels beside it: on whether the next one begins early, and on
what it finds in the cache. So the kinds are compared one after the other first, each with its neighbours as
far as they are known, and then the combinations that should be the fastest by these times are compared.
"""

from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from heapq import nsmallest
from itertools import groupby, product
from math import inf, prod

from rwkv_batch.model.cuda.gemms.kinds import LAYERS, SPLITS, STARTS

Timing = Generator[None, None, None]  # some milliseconds of work between two of its yields
Methods = dict[str, str]  # by kind of GEMM
Seconds = Generator[None, None, list[float]]  # in pieces
Group = tuple[str, ...]  # kinds that are compared in all combinations of their methods

CROSSED = (*SPLITS, *STARTS)  # one group: how long a norm takes decides what starting beside it gains
MOST_CROSSED = 16  # combinations; with more these kinds are compared one after the other
LAST = ("head", LAYERS)  # the group that stands for all layers, or comes after them
NEAR = 1.02  # times as long a step: what may be the fastest with other neighbours
# How many combinations are compared after that: so many, and so many steps as take that long.
MOST, MOST_SECONDS = 32, 0.025
KEPT = 4 * MOST  # of the combinations of some groups, as some of them will turn out to be the same step


class Search:
    """Among methods by kind, the likeliest first.

    compare: the seconds that a step takes with each of some methods of all kinds. step_of: what is equal for
    methods with which the same kernels run.
    """

    def __init__(
        self,
        methods: Mapping[str, Sequence[str]],
        compare: Callable[[list[Methods]], Seconds],
        step_of: Callable[[Methods], Hashable] = lambda methods: tuple(sorted(methods.items())),
    ) -> None:
        self.best: Methods = {kind: of_kind[0] for kind, of_kind in methods.items()}
        self._methods = methods
        self._compare = compare
        self._step_of = step_of
        # Of the groups that have been compared: how many times as long as with the fastest, by methods.
        self._ratios: dict[Group, dict[tuple[str, ...], float]] = {}
        self._compared: set[Hashable] = set()
        self._seconds = inf  # of the fastest in the last comparison
        self._combined = False

    def timing(self) -> Timing:
        """Search. It can be given up and begun again: comparisons that were over by then are not repeated."""
        of_layers = self._groups([kind for kind in self._methods if kind not in LAST])
        for group in of_layers:
            yield from self._compare_group(group)
        if not self._combined:
            likeliest = self._likeliest(of_layers)
            if any(self._step_of(self.best | option) not in self._compared for option in likeliest):
                yield from self._compare_options(likeliest)
            self._combined = True
        yield from self._compare_group(tuple(kind for kind in self._methods if kind in LAST))

    def _groups(self, kinds: list[str]) -> list[Group]:
        if prod(len(self._methods[kind]) for kind in kinds if kind in CROSSED) > MOST_CROSSED:
            return [(kind,) for kind in kinds]
        return [tuple(group) for _, group in groupby(kinds, lambda kind: "" if kind in CROSSED else kind)]

    def _compare_group(self, kinds: Group) -> Timing:
        if kinds in self._ratios:
            return
        each = list(product(*(self._methods[kind] for kind in kinds)))
        seconds = [1.0]
        if len(each) > 1:
            seconds = yield from self._compare_options([_option(kinds, methods) for methods in each])
        ratios = {methods: s / min(seconds) for methods, s in zip(each, seconds, strict=True)}
        self._ratios[kinds] = ratios

    def _likeliest(self, groups: list[Group]) -> list[Methods]:
        """Combinations whose groups were about as fast as the fastest, the likeliest first; none twice."""
        found: list[tuple[float, Methods]] = [(0.0, {})]  # how much slower, by the sum of its groups
        for kinds in groups:
            near = {methods: ratio for methods, ratio in self._ratios[kinds].items() if ratio <= NEAR}
            combined = (
                (slower + ratio - 1, others | _option(kinds, methods))
                for slower, others in found
                for methods, ratio in near.items()
            )
            found = nsmallest(KEPT, combined, key=lambda each: each[0])
        by_step: dict[Hashable, Methods] = {}
        for _, option in found:
            by_step.setdefault(self._step_of(self.best | option), option)
        return list(by_step.values())[: min(MOST, int(MOST_SECONDS / self._seconds))]

    def _compare_options(self, options: list[Methods]) -> Seconds:
        """With all other kinds by the fastest so far; the fastest of these is it from now on."""
        steps = [self.best | option for option in options]
        seconds = yield from self._compare(steps)
        self._seconds = min(seconds)
        self._compared.update(map(self._step_of, steps))
        self.best = steps[seconds.index(self._seconds)]
        return seconds


def _option(kinds: Group, methods: tuple[str, ...]) -> Methods:
    return dict(zip(kinds, methods, strict=True))
