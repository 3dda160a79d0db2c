"""Which of several models runs the next step, so that all that are busy get the same time of the device."""

from collections.abc import Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class Shares(Generic[T]):
    """The time that each of some users of one device has had."""

    def __init__(self) -> None:
        self._seconds: dict[T, float] = {}
        self._busy: list[T] = []  # at the last choice

    def choose(self, busy: Sequence[T]) -> T:
        """The busy one that has had the least time.

        One that was idle begins where the others are: what it has not used is not saved up for it.
        """
        going_on = [self._seconds[user] for user in busy if user in self._busy]
        now = min(going_on) if going_on else max(self._seconds.values(), default=0.0)
        for user in busy:
            if user not in self._busy:
                self._seconds[user] = max(self._seconds.get(user, 0.0), now)
        self._busy = list(busy)
        return min(busy, key=self._seconds.__getitem__)

    def spent(self, user: T, seconds: float) -> None:
        """It has had so much more."""
        self._seconds[user] = self._seconds.get(user, 0.0) + seconds

    def forget(self, user: T) -> None:
        """It is not there any more."""
        self._seconds.pop(user, None)
        self._busy = [other for other in self._busy if other != user]
