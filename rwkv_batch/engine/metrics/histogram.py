"""A histogram of fixed buckets."""

from bisect import bisect_left


class Histogram:
    """bounds: upper bounds of the buckets, ascending. A value that equals one is inside, as in Prometheus."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # of each bucket alone; the last one has no bound
        self.total = 0.0  # of all values

    def observe(self, value: float, times: int = 1) -> None:
        """The value has occurred so many times; fewer than none takes occurrences back."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def values(self) -> list[float]:
        """What it has counted, in the order of wire.metrics.Series."""
        return [*self.counts, self.total]
